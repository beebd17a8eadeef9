// Queries in bfloat16 beside keys of 8 bits: how they become float16.
//
// One instruction converts two 8-bit floats to float16. To bfloat16 they take nearly three times as
// many, which would limit the kernel. (D197) Float16 has more bits than bfloat16, but a smaller
// range. So a row of q is multiplied by a power of two, which brings its largest number below 2^16,
// and its scores by the inverse. Float16 then holds every number that is not 2^32 times smaller. A
// row with other numbers is computed again from its bfloat16 numbers.
#pragma once

#include "tile/fragment.cuh"
#include "tile/smem_tile.cuh"

namespace cuflash {

template <int slices, bool converts = narrows_range>
struct Float16Rows {
  Real inverse[slices][2];  // the inverse of a row's power of two; NaN if the row has none

  // Replaces this warp's rows of the tile.
  template <typename Tile>
  CUFLASH_DEVICE void convert(Tile& tile, int first_row) {
    unrolled<slices, 2>([&](int s, int half) {
      const int row = first_row + fragment_row(s, 2 * half);
      const auto two = [&](int eight) -> uint32_t& {  // elements of a chunk
        const int offset = eight / Tile::row_chunks * Tile::panel_bytes +
                           Tile::chunk_offset(row, eight % Tile::row_chunks);
        return reinterpret_cast<uint32_t*>(tile.data)[offset / 4 + lane_index() % 4];
      };
      const auto low = [](uint32_t x) { return __uint_as_float(x << 16); };
      const auto high = [](uint32_t x) { return __uint_as_float(x & 0xffff0000); };
      float largest = 0;
#pragma unroll
      for (int i = 0; i < Tile::columns / 8; ++i) {
        largest = fmaxf(largest, fmaxf(fabsf(low(two(i))), fabsf(high(two(i)))));
      }
      // To below 2^16, within the exponents of a float32 that has an inverse.
      const int of_largest = __float_as_uint(quad_max(largest)) >> 23;
      const int exponent = min(127 + 15 + 127 - of_largest, 253);
      const float factor = __uint_as_float(exponent << 23);
      bool exact = true;
#pragma unroll
      for (int i = 0; i < Tile::columns / 8; ++i) {
        const float a = factor * low(two(i)), b = factor * high(two(i));
        const uint32_t rounded = ptx::pack_float16(a, b);
        exact = exact && ptx::float16_to_float(static_cast<uint16_t>(rounded)) == a &&
                ptx::float16_to_float(static_cast<uint16_t>(rounded >> 16)) == b;
        two(i) = rounded;
      }
      inverse[s][half] = quad_sum(exact ? 0.f : 1.f) == 0 ? __uint_as_float((254 - exponent) << 23)
                                                          : __uint_as_float(0x7fffffff);
    });
    __syncwarp();  // the lanes of a warp read each other's elements
  }

  template <int tiles>
  CUFLASH_DEVICE void undo(Real (&s_acc)[slices][tiles][4]) const {
    unrolled<slices, 2>([&](int s, int half) { scale_row(s_acc[s], half, inverse[s][half]); });
  }

  // Makes the sums NaN of rows that have to be computed again.
  CUFLASH_DEVICE void mark(Real (&row_sum)[slices][2]) const {
    unrolled<slices, 2>([&](int s, int half) { row_sum[s][half] += 0 * inverse[s][half]; });
  }
};

// Queries that are operands as they are.
template <int slices>
struct Float16Rows<slices, false> {
  template <typename Tile>
  CUFLASH_DEVICE void convert(Tile&, int) {}
  template <typename Sums>
  CUFLASH_DEVICE void undo(Sums&) const {}
  template <typename Sums>
  CUFLASH_DEVICE void mark(Sums&) const {}
};

}  // namespace cuflash
