// dk and dv (or one of them) for float64, where registers are short. Two warps (partners) own the
// same keys. Each computes the scores of half of the queries, and sums half of the columns. (D57)
//
//   for each tile of block_n keys:                            one thread block
//     dk = 0, dv = 0                                          half of the columns of a warp's keys
//     for each batch entry that shares these keys:            heads of a group, broadcast axes
//       for each block of block_m queries that see some key:
//         dp^T = dropout(v dout^T);  s^T = k q^T              half of the queries
//         p^T = exp(score(s^T) - lse);  ds^T = p^T (dp^T - delta) score'(s^T)
//         dv += dropout(p^T) dout;  dk += ds^T q              partners exchange p^T and ds^T
//     dk *= scale
//
// Shared memory: k and v of the tile, one block of q and one of dout (each in two halves), the
// statistics of two blocks, and the buffers through which partners exchange operands. q arrives
// while dp^T is computed, and dout of the next block while dk is computed.
#include "portable/exchange.cuh"
#include "tile/matmul_sm80.cuh"
#include "portable/dkv_rows.cuh"
#include "portable/fully_masked_rows.cuh"

namespace cuflash {

static_assert(Config::partners == 2, "two warps share rows and exchange halves");

constexpr int row_warps = Config::num_warps / 2;
constexpr int slices = Config::block_n / (16 * row_warps);
static_assert(slices * 16 * row_warps == Config::block_n, "every warp owns whole slices");
static_assert(Config::block_m <= Config::num_threads, "a thread copies the statistics of one row");

constexpr int half_rows = Config::block_m / 2;
constexpr int steps = half_rows / 16;
static_assert(steps * 16 == half_rows, "one product sums 16 queries");

struct SharedMemory {
  using KTile = SmemTile<Config::block_n, Config::head_dim>;
  using VTile = SmemTile<Config::block_n, Config::head_dim_v>;
  using QTile = SmemTile<half_rows, Config::head_dim>;
  using DoutTile = SmemTile<half_rows, Config::head_dim_v>;

