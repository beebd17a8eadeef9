// Register counts and roles that the Hopper gradient kernels share.
#pragma once

#include "ptx/sync.cuh"
#include "score/score.cuh"
#include "sm90/barrier.cuh"

namespace cuflash {

// Registers of each thread. Summed over all warpgroups they equal what the block got at launch.
constexpr int producer_registers = Config::num_warps < 16 ? 24 : 32;
constexpr int consumer_registers = Config::num_warps < 16 ? 240 : 160;

// Runs a thread block: its first warp is the producer, and the warpgroups after the first consume.
template <typename Producer, typename Consumer, typename Params, typename SharedMemory>
CUFLASH_DEVICE void run_roles(const Params& params, SharedMemory& smem) {
  if (threadIdx.x == 0) init_barriers(smem);
  __syncthreads();  // all mbarriers are initialised
  const int warp = __shfl_sync(0xffffffff, warp_index(), 0);
  if (warp < 4) {
    ptx::setmaxnreg_dec<producer_registers>();
    if (warp == 0) Producer{params, smem}.run();
  } else {
    ptx::setmaxnreg_inc<consumer_registers>();
    Consumer{params, smem, warp / 4 - 1}.run();
  }
}

}  // namespace cuflash
