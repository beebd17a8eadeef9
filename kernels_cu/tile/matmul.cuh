// By which products a portable kernel multiplies, and where its tiles lie.
#pragma once

#include "tile/global_tile.cuh"
#include "tile/load.cuh"
#include "tile/matmul_cores.cuh"
#include "tile/matmul_sm80.cuh"
#include "tile/smem_tile.cuh"

namespace cuflash {

template <bool on_cuda_cores>
struct Tiles {
  template <int rows, int columns>
  using Operand = SmemTile<rows, columns>;
};
template <>
struct Tiles<true> {
  template <int rows, int columns>
  using Operand = GlobalTile<rows, columns>;
};
template <int rows, int columns>
using OperandTile = Tiles<Config::cuda_cores>::template Operand<rows, columns>;

}  // namespace cuflash
