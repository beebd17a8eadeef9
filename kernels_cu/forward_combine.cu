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
// Parts that a warp loads at once. If a lane has more than 16 bytes of a row, twice as many spill.
constexpr int lane_bytes = lane_columns * sizeof(Real);
constexpr int parts_at_once = lane_bytes <= 8 ? 8 : (lane_bytes <= 32 ? 4 : 2);

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
  // Lane i weighs the i-th part of its warp. All loads of a step are in flight together.
  const auto lse_of = [&](int part) { return part < parts ? lse[part] : -infinity(); };
  Real own_lse = lse_of(warp + row_warps * lane);
  const PartSums sums(lse, parts);
  Real acc[lane_columns] = {};
#pragma unroll 1
  for (int first = warp; first < parts; first += 32 * row_warps) {
    const Real own_share = own_lse == -infinity() ? 0 : sums.share(own_lse);
    const uint32_t seen = __ballot_sync(0xffffffff, own_lse != -infinity());
    own_lse = lse_of(first + row_warps * (32 + lane));
    const int count = min((parts - first + row_warps - 1) / row_warps, 32);
#pragma unroll 1
    for (int begin = 0; begin < count; begin += parts_at_once) {
      Real o[parts_at_once][lane_columns];
      unrolled<parts_at_once, lane_columns>([&](int i, int c) {
        const int column = lane + 32 * c, part = begin + i;
        const bool read = (seen >> part & 1) && column < width;
        o[i][c] = read ? out[(first + row_warps * part) * width + column] : 0;
      });
      unrolled<parts_at_once, lane_columns>(
          [&](int i, int c) { acc[c] += __shfl_sync(0xffffffff, own_share, begin + i) * o[i][c]; });
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
