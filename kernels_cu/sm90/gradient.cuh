// What the two gradient kernels of Hopper share.
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

}  // namespace cuflash
