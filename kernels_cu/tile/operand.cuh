// How a lane reads the operands of a product of fragments, acc (16x8) += a (16x16) . b (16x8), from
// shared memory. One read fills `operand_registers` registers: one a, or two b side by side. See
// fragment.cuh for the elements.
//
// ldmatrix reads 16-bit elements, and float32 that is summed over columns. With `distance` a reader
// of float32 reads low parts, which lie `distance` bytes behind the high parts.
#pragma once

#include "ptx/mma_sync.cuh"
#include "ptx/special.cuh"
#include "tile/fragment.cuh"
#include "tile/smem_tile.cuh"

namespace cuflash {

// The bytes from the high parts of a tile to its low parts, or 0 if the tile is not split.
template <typename Tile>
constexpr int low_distance = 0;

// Moves an address by `index` blocks of `bytes` along the columns. Within a panel the index only
// sets bits of the chunk number that are 0 in block 0. The swizzle is an exclusive or with the
// chunk number, so the swizzled address moves by an exclusive or, too.
template <typename Tile, int bytes>
CUFLASH_DEVICE uint32_t along_columns(uint32_t address, int index) {
  constexpr int blocks_per_panel = Tile::row_bytes / bytes;
  return (address ^ (index % blocks_per_panel * bytes)) +
         index / blocks_per_panel * Tile::panel_bytes;
}

// The left operand: 16 rows of a matrix that is summed over its columns.
template <typename Tile>
struct RowsReader {
  using Source = Tile;

  uint32_t lane_address;

  // Reads rows from 16 * row16 on, columns from 16 * k on.
  CUFLASH_DEVICE void read(uint32_t (&frag)[4], int row16, int k) const {
    ptx::ldmatrix_x4(frag, along_columns<Tile, 32>(lane_address, k) + row16 * row_block);
  }

  CUFLASH_DEVICE void read(float (&frag)[8], int row16, int k, int distance = 0) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];
      ptx::ldmatrix_x4(words, along_columns<Tile, 32>(lane_address, 2 * k + half) +
                                  row16 * row_block + distance);
#pragma unroll
      for (int i = 0; i < 4; ++i) frag[4 * half + i] = __uint_as_float(words[i]);
    }
  }

  CUFLASH_DEVICE void read(double (&frag)[8], int row16, int k) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t address =
          along_columns<Tile, 64>(lane_address, 2 * k + half) + row16 * row_block;
      ptx::load_shared(frag[4 * half], frag[4 * half + 2], address);
      ptx::load_shared(frag[4 * half + 1], frag[4 * half + 3], address + row_block / 2);
    }
  }

 private:
  static constexpr int row_block = 16 * Tile::row_bytes;
};

// Two right operands side by side, whose columns are 16 rows of a matrix that is summed over its
// columns. A lane reads the same elements as of a left operand, but into other registers.
template <typename Tile>
struct ColumnsReader : RowsReader<Tile> {
  CUFLASH_DEVICE void read(uint32_t (&frag)[4], int row16, int k) const {
    RowsReader<Tile>::read(frag, row16, k);
  }

  template <typename Value, typename... Distance>
  CUFLASH_DEVICE void read(Value (&frag)[8], int row16, int k, Distance... distance) const {
    Value left[8];
    RowsReader<Tile>::read(left, row16, k, distance...);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Neighbours in `left` are rows 8 apart in float64, columns 4 apart in float32.
        const int from = sizeof(Value) == 8 ? i % 2 * 2 + i / 2 : i;
        frag[i / 2 * 4 + 2 * half + i % 2] = left[4 * half + from];
      }
    }
  }
};

// Two right operands side by side: 16 columns of a matrix that is summed over its rows.
template <typename Tile>
struct SumReader {
  using Source = Tile;

  uint32_t lane_address;

  // Reads rows from 16 * k on, columns from 16 * column16 on.
  CUFLASH_DEVICE void read(uint32_t (&frag)[4], int k, int column16) const {
    ptx::ldmatrix_x4_trans(frag, address(k, column16));
  }

  template <typename Value>
  CUFLASH_DEVICE void read(Value (&frag)[8], int k, int column16, int distance = 0) const {
    constexpr int eight_columns = 8 * sizeof(Value);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // This lane's even row and the row after it, whose chunks are swizzled differently.
      const uint32_t even = address(k, column16) + half * 8 * Tile::row_bytes;
      const uint32_t odd = (even ^ (Tile::swizzle(1) << 4)) + Tile::row_bytes;
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int to_side = side * eight_columns;
        frag[4 * side + 2 * half] = ptx::load_shared<Value>((even ^ to_side) + distance);
        frag[4 * side + 2 * half + 1] = ptx::load_shared<Value>((odd ^ to_side) + distance);
      }
    }
  }

 private:
  CUFLASH_DEVICE uint32_t address(int k, int column16) const {
    return along_columns<Tile, 16 * sizeof(Element)>(lane_address, column16) +
           k * 16 * Tile::row_bytes;
  }
};

// A left operand whose rows start at first_row. For 16-bit elements the four matrices are (rows
// 0-7, columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15), for float32 half as wide.
template <typename Tile>
CUFLASH_DEVICE RowsReader<Tile> read_rows(const Tile& tile, int first_row = 0) {
  const int lane = ptx::thread_index() % 32;
  const int offset = is_double ? Tile::chunk_offset(lane >> 2, lane & 3)
                               : Tile::chunk_offset(lane & 15, lane >> 4);
  return {ptx::shared_address(tile.data) + first_row * Tile::row_bytes + offset};
}

// Right operands of a matrix that is summed over its columns. The four matrices are (rows 0-7,
// columns 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15).
template <typename Tile>
CUFLASH_DEVICE ColumnsReader<Tile> read_columns(const Tile& tile) {
  const int lane = ptx::thread_index() % 32;
  const int offset = is_double
                         ? Tile::chunk_offset(lane >> 2, lane & 3)
                         : Tile::chunk_offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
  return {{ptx::shared_address(tile.data) + offset}};
}

// Right operands of a matrix that is summed over its rows. A panel begins at first_column.
template <typename Tile>
CUFLASH_DEVICE SumReader<Tile> read_sums(const Tile& tile, int first_column = 0) {
  const int lane = ptx::thread_index() % 32;
  const uint32_t address =
      ptx::shared_address(tile.data) + first_column / Tile::panel_columns * Tile::panel_bytes;
  if constexpr (sizeof(Element) == 2) {
    return {address + Tile::chunk_offset(lane & 15, lane >> 4)};
  } else {
    constexpr int chunk_columns = Tile::chunk_columns;
    const int column = lane / 4;
    return {address + Tile::chunk_offset(2 * (lane % 4), column / chunk_columns) +
            column % chunk_columns * static_cast<int>(sizeof(Element))};
  }
}

}  // namespace cuflash
