// The barriers of a ring of tiles in Hopper's float32 kernels, without the tiles. One warpgroup
// fills the ring, one multiplies, one skips every block. `host` is that of host_barriers.h.
#include "sm90_tf32/roles.cuh"

namespace cuflash {

struct RingParams {
  int blocks;
  int late_warp, late_by;  // see host_barriers.h
  bool is_stuck;           // set if a thread waited for ever
};

}  // namespace cuflash

extern "C" __global__ void cuflash_ring(const cuflash::RingParams& params) {
  using namespace cuflash;
  auto& barriers = *reinterpret_cast<TileBarriers*>(smem_bytes);
  if (threadIdx.x == 0) {
    host::late_warp = params.late_warp, host::late_by = params.late_by, host::stuck = false;
    barriers.init();
  }
  __syncthreads();  // the mbarriers are initialised
  Ring<Config::num_stages> ring;
  for (int block = 0; block < params.blocks; ++block, ring.advance()) {
    if (warp_index() < 4) {
      barriers.fill(ring, [] {});
    } else if (warp_index() < 8) {
      barriers.read(ring, [] { ptx::named_barrier_sync(1, 128); });  // a product syncs its warps
    } else {
      barriers.skip(ring);
    }
  }
  const_cast<RingParams&>(params).is_stuck = host::stuck;
}
