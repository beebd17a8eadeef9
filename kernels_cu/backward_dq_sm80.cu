// dq for tensor cores of sm_80 and later (mma.sync), without atomics. Every sum has a fixed order.
//
//   for each tile of block_m rows of q:                       one thread block
//     dq = 0
//     for each batch entry that shares these rows:            one, unless q is broadcast
//       for each block of block_n keys that some row sees:
//         s = q k^T;  p = exp(score(s) - lse)                 registers, 16 rows per warp and slice
//         dp = dropout(dout v^T)
//         ds = p (dp - delta) score'(s)                       reused as an operand in registers
//         dq += ds k
//     dq *= scale
//
// Shared memory holds q and dout of the tile, and two stages of k and v. One stage is loaded while
// the other is used. In float32 there is a single stage, split into TF32 parts: k arrives during
// dp, and v of the next block during s and dq.
#include "tile/matmul.cuh"
#include "portable/dq_rows.cuh"

namespace cuflash {

constexpr int stages = splits_tiles ? 1 : 2;

struct SharedMemory {
  using QTile = OperandTile<Config::block_m, Config::head_dim>;
  using DoutTile = OperandTile<Config::block_m, Config::head_dim_v>;
  using KTile = StreamedTile<Config::block_n, Config::head_dim>;
  using VTile = StreamedTile<Config::block_n, Config::head_dim_v>;

  QTile q;
  DoutTile dout;
  KTile k[stages];
  VTile v[stages];
};

constexpr int slices = Config::block_m / (16 * Config::num_warps);
static_assert(slices * 16 * Config::num_warps == Config::block_m, "every warp owns whole slices");

// Adds what the keys of the owner's `index`-th batch entry contribute. `stage` alternates from one
// block of keys to the next.
template <int dq_tiles>
CUFLASH_DEVICE void add_entry(const BackwardParams& params, SharedMemory& smem, int index,
                              int& stage, Real (&dq_acc)[slices][dq_tiles][4]) {
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

  const int warp_row = warp_index() * 16 * slices;
  const int first_q = score.seqlen.first_q, first_k = score.seqlen.first_k;
  const RowSource q(params.q, params.q_layout, entry, first_q, params.head_dim);
  const RowSource k(params.k, params.k_layout, entry, first_k, params.head_dim);
  const RowSource v(params.v, params.v_layout, entry, first_k, params.head_dim_v);
  const RowSource dout(params.dout, params.dout_layout, entry, first_q, params.head_dim_v);

  const auto load_k = [&](int n_block, int to_stage) {
    load_tile(smem.k[to_stage], k, n_block * Config::block_n, keys);
  };
  const auto load_v = [&](int n_block, int to_stage) {
    load_tile(smem.v[to_stage], v, n_block * Config::block_n, keys);
  };
  __syncthreads();  // every warp has read q and dout of the previous entry
  load_tile(smem.q, q, first_row, {0, score.seqlen.q});
  load_tile(smem.dout, dout, first_row, {0, score.seqlen.q});
  if constexpr (stages == 2) load_k(n_block, stage);
  load_v(n_block, stage);
  ptx::cp_async_commit();
  RowStatistics statistics[slices][2];
  read_statistics(statistics, params, entry, score.seqlen, first_row + warp_row);

#pragma unroll 1
  for (int next; n_block < blocks.end; n_block = next) {
    const int first_key = n_block * Config::block_n;
    const bool one_segment = visited.has_tile_segment(n_block);
    next = visited.next_after(n_block);
    ptx::cp_async_wait<0>();
    split(smem.v[stage]);
    __syncthreads();  // this stage, or v, has arrived, and every warp has read the other, or k
    if constexpr (stages == 1) {
      load_k(n_block, 0);
      ptx::cp_async_commit();
    } else if (next < blocks.end) {
      load_k(next, stage ^ 1);
      load_v(next, stage ^ 1);
      ptx::cp_async_commit();
    }

    Real s_acc[slices][Config::block_n / 8][4];
    Real dp_acc[slices][Config::block_n / 8][4];
    clear(s_acc);
    clear(dp_acc);
    const auto multiply_dp = [&] {
      multiply_transposed<columns_of_dp>(dp_acc, read_rows(smem.dout, warp_row),
                                         read_columns(smem.v[stage]));
    };
    if constexpr (stages == 1) {
      multiply_dp();
      ptx::cp_async_wait<0>();
      split(smem.k[0]);
      __syncthreads();  // k has arrived, and every warp has read v
      if (next < blocks.end) load_v(next, 0);
      ptx::cp_async_commit();
    }
    multiply_transposed(s_acc, read_rows(smem.q, warp_row), read_columns(smem.k[stage]));
    if constexpr (stages == 2) multiply_dp();
    drop_gradients(dp_acc, score, first_row + warp_row, first_key);
    if (blocks.masked(n_block) || !one_segment) {
      compute_ds<true>(s_acc, dp_acc, statistics, score, first_row + warp_row, first_key);
    } else {
      compute_ds<false>(s_acc, dp_acc, statistics, score, first_row + warp_row, first_key);
    }
    Register ds_frag[slices][Config::block_n / 16][operand_registers];
    to_operand(ds_frag, s_acc);
    multiply(dq_acc, ds_frag, read_sums(smem.k[stage], first_own_column(Config::head_dim)));
    if constexpr (stages == 2) stage ^= 1;
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads,
                                             cuflash::Config::blocks_per_sm)
    cuflash_backward_dq_sm80(const __grid_constant__ cuflash::BackwardParams params) {
  using namespace cuflash;
  SharedMemory& smem = shared_memory<SharedMemory>();
  constexpr int own_columns = Config::head_dim / Config::split_columns;
  static_assert(own_columns % SharedMemory::KTile::panel_columns == 0, "columns are whole panels");
  Real dq_acc[slices][own_columns / 8][4];
  clear(dq_acc);
  int stage = 0;
#pragma unroll 1
  for (int index = 0; index < params.grid.entries_per_owner; ++index) {
    add_entry(params, smem, index, stage, dq_acc);
  }
  store_rows(params, warp_index(), dq_acc);
}
