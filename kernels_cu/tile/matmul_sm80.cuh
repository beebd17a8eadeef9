// The two products of attention, warp by warp, from shared memory and registers.
//
// Tensor cores multiply 16-bit elements and float64 as they are. A float32 is the sum of two TF32
// numbers, high + low, and a product of two is high.high + high.low + low.high; what is left out is
// below its rounding. Sums of these come out of the tensor cores truncated, not rounded: small
// terms have accumulators of their own, and sums over many rows are taken block by block and added
// in float32.
#pragma once

#include "ptx/mma_sync.cuh"
#include "tile/fragment.cuh"
#include "tile/operand.cuh"

namespace cuflash {

constexpr bool splits_operands =
    Config::dtype == Dtype::float32 && Config::precision == Precision::ieee;

// acc += a . b of 16-bit elements, of TF32, of float64.
template <Dtype dtype = Config::dtype>
__device__ __forceinline__ void multiply_fragments(float (&acc)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
  ptx::mma_m16n8k16<dtype>(acc, a, b0, b1);
}

__device__ __forceinline__ void multiply_fragments(float (&acc)[4], const float (&a)[4], float b0,
                                                   float b1) {
  const uint32_t rounded[4] = {ptx::round_tf32(a[0]), ptx::round_tf32(a[1]), ptx::round_tf32(a[2]),
                               ptx::round_tf32(a[3])};
  ptx::mma_m16n8k8_tf32(acc, rounded, ptx::round_tf32(b0), ptx::round_tf32(b1));
}

__device__ __forceinline__ void multiply_fragments(double (&acc)[4], const double (&a)[4],
                                                   double b0, double b1) {
  if constexpr (Config::wide_float64) {
    ptx::mma_m16n8k8_float64(acc, a, b0, b1);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::mma_m8n8k4_float64(acc[2 * half], acc[2 * half + 1], a[half], b0);
      ptx::mma_m8n8k4_float64(acc[2 * half], acc[2 * half + 1], a[half + 2], b1);
    }
  }
}

// high is x rounded to the 11 significant bits of TF32, and tensor cores ignore the bits of low
// that they have no room for. What overflows in rounding leaves an infinite low: no sum of it is
// finite, and exact.cuh computes its row.
template <int count>
struct Split {
  uint32_t high[count], low[count];

  Split() = default;
  __device__ __forceinline__ explicit Split(const float (&x)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      high[i] = (__float_as_uint(x[i]) + 0x1000) & 0xffffe000;
      low[i] = __float_as_uint(x[i] - __uint_as_float(high[i]));
    }
  }
};

// Accumulators of split products: terms with a low part, and the others.
template <int slices, int tiles>
struct SplitSums {
  float large[slices][tiles][4], small[slices][tiles][4];

  __device__ __forceinline__ SplitSums() {
    clear(large);
    clear(small);
  }

  __device__ __forceinline__ void add(int slice, int tile, const Split<4>& left,
                                      const Split<2>& right) {
    ptx::mma_m16n8k8_tf32(small[slice][tile], left.low, right.high[0], right.high[1]);
    ptx::mma_m16n8k8_tf32(small[slice][tile], left.high, right.low[0], right.low[1]);
    ptx::mma_m16n8k8_tf32(large[slice][tile], left.high, right.high[0], right.high[1]);
  }

  // Added to `acc`, whose tiles from `first_tile` on are these.
  template <int acc_tiles>
  __device__ __forceinline__ void add_to(float (&acc)[slices][acc_tiles][4], int first_tile) const {
#pragma unroll
    for (int s = 0; s < slices; ++s) {
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[s][first_tile + t][i] += large[s][t][i] + small[s][t][i];
      }
    }
  }
};

// acc += A . B^T: 16 `slices` rows of A, every row of B; columns are summed.
template <int slices, typename ATile, typename BTile>
__device__ __forceinline__ void multiply_transposed(Real (&acc)[slices][BTile::rows / 8][4],
                                                    const RowsReader<ATile>& a,
                                                    const ColumnsReader<BTile>& b) {
  static_assert(ATile::columns == BTile::columns, "the summed width");
  if constexpr (splits_operands) {
    SplitSums<slices, BTile::rows / 8> sums;
#pragma unroll
    for (int k = 0; k < BTile::columns / product_step; ++k) {
      Split<4> a_frag[slices];
#pragma unroll
      for (int s = 0; s < slices; ++s) {
        float read[4];
        a.read(read, s, k);
        a_frag[s] = Split<4>(read);
      }
#pragma unroll
      for (int n = 0; n < BTile::rows / 16; ++n) {
        float b_frag[4];
        b.read(b_frag, n, k);
        const Split<2> left({b_frag[0], b_frag[1]}), right({b_frag[2], b_frag[3]});
#pragma unroll
        for (int s = 0; s < slices; ++s) {
          sums.add(s, 2 * n, a_frag[s], left);
          sums.add(s, 2 * n + 1, a_frag[s], right);
        }
      }
    }
    sums.add_to(acc, 0);
  } else {
#pragma unroll
    for (int k = 0; k < BTile::columns / product_step; ++k) {
      Register a_frag[slices][4];
#pragma unroll
      for (int s = 0; s < slices; ++s) a.read(a_frag[s], s, k);
#pragma unroll
      for (int n = 0; n < BTile::rows / 16; ++n) {
        Register b_frag[4];
        b.read(b_frag, n, k);
#pragma unroll
        for (int s = 0; s < slices; ++s) {
          multiply_fragments(acc[s][2 * n], a_frag[s], b_frag[0], b_frag[1]);
          multiply_fragments(acc[s][2 * n + 1], a_frag[s], b_frag[2], b_frag[3]);
        }
      }
    }
  }
}

// acc += A . B: A in registers, the rows of B are summed; of its columns as many as acc has.
template <int slices, int tiles, typename BTile>
__device__ __forceinline__ void multiply(
    Real (&acc)[slices][tiles][4], const Register (&a_frag)[slices][BTile::rows / product_step][4],
    const SumReader<BTile>& b) {
  constexpr int steps = BTile::rows / product_step;
  if constexpr (splits_operands) {
    Split<4> a_split[slices][steps];
#pragma unroll
    for (int s = 0; s < slices; ++s) {
#pragma unroll
      for (int k = 0; k < steps; ++k) a_split[s][k] = Split<4>(a_frag[s][k]);
    }
#pragma unroll
    for (int n = 0; n < tiles / 2; ++n) {
      SplitSums<slices, 2> sums;
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        float b_frag[4];
        b.read(b_frag, k, n);
        const Split<2> left({b_frag[0], b_frag[1]}), right({b_frag[2], b_frag[3]});
#pragma unroll
        for (int s = 0; s < slices; ++s) {
          sums.add(s, 0, a_split[s][k], left);
          sums.add(s, 1, a_split[s][k], right);
        }
      }
      sums.add_to(acc, 2 * n);
    }
  } else {
#pragma unroll
    for (int k = 0; k < steps; ++k) {
#pragma unroll
      for (int n = 0; n < tiles / 2; ++n) {
        Register b_frag[4];
        b.read(b_frag, k, n);
#pragma unroll
        for (int s = 0; s < slices; ++s) {
          multiply_fragments(acc[s][2 * n], a_frag[s][k], b_frag[0], b_frag[1]);
          multiply_fragments(acc[s][2 * n + 1], a_frag[s][k], b_frag[2], b_frag[3]);
        }
      }
    }
  }
}

}  // namespace cuflash
