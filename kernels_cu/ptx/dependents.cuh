// Kernels that start before the one they depend on is done: sm_90 and later.
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

// The kernel that depends on this one may start once every thread block has said so or is done.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
CUFLASH_DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }

// Until the kernel before is done and what it wrote can be read; at once where this kernel was
// launched to follow it.
CUFLASH_DEVICE void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace cuflash::ptx
