// Results of parts of the keys become one:
//
//   m = max lse_i;  l = sum exp(lse_i - m);  lse = m + log l    a warp: lane by lane, then across
//   out = sum exp(lse_i - m) / l out_i                          lanes have columns
//
// A part with lse = -inf has seen nothing, and its out is not read. The order of all sums is fixed.
#pragma once

#include "score/softmax.cuh"
#include "tile/fragment.cuh"

namespace cuflash {

// Of one row. Parts say what lse(part) and out(part, column) are.
template <typename Parts>
struct CombinedRow {
  static constexpr int columns = (Config::head_dim_v + 31) / 32;  // of a lane: lane + 32 c

  const Parts& parts;
  const int count;
  Real largest, total;

  CUFLASH_DEVICE CombinedRow(const Parts& of_row, int num_parts)
      : parts(of_row), count(num_parts), largest(-infinity()), total(0) {
#pragma unroll 4
    for (int i = lane_index(); i < count; i += 32) largest = fmax(largest, parts.lse(i));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      largest = fmax(largest, __shfl_xor_sync(0xffffffff, largest, distance));
    }
#pragma unroll 4
    for (int i = lane_index(); i < count; i += 32) total += weight(parts.lse(i));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      total += __shfl_xor_sync(0xffffffff, total, distance);
    }
  }

  // NaN and +inf stay what they are.
  CUFLASH_DEVICE Real weight(Real lse) const {
    return lse == -infinity() ? 0 : power_of_two((lse - largest) * log2_e);
  }

  CUFLASH_DEVICE Real lse() const { return total == 0 ? -infinity() : largest + log(total); }

  // Sums of the parts first, first + step, ...
  CUFLASH_DEVICE void add(Real (&acc)[columns], int first, int step, int width) const {
#pragma unroll 4
    for (int i = first; i < count; i += step) {
      const Real lse = parts.lse(i);
      const bool seen = lse != -infinity();
      const Real share = weight(lse) / total;  // large values: no sum of them overflows
#pragma unroll
      for (int c = 0; c < columns; ++c) {
        const int column = lane_index() + 32 * c;
        const Real value = seen && column < width ? parts.out(i, column) : 0;
        acc[c] = seen ? fma(share, value, acc[c]) : acc[c];
      }
    }
  }
};

}  // namespace cuflash
