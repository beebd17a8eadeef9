// Programmatic dependent launch (sm_90 and later): a kernel starts before the kernel that it
// depends on is done.
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

// The dependent kernel may start once every thread block of this one has called this or has ended.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
CUFLASH_DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }

// Waits until the previous kernel is done and its writes are visible. Returns at once if this
// kernel was launched without overlap, after the previous one. Every thread block calls it, also
// one that has nothing to do: the kernel after this one relies on both.
CUFLASH_DEVICE void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace cuflash::ptx
