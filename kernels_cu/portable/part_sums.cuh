// The weights with which results of parts of the keys are combined.
#pragma once

#include "numeric.cuh"
#include "tile/fragment.cuh"

namespace cuflash {

// For one row: the largest of its lse_i, and the sum of exp(lse_i - largest).
struct PartSums {
  Real largest = -infinity(), total = 0;

  // Called by a warp, whose lanes share the parts.
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

  // Called by one thread. The additions have the same order: lanes without a part add 0.
  template <int parts>
  CUFLASH_DEVICE explicit PartSums(const Real (&lse)[parts]) {
    static_assert((parts & (parts - 1)) == 0, "a tree reduction needs a power of two");
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

  // exp(lse - largest), or 0 for a part that saw no key. NaN and +inf are passed on.
  CUFLASH_DEVICE Real weight(Real lse) const {
    return lse == -infinity() ? 0 : power_of_two((lse - largest) * log2_e);
  }

  // The factor of a part's out, divided by the total: no sum of large values overflows.
  CUFLASH_DEVICE Real share(Real lse) const { return weight(lse) / total; }

  CUFLASH_DEVICE Real lse() const { return total == 0 ? -infinity() : largest + log(total); }
};

}  // namespace cuflash
