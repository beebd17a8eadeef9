// What the gradient kernels of Hopper share.
#pragma once

#include "ptx/sync.cuh"
#include "score/score.cuh"
#include "sm90/barrier.cuh"

namespace cuflash {

// Of a thread; their sum over all warpgroups is what the thread block was given at its start.
constexpr int producer_registers = Config::num_warps < 16 ? 24 : 32;
constexpr int consumer_registers = Config::num_warps < 16 ? 240 : 160;

// A thread block: its first warp loads what the warpgroups behind its own compute with.
template <typename Producer, typename Consumer, typename Params, typename SharedMemory>
CUFLASH_DEVICE void run_roles(const Params& params, SharedMemory& smem) {
  if (threadIdx.x == 0) init_barriers(smem);
  __syncthreads();  // the barriers are there
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
