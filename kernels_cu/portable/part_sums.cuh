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
    for_own_parts(lse, parts, [&](Real own) { largest = fmax(largest, own); });
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      largest = fmax(largest, __shfl_xor_sync(0xffffffff, largest, distance));
    }
    for_own_parts(lse, parts, [&](Real own) { total += weight(own); });
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

 private:
  // Calls use(lse_i) for every 32nd part from the lane's on. Four loads are in flight together.
  template <typename Use>
  CUFLASH_DEVICE static void for_own_parts(const Real* lse, int parts, Use use) {
#pragma unroll 1
    for (int first = lane_index(); first < parts; first += 4 * 32) {
      Real own[4];
      unrolled<4>([&](int i) {
        const int part = first + 32 * i;
        own[i] = part < parts ? lse[part] : -infinity();
      });
      unrolled<4>([&](int i) { use(own[i]); });
    }
  }
};

}  // namespace cuflash
