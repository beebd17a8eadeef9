// Results of parts of the keys become one: see portable/combined_row.cuh.
//
//   for each row of each batch entry:                          one thread block
//     o_w = sum exp(lse_i - lse) out_i                         warp w: parts w, w + warps, ...
//     out = sum o_w                                            through shared memory
#include "portable/combined_row.cuh"
#include "tile/store.cuh"

namespace cuflash {

struct SharedMemory {
  Real sums[Config::num_warps][Config::head_dim_v];
};
static_assert(Config::smem_bytes == 0 || sizeof(SharedMemory) == Config::smem_bytes,
              "CombineConfig.smem_bytes counts this struct");

// In the workspace.
struct StoredParts {
  const Real* lse_of_row;
  const Real* out_of_row;
  int width;

  CUFLASH_DEVICE Real lse(int part) const { return lse_of_row[part]; }
  CUFLASH_DEVICE Real out(int part, int column) const {
    return out_of_row[static_cast<int64_t>(part) * width + column];
  }
};

CUFLASH_DEVICE void combine(const CombineParams& params, SharedMemory& smem) {
  const Tile tile = tile_of(params.grid, tile_index());
  const BatchIndex entry(params.batch, tile.owner);
  const int count = params.num_splits, width = params.head_dim_v, row = tile.block;
  const StoredParts parts{params.lse_parts + entry * params.lse_parts_layout.batch + row * count,
                          params.out_parts + entry * params.out_parts_layout.batch +
                              static_cast<int64_t>(row) * count * width,
                          width};
  const CombinedRow<StoredParts> combined(parts, count);
  const int warp = warp_index();
  Real acc[CombinedRow<StoredParts>::columns] = {};
  combined.add(acc, warp, Config::num_warps, width);
#pragma unroll
  for (int c = 0; c < CombinedRow<StoredParts>::columns; ++c) {
    const int column = lane_index() + 32 * c;
    if (column < Config::head_dim_v) smem.sums[warp][column] = acc[c];
  }
  __syncthreads();  // every warp's sums are there
  const RowTarget to(params.out, params.out_layout, entry, 0, width, Config::head_dim_v);
  for (int column = ptx::thread_index(); column < width; column += Config::num_threads) {
    Real sum = 0;
#pragma unroll
    for (int w = 0; w < Config::num_warps; ++w) sum += smem.sums[w][column];
    to.data[row * to.row_stride + column * to.column_stride] = RowTarget::rounded(sum);
  }
  if (params.lse != nullptr && ptx::thread_index() == 0) {
    params.lse[entry * params.lse_layout.batch + row * params.lse_layout.row] = combined.lse();
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads)
    cuflash_forward_combine(const __grid_constant__ cuflash::CombineParams params) {
  using namespace cuflash;
  combine(params, shared_memory<SharedMemory>());
}
