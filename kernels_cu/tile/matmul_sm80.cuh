// The two products of attention, warp by warp, from shared memory and registers.
#pragma once

#include "ptx/mma_sync.cuh"
#include "tile/smem_tile.cuh"

namespace cuflash {

// acc += A . B^T: 16 `slices` rows of A from a.address(0, .) on, every row of B; columns are
// summed.
template <int slices, typename ATile, typename BTile>
__device__ __forceinline__ void multiply_transposed(float (&acc)[slices][BTile::rows / 8][4],
                                                    const MatrixReader<ATile>& a,
                                                    const MatrixReader<BTile>& b) {
  static_assert(ATile::columns == BTile::columns, "the summed width");
#pragma unroll
  for (int k = 0; k < BTile::columns / 16; ++k) {
    uint32_t a_frag[slices][4];
#pragma unroll
    for (int s = 0; s < slices; ++s) ptx::ldmatrix_x4(a_frag[s], a.address(s, k));
#pragma unroll
    for (int n = 0; n < BTile::rows / 16; ++n) {
      uint32_t b_frag[4];
      ptx::ldmatrix_x4(b_frag, b.address(n, k));
#pragma unroll
      for (int s = 0; s < slices; ++s) {
        ptx::mma_m16n8k16<Config::dtype>(acc[s][2 * n], a_frag[s], b_frag[0], b_frag[1]);
        ptx::mma_m16n8k16<Config::dtype>(acc[s][2 * n + 1], a_frag[s], b_frag[2], b_frag[3]);
      }
    }
  }
}

// acc += A . B: A in registers, the rows of B are summed.
template <int slices, typename BTile>
__device__ __forceinline__ void multiply(float (&acc)[slices][BTile::columns / 8][4],
                                         const uint32_t (&a_frag)[slices][BTile::rows / 16][4],
                                         const MatrixReader<BTile>& b) {
#pragma unroll
  for (int k = 0; k < BTile::rows / 16; ++k) {
#pragma unroll
    for (int n = 0; n < BTile::columns / 16; ++n) {
      uint32_t b_frag[4];
      ptx::ldmatrix_x4_trans(b_frag, b.address(k, n));
#pragma unroll
      for (int s = 0; s < slices; ++s) {
        ptx::mma_m16n8k16<Config::dtype>(acc[s][2 * n], a_frag[s][k], b_frag[0], b_frag[1]);
        ptx::mma_m16n8k16<Config::dtype>(acc[s][2 * n + 1], a_frag[s][k], b_frag[2], b_frag[3]);
      }
    }
  }
}

}  // namespace cuflash
