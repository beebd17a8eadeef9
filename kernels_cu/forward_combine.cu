// Combines the partial results of split keys (split-KV):
//
//   lse = log sum exp lse_i,  out = sum exp(lse_i - lse) out_i
//
//   for each row of each batch entry:                          one warp, or all warps of a block
//     m = max lse_i;  l = sum exp(lse_i - m)                   by lanes
//     o_w = sum exp(lse_i - m) / l out_i                       warp w: parts w, w + row_warps, ...
//     out = sum o_w,  lse = m + log l                          through shared memory
//
// The out of a part with lse = -inf, which saw no key, is not read. Every sum has a fixed order. On
// sm_90 and later the kernel is launched while the parts are computed, and waits for them.
#include "portable/part_sums.cuh"
#include "ptx/dependents.cuh"
#include "tile/store.cuh"

namespace cuflash {

constexpr int row_warps = Config::num_warps / Config::rows;  // warps that share the parts of a row
constexpr int lane_columns = (Config::head_dim_v + 31) / 32;

struct SharedMemory {
  Real sums[row_warps][Config::head_dim_v];
};

CUFLASH_DEVICE void combine(const CombineParams& params, SharedMemory& smem) {
  const Tile tile = tile_of(params.grid, tile_index());
  const int lane = lane_index(), warp = warp_index() % row_warps;
  const int row = tile.block * Config::rows + warp_index() / row_warps;
  if (row >= params.num_rows) return;
  const BatchIndex entry(params.batch, tile.owner);
  const int parts = params.num_splits, width = params.head_dim_v;
  const Real* lse =
      params.lse_parts + entry * params.lse_parts_layout.batch + static_cast<int64_t>(row) * parts;
  const Real* out = params.out_parts + entry * params.out_parts_layout.batch +
                    static_cast<int64_t>(row) * parts * width;
  if constexpr (Config::overlaps) ptx::wait_for_previous_kernel();
  const PartSums sums(lse, parts);
  Real acc[lane_columns] = {};
#pragma unroll 1
  for (int first = 0; first < parts; first += 32) {  // each lane weighs one of 32 parts
    const Real own_lse = first + lane < parts ? lse[first + lane] : -infinity();
    const Real own_share = sums.share(own_lse);
    const uint32_t seen = __ballot_sync(0xffffffff, own_lse != -infinity());
    const int count = min(parts - first, 32);
#pragma unroll 4
    for (int i = warp; i < count; i += row_warps) {
      const Real share = __shfl_sync(0xffffffff, own_share, i);
      const Real* from = out + static_cast<int64_t>(first + i) * width;
#pragma unroll
      for (int c = 0; c < lane_columns; ++c) {
        const int column = lane + 32 * c;
        const bool read = (seen >> i & 1) && column < width;
        acc[c] += read ? share * from[column] : 0;
      }
    }
  }
  const RowTarget to(params.out, params.out_layout, entry, 0, width, Config::head_dim_v);
  const auto store = [&](int column, Real sum) {
    if (column >= width) return;
    to.data[row * to.row_stride + column * to.column_stride] = RowTarget::rounded(sum);
  };
  if (params.lse != nullptr && warp == 0 && lane == 0) {
    params.lse[entry * params.lse_layout.batch + row * params.lse_layout.row] = sums.lse();
  }
  if constexpr (row_warps == 1) {
#pragma unroll
    for (int c = 0; c < lane_columns; ++c) store(lane + 32 * c, acc[c]);
  } else {
#pragma unroll
    for (int c = 0; c < lane_columns; ++c) {
      if (lane + 32 * c < Config::head_dim_v) smem.sums[warp][lane + 32 * c] = acc[c];
    }
    __syncthreads();  // every warp has written its sums
    for (int column = ptx::thread_index(); column < width; column += Config::num_threads) {
      Real sum = 0;
#pragma unroll
      for (int w = 0; w < row_warps; ++w) sum += smem.sums[w][column];
      store(column, sum);
    }
  }
}

}  // namespace cuflash

// Without a number of thread blocks ptxas spills registers to run more of them.
extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads, 2)
    cuflash_forward_combine(const __grid_constant__ cuflash::CombineParams params) {
  using namespace cuflash;
  combine(params, shared_memory<SharedMemory>());
}
