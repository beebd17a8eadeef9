// Products with keys and values of 8 bits, which a warp converts to float16 when it reads them.
//
// ldmatrix moves pairs of bytes. One read fetches 16 rows of 32 columns, and a lane gets four
// neighbours of each row (t/4) of k: columns 4 (t%4) to 4 (t%4) + 3 of each 16. A sum may be taken
// in any order, so q is read in the same order. Of v, transposed, a lane gets two keys of two
// neighbouring columns: even columns become one accumulator tile, odd columns the next one.
#pragma once

#include "tile/matmul_sm80.cuh"

namespace cuflash {

template <int rows, int columns>
using ByteTile = SmemTile<rows, columns, uint8_t>;

template <typename Tile>
struct BytesReader {
  uint32_t lane_address;

  // Rows from 16 * row16 on, columns from 32 * column32 on.
  CUFLASH_DEVICE uint32_t address(int row16, int column32) const {
    return along_columns<Tile, 32>(lane_address, column32) + row16 * 16 * Tile::row_bytes;
  }
};

// The four matrices of a read are (rows 0-7, columns 0-15), (8-15, 0-15), (0-7, 16-31),
// (8-15, 16-31).
template <int rows, int columns>
CUFLASH_DEVICE auto read_columns(const ByteTile<rows, columns>& tile) {
  using Tile = ByteTile<rows, columns>;
  static_assert(columns % 32 == 0, "a read has 32 columns");
  const int lane = ptx::thread_index() % 32;
  return BytesReader<Tile>{ptx::shared_address(tile.data) +
                           Tile::chunk_offset(lane & 15, lane >> 4)};
}
template <int rows, int columns>
CUFLASH_DEVICE auto read_sums(const ByteTile<rows, columns>& tile) {
  return read_columns(tile);
}

// The left operand, of 16 bits: like RowsReader, but a lane reads columns 4 (t%4) to 4 (t%4) + 3.
template <typename Tile>
struct NeighboursReader {
  using Source = Tile;

  uint32_t lane_address;

  CUFLASH_DEVICE void read(uint32_t (&frag)[4], int row16, int k) const {
    const uint32_t address =
        along_columns<Tile, 32>(lane_address, k) + row16 * 16 * Tile::row_bytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 four = ptx::load_shared_pair(address + half * 8 * Tile::row_bytes);
      frag[half] = __float_as_uint(four.x);
      frag[2 + half] = __float_as_uint(four.y);
    }
  }
};

template <typename Tile>
CUFLASH_DEVICE NeighboursReader<Tile> read_neighbours(const Tile& tile, int first_row) {
  const int lane = ptx::thread_index() % 32;
  return {ptx::shared_address(tile.data) + first_row * Tile::row_bytes +
          Tile::chunk_offset(lane / 4, lane % 4 / 2) + lane % 2 * 8};
}

// The same operand in registers, if they have room.
template <typename Tile, int slices>
constexpr bool holds_queries = has_8_bit_keys && Tile::columns <= 128 && slices == 1;
template <typename Tile, int slices>
struct HeldRows {
  using Source = Tile;

  uint32_t frag[Tile::columns / 16][slices][4];

  CUFLASH_DEVICE void read_all(const NeighboursReader<Tile>& rows) {
    unrolled<Tile::columns / 16, slices>([&](int k, int s) { rows.read(frag[k][s], s, k); });
  }

  CUFLASH_DEVICE void read(uint32_t (&to)[4], int s, int k) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = frag[k][s][i];
  }
};

// acc += A . B^T with B of 8 bits.
template <int slices, typename Rows, typename BTile>
CUFLASH_DEVICE void multiply_transposed(Real (&acc)[slices][BTile::rows / 8][4], const Rows& a,
                                        const BytesReader<BTile>& b) {
  static_assert(Rows::Source::columns == BTile::columns, "A and B have the same summed width");
#pragma unroll
  for (int k = 0; k < BTile::columns / 32; ++k) {
    uint32_t a_frag[2][slices][4];
    unrolled<2, slices>([&](int i, int s) { a.read(a_frag[i][s], s, 2 * k + i); });
#pragma unroll
    for (int n = 0; n < BTile::rows / 16; ++n) {
      uint32_t words[4];
      ptx::ldmatrix_x4(words, b.address(n, k));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t keys[2] = {to_two_float16(words[i], 0), to_two_float16(words[i], 1)};
#pragma unroll
        for (int s = 0; s < slices; ++s) {
          ptx::mma_m16n8k16_float16(acc[s][2 * n + i % 2], a_frag[i / 2][s], keys[0], keys[1]);
        }
      }
    }
  }
}

// acc += A . B with A in registers and B of 8 bits. Only after `sort_columns` a lane has the
// columns of `result_column`.
template <int slices, int tiles, typename BTile>
CUFLASH_DEVICE void multiply(Real (&acc)[slices][tiles][4],
                             const Register (&a_frag)[slices][BTile::rows / 16][operand_registers],
                             const BytesReader<BTile>& b) {
  unrolled<BTile::rows / 16, tiles / 4>([&](int k, int n) {
    uint32_t words[4];
    ptx::ldmatrix_x4_trans(words, b.address(k, n));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Of keys 0-7 and 8-15: two keys of the even column, then two of the odd one.
      const uint32_t first = __byte_perm(words[2 * i], 0, 0x3120);
      const uint32_t second = __byte_perm(words[2 * i + 1], 0, 0x3120);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const uint32_t values[2] = {to_two_float16(first, odd), to_two_float16(second, odd)};
#pragma unroll
        for (int s = 0; s < slices; ++s) {
          ptx::mma_m16n8k16_float16(acc[s][4 * n + 2 * i + odd], a_frag[s][k], values[0],
                                    values[1]);
        }
      }
    }
  });
}

// Gives neighbouring columns to each tile of an accumulator.
template <int slices, int tiles>
CUFLASH_DEVICE void sort_columns(Real (&acc)[slices][tiles][4]) {
  unrolled<slices, tiles / 2>([&](int s, int n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Real moved = acc[s][2 * n][2 * half + 1];
      acc[s][2 * n][2 * half + 1] = acc[s][2 * n + 1][2 * half];
      acc[s][2 * n + 1][2 * half] = moved;
    }
  });
}

}  // namespace cuflash
