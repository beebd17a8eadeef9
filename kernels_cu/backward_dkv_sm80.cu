// dk and dv (or one of them) for tensor cores of sm_80 and later (mma.sync), without atomics. Every
// sum has a fixed order.
//
//   for each tile of block_n keys:                            one thread block
//     dk = 0, dv = 0
//     for each batch entry that shares these keys:            heads of a group, broadcast axes
//       for each block of block_m queries that see some key:
//         s^T = k q^T;  p^T = exp(score(s^T) - lse)           registers, 16 keys per warp and slice
//         dp^T = dropout(v dout^T)
//         ds^T = p^T (dp^T - delta) score'(s^T)
//         dv += dropout(p^T) dout;  dk += ds^T q              p^T, ds^T reused in registers
//     dk *= scale
//
// Scores are transposed, so that the rows of a warp are its keys: both results are then sums over
// columns that stay within the warp. Shared memory holds k and v of the tile, and two stages of q,
// dout and the statistics of their rows. One stage is loaded while the other is used. In float32 q
// and dout are split into TF32 parts, and a pass for dk or dv alone has a single stage. For dk, q
// arrives during dp^T and the next dout during the rest. For dv, dout arrives during s^T and the
// next q during the rest. (D37)
#include "tile/matmul.cuh"
#include "portable/dkv_rows.cuh"
#include "portable/fully_masked_rows.cuh"

namespace cuflash {

constexpr int stages = splits_tiles && !(Config::grad_k && Config::grad_v) ? 1 : 2;

using KTile = OperandTile<Config::block_n, Config::head_dim>;
using VTile = OperandTile<Config::block_n, Config::head_dim_v>;
using QTile = StreamedTile<Config::block_m, Config::head_dim>;
using DoutTile = StreamedTile<Config::block_m, Config::head_dim_v>;

struct SharedMemory {
  KTile k;
  VTile v;
  QTile q[stages];
  DoutTile dout[stages];
  RowStatistics rows[2][Config::block_m];

  CUFLASH_DEVICE QTile& q_of(int stage) { return q[stages == 1 ? 0 : stage]; }
  CUFLASH_DEVICE DoutTile& dout_of(int stage) { return dout[stages == 1 ? 0 : stage]; }
};

constexpr int slices = Config::block_n / (16 * Config::num_warps);
static_assert(slices * 16 * Config::num_warps == Config::block_n, "every warp owns whole slices");
static_assert(Config::block_m <= Config::num_threads, "a thread copies the statistics of one row");

static_assert(!Config::grad_k || dk_columns % QTile::panel_columns == 0,
              "columns are whole panels");
static_assert(!Config::grad_v || dv_columns % DoutTile::panel_columns == 0,
              "columns are whole panels");

// Adds what the queries of the owner's `index`-th batch entry contribute. `stage` alternates from
// one block of queries to the next.
CUFLASH_DEVICE void add_entry(const BackwardParams& params, SharedMemory& smem, int index,
                              int& stage, Gradients<slices>& acc) {
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

  const int warp_key = warp_index() * 16 * slices;
  const int first_q = score.seqlen.first_q;
  const RowSource q(params.q, params.q_layout, entry, first_q, params.head_dim);
  const RowSource dout(params.dout, params.dout_layout, entry, first_q, params.head_dim_v);
  const RowStatistics* statistics = params.rows + entry * params.rows_layout.batch + first_q;

  const auto load_q = [&](int m_block, int to_stage) {
    load_tile(smem.q_of(to_stage), q, m_block * Config::block_m, rows);
  };
  const auto load_dout = [&](int m_block, int to_stage) {
    load_tile(smem.dout_of(to_stage), dout, m_block * Config::block_m, rows);
  };
  const auto load_ahead = [&](int m_block, int to_stage) {
    if constexpr (stages == 2 || !Config::grad_k) load_q(m_block, to_stage);
    if constexpr (stages == 2 || Config::grad_k) load_dout(m_block, to_stage);
    load_statistics(smem.rows[to_stage], statistics, m_block * Config::block_m, rows);
    ptx::cp_async_commit();
  };
  const auto wait_for_tiles = [&](auto&... tiles) {
    ptx::cp_async_wait<0>();
    (split(tiles), ...);
    __syncthreads();  // the tiles are complete, and every warp has read what the next copy replaces
    if constexpr (Score::may_hide_rows) clear_fully_masked_rows(smem.rows[stage], &tiles...);
  };
  load_ahead(m_block, stage);
#pragma unroll 1
  for (int next; m_block < blocks.end; m_block = next) {
    const int first_row = m_block * Config::block_m;
    const bool one_segment = visited.has_tile_segment(m_block);
    next = visited.next_after(m_block);
    QTile& q_tile = smem.q_of(stage);
    DoutTile& dout_tile = smem.dout_of(stage);
    Real s_acc[slices][Config::block_m / 8][4];
    Real dp_acc[slices][Config::block_m / 8][4];
    const auto multiply_s = [&] {
      clear(s_acc);
      multiply_transposed(s_acc, read_rows(smem.k, warp_key), read_columns(q_tile));
    };
    const auto multiply_dp = [&] {
      clear(dp_acc);
      multiply_transposed<columns_of_dp>(dp_acc, read_rows(smem.v, warp_key),
                                         read_columns(dout_tile));
    };
    if constexpr (stages == 2) {
      wait_for_tiles(q_tile, dout_tile);
    } else if constexpr (Config::grad_k) {
      wait_for_tiles(dout_tile);
      load_q(m_block, 0);
      ptx::cp_async_commit();
      multiply_dp();
      wait_for_tiles(q_tile);
    } else {
      wait_for_tiles(q_tile);
      load_dout(m_block, 0);
      ptx::cp_async_commit();
      multiply_s();
      wait_for_tiles(dout_tile);
    }
    if (next < blocks.end) load_ahead(next, stage ^ 1);
    if constexpr (stages == 2 || Config::grad_k) multiply_s();
    if constexpr (stages == 2 && Config::grad_k) multiply_dp();
    if (blocks.masked(m_block) || !one_segment) {
      compute_p_ds<true>(s_acc, dp_acc, smem.rows[stage], score, first_row, first_key + warp_key);
    } else {
      compute_p_ds<false>(s_acc, dp_acc, smem.rows[stage], score, first_row, first_key + warp_key);
    }
    if constexpr (Config::grad_v) {
      Register p_frag[slices][Config::block_m / 16][operand_registers];
      to_operand(p_frag, s_acc);
      multiply(acc.dv, p_frag, read_sums(dout_tile, first_own_column(Config::head_dim_v)));
    }
    if constexpr (Config::grad_k) {
      Register ds_frag[slices][Config::block_m / 16][operand_registers];
      to_operand(ds_frag, dp_acc);
      multiply(acc.dk, ds_frag, read_sums(q_tile, first_own_column(Config::head_dim)));
    }
    stage ^= 1;
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads,
                                             cuflash::Config::blocks_per_sm)
    cuflash_backward_dkv_sm80(const __grid_constant__ cuflash::BackwardParams params) {
  using namespace cuflash;
  SharedMemory& smem = shared_memory<SharedMemory>();
  Gradients<slices> acc;
  clear(acc.dk);
  clear(acc.dv);
  if constexpr (Config::shared_keys) {
    const Work work = Work::of_thread_block(params);
    load_keys(params, smem, work.entry(params, 0), work.first_key);
  }
  int stage = 0;
#pragma unroll 1
  for (int index = 0; index < params.grid.entries_per_owner; ++index) {
    add_entry(params, smem, index, stage, acc);
  }
  store_gradients(params, warp_index(), acc);
}
