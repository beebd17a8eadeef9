// A kernel that starts while the one before it in the stream still runs, and waits for it.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

// The next kernel may start once every thread block has come here, or has ended.
CUFLASH_DEVICE void launch_dependents() {
  if constexpr (Config::combined_early) asm volatile("griddepcontrol.launch_dependents;");
}

// Until the kernel before has ended: all that it wrote is there.
CUFLASH_DEVICE void wait_for_kernel_before() {
  if constexpr (Config::combined_early) asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace cuflash::ptx
