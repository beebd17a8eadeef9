// Whether a portable kernel multiplies by tensor cores or CUDA cores, and where its tiles are.
#pragma once

#include "simt/matmul.cuh"
#include "tile/split_tile.cuh"

namespace cuflash {

template <int rows, int columns>
using OperandTile = If<Config::simt, GlobalTile<rows, columns>, SmemTile<rows, columns>>;

// A tile that every warp reads: of keys, or of queries where the thread block owns keys.
constexpr bool splits_tiles = uses_3xtf32 && !Config::simt;
template <int rows, int columns>
using StreamedTile = If<splits_tiles, Tf32PairTile<rows, columns>, OperandTile<rows, columns>>;

}  // namespace cuflash
