// Whether a portable kernel multiplies by tensor cores or CUDA cores, and where its tiles are.
#pragma once

#include "simt/matmul.cuh"
#include "tile/byte_tile.cuh"
#include "tile/float16_rows.cuh"
#include "tile/split_tile.cuh"

namespace cuflash {

template <int rows, int columns>
using OperandTile = If<Config::simt, GlobalTile<rows, columns>, SmemTile<rows, columns>>;

// A tile that every warp reads: of keys, or of queries where the thread block owns keys.
constexpr bool splits_tiles = uses_3xtf32 && !Config::simt;
template <int rows, int columns>
using StreamedTile = If<has_8_bit_keys, ByteTile<rows, columns>,
                        If<splits_tiles, Tf32PairTile<rows, columns>, OperandTile<rows, columns>>>;
static_assert(!has_8_bit_keys || packs_operands, "8-bit keys are converted to 16 bits");

// The left operand of scores, read from shared memory for every block of keys.
template <typename Tile, int slices, bool in_registers = holds_queries<Tile, slices>>
struct Queries {
  CUFLASH_DEVICE void read(const Tile&, int) {}

  CUFLASH_DEVICE auto operand(const Tile& tile, int first_row) const {
    if constexpr (has_8_bit_keys) {
      return read_neighbours(tile, first_row);
    } else {
      return read_rows(tile, first_row);
    }
  }
};

// The same, read once.
template <typename Tile, int slices>
struct Queries<Tile, slices, true> {
  HeldRows<Tile, slices> rows;

  CUFLASH_DEVICE void read(const Tile& tile, int first_row) {
    rows.read_all(read_neighbours(tile, first_row));
  }

  CUFLASH_DEVICE const HeldRows<Tile, slices>& operand(const Tile&, int) const { return rows; }
};

}  // namespace cuflash
