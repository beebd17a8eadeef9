// The two products of attention in float32 on Hopper, warpgroup by warpgroup, as products of TF32.
//
// What a float32 becomes, and why small terms are summed apart, is said in matmul_sm80.cuh. The
// left operand is split in registers, by the lane that holds it; the right one lies in shared
// memory as tiles of its parts, split once for all warpgroups.
#pragma once

#include "ptx/wgmma.cuh"
#include "ptx/wgmma_tf32.cuh"
#include "tile/matmul_sm80.cuh"
#include "tile/operand.cuh"

namespace cuflash {

constexpr int operand_parts = splits_operands ? 2 : 1;

// The TF32 numbers that stand for float32: high and low, or one that is rounded.
template <int count>
struct Tf32Parts {
  uint32_t part[operand_parts][count];

  Tf32Parts() = default;
  __device__ __forceinline__ explicit Tf32Parts(const float* x) {
    if constexpr (splits_operands) {
      const Split<count> split(x);
#pragma unroll
      for (int i = 0; i < count; ++i) {
        part[0][i] = split.high[i];
        part[1][i] = split.low[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < count; ++i) part[0][i] = for_tf32(x[i]);
    }
  }

  __device__ __forceinline__ void pin() {
#pragma unroll
    for (int p = 0; p < operand_parts; ++p) ptx::pin(part[p]);
  }
};

// Descriptors of a tile's parts, from `first_row` on; its columns are summed.
template <typename Tile>
struct SharedOperand {
  uint64_t part[operand_parts];

  __device__ __forceinline__ explicit SharedOperand(const Tile (&tiles)[operand_parts],
                                                    int first_row = 0) {
    static_assert(Tile::row_bytes == 128, "the swizzle of the descriptor");
#pragma unroll
    for (int p = 0; p < operand_parts; ++p) {
      part[p] = ptx::smem_descriptor(ptx::shared_address(tiles[p].data) + first_row * 128, 16);
    }
  }

  // Columns from 8 * k on: 32 bytes of a panel's row.
  __device__ __forceinline__ uint64_t columns(int p, int k) const {
    return part[p] + k % 4 * 2 + k / 4 * (Tile::panel_bytes / 16);
  }
};

// acc = A . B^T, of 64 rows of A and as many of B as acc has columns.
template <int tiles, typename ATile, typename BTile>
__device__ __forceinline__ void multiply_transposed(float (&acc)[1][tiles][4],
                                                    const RowsReader<ATile>& a,
                                                    const SharedOperand<BTile>& b) {
  static_assert(ATile::columns == BTile::columns && BTile::rows == 8 * tiles, "shapes");
  auto& large = reinterpret_cast<float (&)[4 * tiles]>(acc);
  [[maybe_unused]] float small[4 * tiles];
  Tf32Parts<4> frag[2][2];
#pragma unroll
  for (int k = 0; k < ATile::columns / 16; ++k) {
    if (k >= 2) ptx::wgmma_wait<1>();  // these registers were read
    float a_frag[8];
    a.read(a_frag, 0, k);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      frag[k % 2][half] = Tf32Parts<4>(a_frag + 4 * half);
      frag[k % 2][half].pin();
    }
    ptx::pin(large);
    if constexpr (splits_operands) ptx::pin(small);
    ptx::wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto& left = frag[k % 2][half].part;
      const int step = 2 * k + half;
      if constexpr (splits_operands) {
        ptx::wgmma_tf32(small, left[1], b.columns(0, step), step > 0);
        ptx::wgmma_tf32(small, left[0], b.columns(1, step), 1);
      }
      ptx::wgmma_tf32(large, left[0], b.columns(0, step), step > 0);
    }
    ptx::wgmma_commit();
    ptx::pin(large);
    if constexpr (splits_operands) ptx::pin(small);
  }
  ptx::wgmma_wait<0>();
  ptx::pin(large);
  if constexpr (splits_operands) {
    ptx::pin(small);
#pragma unroll
    for (int i = 0; i < 4 * tiles; ++i) large[i] += small[i];
  }
}

// The same of one product, with A in shared memory.
template <int tiles, typename ATile, typename BTile>
__device__ __forceinline__ void multiply_transposed(float (&acc)[1][tiles][4],
                                                    const SharedOperand<ATile>& a,
                                                    const SharedOperand<BTile>& b) {
  static_assert(ATile::columns == BTile::columns && BTile::rows == 8 * tiles, "shapes");
  static_assert(operand_parts == 1, "small terms are summed apart");
  auto& sums = reinterpret_cast<float (&)[4 * tiles]>(acc);
  ptx::pin(sums);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < ATile::columns / 8; ++k) {
    ptx::wgmma_tf32(sums, a.columns(0, k), b.columns(0, k), k > 0);
  }
  ptx::wgmma_commit();
  ptx::pin(sums);
  ptx::wgmma_wait<0>();
  ptx::pin(sums);
}

// acc += A . B^T for 64 rows of B, the next of acc's columns: A in registers, steps of 8 columns.
// Split operands are summed apart, small terms first, and added in float32.
template <typename BTile, int steps>
__device__ __forceinline__ void multiply_columns(float (&acc)[32], Tf32Parts<4> (&a)[steps],
                                                 const SharedOperand<BTile>& b) {
  static_assert(steps == BTile::columns / 8, "shapes");
  [[maybe_unused]] float sums[32];
  auto& target = splits_operands ? sums : acc;
#pragma unroll
  for (int k = 0; k < steps; ++k) a[k].pin();
  ptx::pin(target);
  ptx::wgmma_fence();
  if constexpr (splits_operands) {
#pragma unroll
    for (int k = 0; k < steps; ++k) {
      ptx::wgmma_tf32(target, a[k].part[1], b.columns(0, k), k > 0);
      ptx::wgmma_tf32(target, a[k].part[0], b.columns(1, k), 1);
    }
  }
#pragma unroll
  for (int k = 0; k < steps; ++k) ptx::wgmma_tf32(target, a[k].part[0], b.columns(0, k), 1);
  ptx::wgmma_commit();
  ptx::pin(target);
  ptx::wgmma_wait<0>();
  ptx::pin(target);
  if constexpr (splits_operands) {
#pragma unroll
    for (int i = 0; i < 32; ++i) acc[i] += sums[i];
  }
}

// acc += A . B^T, A an accumulator's registers, for all of acc's columns.
template <typename BTile, int tiles, int steps>
__device__ __forceinline__ void multiply_sums(float (&acc)[1][tiles][4],
                                              const float (&a)[1][steps][4],
                                              const BTile (&b)[operand_parts]) {
  static_assert(BTile::rows == 8 * tiles, "shapes");
  Tf32Parts<4> parts[steps];
#pragma unroll
  for (int k = 0; k < steps; ++k) {
    const float frag[4] = {a[0][k][0], a[0][k][2], a[0][k][1], a[0][k][3]};
    parts[k] = Tf32Parts<4>(frag);
  }
#pragma unroll
  for (int t = 0; t < tiles; t += 8) {
    multiply_columns(reinterpret_cast<float (&)[32]>(acc[0][t]), parts,
                     SharedOperand<BTile>(b, 8 * t));
  }
}

}  // namespace cuflash
