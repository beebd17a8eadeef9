// What the results of parts of the keys are worth beside each other.
#pragma once

#include "numeric.cuh"
#include "tile/fragment.cuh"

namespace cuflash {

// Of a row: the largest of its lse_i, and the sum of exp(lse_i - largest).
struct PartSums {
  Real largest = -infinity(), total = 0;

  // By the lanes of a warp, which share the parts.
  CUFLASH_DEVICE PartSums(const Real* lse, int parts) {
#pragma unroll 4
    for (int i = lane_index(); i < parts; i += 32) largest = fmax(largest, lse[i]);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      largest = fmax(largest, __shfl_xor_sync(0xffffffff, largest, distance));
    }
#pragma unroll 4
    for (int i = lane_index(); i < parts; i += 32) total += weight(lse[i]);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      total += __shfl_xor_sync(0xffffffff, total, distance);
    }
  }

  // By one thread, in the same order: lanes that have no part add 0.
  template <int parts>
  CUFLASH_DEVICE explicit PartSums(const Real (&lse)[parts]) {
    static_assert((parts & (parts - 1)) == 0, "lanes add up by halves");
    Real sums[parts];
#pragma unroll
    for (int i = 0; i < parts; ++i) largest = fmax(largest, lse[i]);
#pragma unroll
    for (int i = 0; i < parts; ++i) sums[i] = weight(lse[i]);
#pragma unroll
    for (int distance = parts / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int i = 0; i < distance; ++i) sums[i] += sums[i + distance];
    }
    total = sums[0];
  }

  // NaN and +inf stay what they are.
  CUFLASH_DEVICE Real weight(Real lse) const {
    return lse == -infinity() ? 0 : power_of_two((lse - largest) * log2_e);
  }

  // What a part's out counts for: of large values no sum overflows.
  CUFLASH_DEVICE Real share(Real lse) const { return weight(lse) / total; }

  CUFLASH_DEVICE Real lse() const { return total == 0 ? -infinity() : largest + log(total); }
};

}  // namespace cuflash
