// dq for float64, where registers are short. Two warps (partners) own the same queries. Each
// computes the scores of half of the keys, and sums half of the columns. (D57)
//
//   for each tile of block_m rows of q:                       one thread block
//     dq = 0                                                  half of the columns of a warp's rows
//     for each batch entry that shares these rows:            one, unless q is broadcast
//       for each block of block_n keys that some row sees:
//         dp = dropout(dout v^T);  s = q k^T                  half of the keys
//         p = exp(score(s) - lse);  ds = p (dp - delta) score'(s)
//         dq += ds k                                          partners exchange ds
//     dq *= scale
//
// Shared memory: q and dout of the tile, one block of k and one of v (each in two halves), and the
// buffers through which partners exchange operands. k arrives while dp is computed, and v of the
// next block while s and dq are computed.
#include "portable/exchange.cuh"
#include "tile/matmul_sm80.cuh"
#include "portable/dq_rows.cuh"

namespace cuflash {

static_assert(Config::partners == 2, "two warps share rows and exchange halves");

constexpr int row_warps = Config::num_warps / 2;
constexpr int slices = Config::block_m / (16 * row_warps);
static_assert(slices * 16 * row_warps == Config::block_m, "every warp owns whole slices");

constexpr int half_keys = Config::block_n / 2;
constexpr int steps = half_keys / 16;
static_assert(steps * 16 == half_keys, "one product sums 16 keys");

struct SharedMemory {
  using QTile = SmemTile<Config::block_m, Config::head_dim>;
  using DoutTile = SmemTile<Config::block_m, Config::head_dim_v>;
  using KTile = SmemTile<half_keys, Config::head_dim>;
  using VTile = SmemTile<half_keys, Config::head_dim_v>;

  QTile q;
  DoutTile dout;
  KTile k[2];
  VTile v[2];
  LeftOperand<slices, steps> ds[Config::num_warps];
};

constexpr int own_columns = Config::head_dim / own_parts;
static_assert(own_columns % SharedMemory::KTile::panel_columns == 0, "columns are whole panels");

// Adds what the keys of the owner's `index`-th batch entry contribute.
CUFLASH_DEVICE void add_entry(const BackwardParams& params, SharedMemory& smem, int index,
                              Real (&dq_acc)[slices][own_columns / 8][4]) {
  const Work work = Work::of_thread_block(params);
  const BatchIndex entry = work.entry(params, index);
  const int first_row = work.first_row;
  const Score score(params.score, entry);
  const Range keys = score.kv_range(first_row, first_row + Config::block_m);
  const Range rows{first_row, first_row + Config::block_m};
  const BlockRanges blocks = score.kv_blocks(rows.begin, rows.end);
  VisitedBlocks<Walk::keys> visited(score, blocks, rows);
  int n_block = visited.first_from(blocks.begin);
  if (n_block >= blocks.end) return;

  const int warp_row = warp_index() % row_warps * 16 * slices;
  const int partner = partner_index();
  const int other_warp = (warp_index() + row_warps) % Config::num_warps;
  const int first_q = score.seqlen.first_q, first_k = score.seqlen.first_k;
  const RowSource q(params.q, params.q_layout, entry, first_q, params.head_dim);
  const RowSource k(params.k, params.k_layout, entry, first_k, params.head_dim);
  const RowSource v(params.v, params.v_layout, entry, first_k, params.head_dim_v);
  const RowSource dout(params.dout, params.dout_layout, entry, first_q, params.head_dim_v);

  const auto load_v = [&](int n_block) {
    load_tile(smem.v[0], v, n_block * Config::block_n, keys);
    load_tile(smem.v[1], v, n_block * Config::block_n + half_keys, keys);
    ptx::cp_async_commit();
  };
  __syncthreads();  // every warp has read the tiles of the previous entry
  load_tile(smem.q, q, first_row, {0, score.seqlen.q});
  load_tile(smem.dout, dout, first_row, {0, score.seqlen.q});
  load_v(n_block);
  RowStatistics statistics[slices][2];
  read_statistics(statistics, params, entry, score.seqlen, first_row + warp_row);

#pragma unroll 1
  for (int next; n_block < blocks.end; n_block = next) {
    const int first_key = n_block * Config::block_n;
    const bool one_segment = visited.has_tile_segment(n_block);
    next = visited.next_after(n_block);
    ptx::cp_async_wait<0>();
    __syncthreads();  // v has arrived, and every warp has read the previous k
    load_tile(smem.k[0], k, first_key, keys);
    load_tile(smem.k[1], k, first_key + half_keys, keys);
    ptx::cp_async_commit();
    Real s_acc[slices][half_keys / 8][4];
    Real dp_acc[slices][half_keys / 8][4];
    clear(dp_acc);
    multiply_transposed<columns_of_dp>(dp_acc, read_rows(smem.dout, warp_row),
                                       read_columns(smem.v[partner]));

    ptx::cp_async_wait<0>();
    __syncthreads();  // k has arrived, and every warp has read v
    if (next < blocks.end) load_v(next);
    const int own_row = first_row + warp_row, own_key = first_key + partner * half_keys;
    const RowsAhead<slices, half_keys / 8> look_ups(score, own_row, own_key);
    clear(s_acc);
    multiply_transposed(s_acc, read_rows(smem.q, warp_row), read_columns(smem.k[partner]));
    drop_gradients(dp_acc, score, own_row, own_key);
    if (blocks.masked(n_block) || !one_segment) {
      compute_ds<true>(s_acc, dp_acc, statistics, score, own_row, own_key, look_ups);
    } else {
      compute_ds<false>(s_acc, dp_acc, statistics, score, own_row, own_key, look_ups);
    }
    Register ds_frag[slices][steps][operand_registers];
    to_operand(ds_frag, s_acc);
    smem.ds[warp_index()].store(ds_frag);
    const int column = first_own_column(Config::head_dim);
    multiply(dq_acc, ds_frag, read_sums(smem.k[partner], column));
    __syncthreads();  // the partner has written its half of ds
    smem.ds[other_warp].load(ds_frag);
    multiply(dq_acc, ds_frag, read_sums(smem.k[partner ^ 1], column));
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads,
                                             cuflash::Config::blocks_per_sm)
    cuflash_backward_dq_partners(const __grid_constant__ cuflash::BackwardParams params) {
  using namespace cuflash;
  SharedMemory& smem = shared_memory<SharedMemory>();
  Real dq_acc[slices][own_columns / 8][4];
  clear(dq_acc);
#pragma unroll 1
  for (int index = 0; index < params.grid.entries_per_owner; ++index) {
    add_entry(params, smem, index, dq_acc);
  }
  store_rows(params, warp_index() % row_warps, dq_acc);
}
