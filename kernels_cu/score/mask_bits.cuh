// Which bytes of a matrix are not zero, as bits for the columns of an accumulator that each lane
// holds. Where 16 columns are 16 neighbouring aligned bytes, a lane reads 16 at once and the lanes
// exchange bits. Elsewhere each lane reads the bytes of its own columns one by one.
#pragma once

#include "ptx/special.cuh"
#include "tile/fragment.cuh"

namespace cuflash {

// Bit j is set if byte j is not zero.
CUFLASH_DEVICE uint32_t nonzero_bytes(uint32_t four) {
  const uint32_t high = ((four & 0x7f7f7f7fu) + 0x7f7f7f7fu | four) & 0x80808080u;
  return (high >> 7) * 0x10204080u >> 28;  // moves bits 0, 8, 16 and 24 to 28, 29, 30 and 31
}

CUFLASH_DEVICE uint32_t nonzero_bytes(uint4 x) {
  return nonzero_bytes(x.x) | nonzero_bytes(x.y) << 4 | nonzero_bytes(x.z) << 8 |
         nonzero_bytes(x.w) << 12;
}

// The same for 16 bytes, of which `count` exist.
CUFLASH_DEVICE uint32_t nonzero_bytes(const uint8_t* bytes, int count) {
  if (count >= 16) return nonzero_bytes(*reinterpret_cast<const uint4*>(bytes));
  uint32_t bits = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) bits |= static_cast<uint32_t>(bytes[i] != 0) << i;
  return bits;
}

// Lane w of a quad passes the bits of columns 32 w to 32 w + 31. Returns the bits of the columns
// that this lane holds.
template <int words>
CUFLASH_DEVICE uint32_t columns_of_lane(uint32_t word) {
  const int lane = ptx::thread_index() % 4;
  uint32_t bits = 0;
#pragma unroll
  for (int w = 0; w < words; ++w) {
    // Two bits of every eight: the product moves those at 0, 8, 16 and 24 to 24, 26, 28 and 30.
    const uint32_t own = __shfl_sync(0xffffffff, word, w, 4) >> (2 * lane) & 0x03030303u;
    bits |= (own * 0x01041040u >> 24) << (8 * w);
  }
  return bits;
}

struct ByteMatrix {
  const uint8_t* data;
  int64_t row, column;

  CUFLASH_DEVICE bool is_aligned_to_16() const {
    return column == 1 && ((reinterpret_cast<uint64_t>(data) | row) & 15) == 0;
  }

  // The bits of two rows, whose bytes are loaded together.
  template <int tiles>
  CUFLASH_DEVICE void columns(uint32_t (&bits)[2], const int (&row_idx)[2], int first_column,
                              int num_columns) const {
    constexpr int words = (tiles + 3) / 4;  // of 32 columns, one per lane
    if (warp_any(is_aligned_to_16() && first_column + 32 * words <= num_columns)) {
      const int lane = ptx::thread_index() % 4;
      uint4 bytes[2][2] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint8_t* from = data + row_idx[half] * row + first_column + 32 * lane;
        if (words == 4 || lane < words) {
          bytes[half][0] = reinterpret_cast<const uint4*>(from)[0];
          bytes[half][1] = reinterpret_cast<const uint4*>(from)[1];
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        bits[half] = columns_of_lane<words>(nonzero_bytes(bytes[half][0]) |
                                            nonzero_bytes(bytes[half][1]) << 16);
      }
    } else {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        const uint32_t found = columns<tiles>(row_idx[half], first_column, num_columns);
        bits[0] = half == 0 ? found : bits[0];
        bits[1] = found;
      }
    }
  }

  // The bits of row `row_idx`, which is the same for the four lanes of a quad: bit 2 t + i for
  // column i of tile t. Columns count from `first_column`, a multiple of 16, and `num_columns`
  // exist. Called by all lanes of the warp.
  template <int tiles>
  CUFLASH_DEVICE uint32_t columns(int row_idx, int first_column, int num_columns) const {
    const int lane = ptx::thread_index() % 4;
    const uint8_t* from = data + row_idx * row + first_column * column;
    const int count = num_columns - first_column;
    uint32_t bits = 0;
    if (warp_any(is_aligned_to_16())) {
      constexpr int words = (tiles + 3) / 4;  // of 32 columns, one per lane
      uint32_t word = 0;
      if (lane < words) {
        word = nonzero_bytes(from + 32 * lane, count - 32 * lane) |
               nonzero_bytes(from + 32 * lane + 16, count - 32 * lane - 16) << 16;
      }
      bits = columns_of_lane<words>(word);
    } else {
#pragma unroll 4
      for (int t = 0; t < tiles; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = 8 * t + 2 * lane + i;
          if (at < count && from[at * column] != 0) bits |= 1u << (2 * t + i);
        }
      }
    }
    return bits;
  }

  // The same for a transposed accumulator: bits of columns `column_idx` and column_idx + 8, at the
  // rows that a lane holds from `first_row` on. column_idx is the lane's column of a slice of 16.
  template <int tiles>
  CUFLASH_DEVICE void rows(uint32_t (&bits)[2], int first_row, int num_rows, int column_idx,
                           int num_columns) const {
    const int lane = ptx::thread_index() % 32;
    bits[0] = bits[1] = 0;
    if (warp_any(is_aligned_to_16())) {
      constexpr int words = (tiles + 3) / 4;  // of 32 rows, one per lane
      const int first_column = column_idx - lane / 4;
      uint32_t word[words];
#pragma unroll
      for (int w = 0; w < words; ++w) {
        const int row_idx = min(first_row + 32 * w + lane, num_rows - 1);
        word[w] = nonzero_bytes(data + row_idx * row + first_column, num_columns - first_column);
      }
      unrolled<tiles, 2>([&](int t, int i) {
        const int from = 8 * (t % 4) + 2 * (lane % 4) + i;
        const uint32_t found = __shfl_sync(0xffffffff, word[t / 4], from, 32) >> (lane / 4);
        bits[0] |= (found & 1) << (2 * t + i);
        bits[1] |= (found >> 8 & 1) << (2 * t + i);
      });
    } else {
#pragma unroll 4
      for (int t = 0; t < tiles; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row_idx = first_row + 8 * t + 2 * (lane % 4) + i;
          if (row_idx >= num_rows) continue;
          const uint8_t* from = data + row_idx * row;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int at = column_idx + 8 * half;
            if (at < num_columns && from[at * column] != 0) bits[half] |= 1u << (2 * t + i);
          }
        }
      }
    }
  }
};

}  // namespace cuflash