  KTile k;
  VTile v;
  QTile q[2];
  DoutTile dout[2];
  LeftOperand<slices, steps> p[Config::num_warps];
  LeftOperand<slices, steps> ds[Config::num_warps];
  RowStatistics rows[2][Config::block_m];
};

static_assert(!Config::grad_k || dk_columns % SharedMemory::QTile::panel_columns == 0,
              "columns are whole panels");
static_assert(!Config::grad_v || dv_columns % SharedMemory::DoutTile::panel_columns == 0,
              "columns are whole panels");

// Adds what the queries of the owner's `index`-th batch entry contribute.
CUFLASH_DEVICE void add_entry(const BackwardParams& params, SharedMemory& smem, int index,
                              Gradients<slices>& acc) {
  const Work work = Work::of_thread_block(params);
  const BatchIndex entry = work.entry(params, index);
  const int first_key = work.first_key;
  const Score score(params.score, entry);
  const Range rows = score.q_range(first_key, first_key + Config::block_n);
  const Range keys{first_key, first_key + Config::block_n};
  const BlockRanges blocks = score.q_blocks(keys.begin, keys.end);
  VisitedBlocks<Walk::queries> visited(score, blocks, keys);
  int m_block = visited.first_from(blocks.begin);
  if (m_block >= blocks.end) return;
  if constexpr (!Config::shared_keys) {
    __syncthreads();  // every warp has read the keys and values of the previous entry
    load_keys(params, smem, entry, first_key);
  }

  const int partner = partner_index();
  const int first_q = score.seqlen.first_q;
  const RowSource q(params.q, params.q_layout, entry, first_q, params.head_dim);
  const RowSource dout(params.dout, params.dout_layout, entry, first_q, params.head_dim_v);
  const RowStatistics* statistics = params.rows + entry * params.rows_layout.batch + first_q;

  int stage = 0;  // buffer of the statistics
  const auto load_dout = [&](int m_block, int to_stage) {
    const int first_row = m_block * Config::block_m;
    load_tile(smem.dout[0], dout, first_row, rows);
    load_tile(smem.dout[1], dout, first_row + half_rows, rows);
    load_statistics(smem.rows[to_stage], statistics, first_row, rows);
    ptx::cp_async_commit();
  };
  load_dout(m_block, stage);
#pragma unroll 1
  for (int next; m_block < blocks.end; m_block = next) {
    const int first_row = m_block * Config::block_m;
    const int warp = ptx::thread_index() / 32;  // computed anew: it occupies no register in between
    const int warp_key = warp % row_warps * 16 * slices;
    const int other_warp = (warp + row_warps) % Config::num_warps;
    const bool one_segment = visited.has_tile_segment(m_block);
    next = visited.next_after(m_block);
    ptx::cp_async_wait<0>();
    __syncthreads();  // dout has arrived, and every warp has read the previous q
    load_tile(smem.q[0], q, first_row, rows);
    load_tile(smem.q[1], q, first_row + half_rows, rows);
    ptx::cp_async_commit();
    Real s_acc[slices][half_rows / 8][4];
    Real dp_acc[slices][half_rows / 8][4];
    if constexpr (Config::grad_k) {
      if constexpr (Score::may_hide_rows) clear_fully_masked_rows(smem.rows[stage], smem.dout);
      clear(dp_acc);
      multiply_transposed<columns_of_dp>(dp_acc, read_rows(smem.v, warp_key),
                                         read_columns(smem.dout[partner]));
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // q has arrived
    if constexpr (Score::may_hide_rows) {
      if constexpr (!Config::grad_k) clear_fully_masked_rows(smem.rows[stage], smem.dout);
      clear_fully_masked_rows(smem.rows[stage], smem.q);
    }
    const int own_row = first_row + partner * half_rows, own_key = first_key + warp_key;
    const KeysAhead<slices, half_rows / 8> look_ups(score, own_row, own_key);
    clear(s_acc);
    multiply_transposed(s_acc, read_rows(smem.k, warp_key), read_columns(smem.q[partner]));

    const RowStatistics* own_rows = &smem.rows[stage][partner * half_rows];
    if (blocks.masked(m_block) || !one_segment) {
      compute_p_ds<true>(s_acc, dp_acc, own_rows, score, own_row, own_key, look_ups);
    } else {
      compute_p_ds<false>(s_acc, dp_acc, own_rows, score, own_row, own_key, look_ups);
    }
    Register p_frag[slices][steps][operand_registers];
    Register ds_frag[slices][steps][operand_registers];
    to_operand(p_frag, s_acc);
    if constexpr (Config::grad_v) smem.p[warp_index()].store(p_frag);
    if constexpr (Config::grad_k) {
      to_operand(ds_frag, dp_acc);
      smem.ds[warp_index()].store(ds_frag);
    }
    __syncthreads();  // both partners have written their halves of p and ds
    if constexpr (Config::grad_v) {
      const int column = first_own_column(Config::head_dim_v);
      multiply(acc.dv, p_frag, read_sums(smem.dout[partner], column));
      smem.p[other_warp].load(p_frag);
      multiply(acc.dv, p_frag, read_sums(smem.dout[partner ^ 1], column));
    }
    __syncthreads();  // every warp has read dout
    stage ^= 1;
    if (next < blocks.end) load_dout(next, stage);
    if constexpr (Config::grad_k) {
      const int column = first_own_column(Config::head_dim);
      multiply(acc.dk, ds_frag, read_sums(smem.q[partner], column));
      smem.ds[other_warp].load(ds_frag);
      multiply(acc.dk, ds_frag, read_sums(smem.q[partner ^ 1], column));
    }
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads,
                                             cuflash::Config::blocks_per_sm)
    cuflash_backward_dkv_partners(const __grid_constant__ cuflash::BackwardParams params) {
  using namespace cuflash;
  SharedMemory& smem = shared_memory<SharedMemory>();
  Gradients<slices> acc;
  clear(acc.dk);
  clear(acc.dv);
  if constexpr (Config::shared_keys) {
    const Work work = Work::of_thread_block(params);
    load_keys(params, smem, work.entry(params, 0), work.first_key);
  }
#pragma unroll 1
  for (int index = 0; index < params.grid.entries_per_owner; ++index) {
    add_entry(params, smem, index, acc);
  }
  store_gradients(params, warp_index() % row_warps, acc);
}
