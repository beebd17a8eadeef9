// What the gradient kernels of Hopper share.
#pragma once

#include "params.cuh"
#include "ptx/sync.cuh"
#include "score.cuh"
#include "sm90/barrier.cuh"

namespace cuflash {

constexpr int consumers = Config::num_warps / 4 - 1;  // warpgroups, of 64 rows each
// Of a thread; their sum over all warpgroups is what the block of threads was given at its start.
constexpr int producer_registers = consumers < 3 ? 24 : 32;
constexpr int consumer_registers = consumers < 3 ? 240 : 160;

// A block of threads: its first warp loads what the warpgroups behind its own compute with, its
// second one writes what they hand over, if they do.
template <typename Producer, typename Consumer, typename... Writer, typename Params,
          typename SharedMemory>
__device__ __forceinline__ void run_roles(const Params& params, SharedMemory& smem) {
  if (threadIdx.x == 0) init_barriers(smem);
  __syncthreads();  // the barriers are there
  const int warp = __shfl_sync(0xffffffff, warp_index(), 0);
  if (warp < 4) {
    ptx::give_registers<producer_registers>();
    if (warp == 0) Producer{params, smem}.run();
    if (warp == 1) (Writer{params, smem}.run(), ...);
  } else {
    ptx::take_registers<consumer_registers>();
    Consumer{params, smem, warp / 4 - 1}.run();
  }
}

}  // namespace cuflash
