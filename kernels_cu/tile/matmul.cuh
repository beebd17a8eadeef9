// By which products a portable kernel multiplies, and where its tiles lie.
#pragma once

#include "simt/matmul.cuh"
#include "tile/split_tile.cuh"

namespace cuflash {

template <bool simt, bool splits>
struct Tiles {
  template <int rows, int columns>
  using Operand = SmemTile<rows, columns>;
};
template <>
struct Tiles<false, true> {
  template <int rows, int columns>
  using Operand = Tf32PairTile<rows, columns>;
};
template <bool splits>
struct Tiles<true, splits> {
  template <int rows, int columns>
  using Operand = GlobalTile<rows, columns>;
};
template <int rows, int columns>
using OperandTile = Tiles<Config::simt, false>::template Operand<rows, columns>;

// One that every warp reads: of keys, or of queries where keys are owned.
constexpr bool splits_tiles = uses_3xtf32 && !Config::simt;
template <int rows, int columns>
using StreamedTile = Tiles<Config::simt, splits_tiles>::template Operand<rows, columns>;

}  // namespace cuflash
