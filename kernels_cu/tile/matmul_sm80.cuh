// The two products of attention, warp by warp, from shared memory and registers.
//
// Tensor cores multiply 16-bit elements and float64 as they are. A float32 is the sum of two TF32
// numbers, high + low, and a product of two is high.high + high.low + low.high; what is left out is
// below its rounding. (In bfloat16 the two small products run at twice the rate, but leave 1.6
// times the error of float32 arithmetic: D33.) Sums come out of the tensor cores
// truncated, not rounded: small terms have accumulators of their own, and sums over many rows are
// taken block by block and added in float32. (D32, D34)
#pragma once

#include "ptx/mma_sync.cuh"
#include "tile/fragment.cuh"
#include "tile/operand.cuh"

namespace cuflash {

constexpr bool splits_operands =
    Config::dtype == Dtype::float32 && Config::precision == Precision::ieee;

// acc += a . b of TF32, by two products of eight columns.
__device__ __forceinline__ void multiply_tf32(float (&acc)[4], const uint32_t (&a)[8],
                                              const uint32_t* b) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t left[4] = {a[4 * half], a[4 * half + 1], a[4 * half + 2], a[4 * half + 3]};
    ptx::mma_m16n8k8_tf32(acc, left, b[2 * half], b[2 * half + 1]);
  }
}

// Tensor cores cut a float32 off after the 11 significant bits of TF32. This factor makes up for
// what is lost, on average; it leaves alone what has no more bits. (D35)
__device__ __forceinline__ uint32_t for_tf32(float x) {
  constexpr float factor = 1 + 0.72f / 2048;
  return __float_as_uint(x * factor);
}

// acc += a . b, of 16-bit elements, of TF32, of float64; `b` is one of two operands side by side.
template <Dtype dtype = Config::dtype>
__device__ __forceinline__ void multiply_fragments(float (&acc)[4], const uint32_t (&a)[4],
                                                   const uint32_t* b) {
  ptx::mma_m16n8k16<dtype>(acc, a, b[0], b[1]);
}

__device__ __forceinline__ void multiply_fragments(float (&acc)[4], const float (&a)[8],
                                                   const float* b) {
  uint32_t left[8], right[4];
#pragma unroll
  for (int i = 0; i < 8; ++i) left[i] = for_tf32(a[i]);
#pragma unroll
  for (int i = 0; i < 4; ++i) right[i] = for_tf32(b[i]);
  multiply_tf32(acc, left, right);
}

__device__ __forceinline__ void multiply_fragments(double (&acc)[4], const double (&a)[8],
                                                   const double* b) {
  if constexpr (Config::wide_float64) {
    ptx::mma_m16n8k16_float64(acc, a, b);
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::mma_m8n8k4_float64(acc[0], acc[1], a[2 * k], b[k]);
      ptx::mma_m8n8k4_float64(acc[2], acc[3], a[2 * k + 1], b[k]);
    }
  }
}

// An operand of float32: high is x rounded to the 11 significant bits of TF32, and tensor cores cut
// off the bits of low that they have no room for. What overflows in rounding leaves an infinite
// low: no sum of it is finite, and exact.cuh computes its row.
template <int count>
struct Split {
  uint32_t high[count], low[count];

  Split() = default;
  __device__ __forceinline__ explicit Split(const float* x) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      high[i] = (__float_as_uint(x[i]) + 0x1000) & 0xffffe000;
      low[i] = __float_as_uint(x[i] - __uint_as_float(high[i]));
    }
  }
};

// An operand that is split where it is read, or was before: split_tile.cuh.
template <typename Reader>
__device__ __forceinline__ Split<8> read_split(const Reader& reader, int i, int j) {
  float x[8];
  reader.read(x, i, j);
  constexpr int distance = low_distance<typename Reader::Source>;
  if constexpr (distance == 0) return Split<8>(x);
  float low[8];
  reader.read(low, i, j, distance);
  Split<8> parts;
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    parts.high[t] = __float_as_uint(x[t]);
    parts.low[t] = __float_as_uint(low[t]);
  }
  return parts;
}

// Accumulators of split products: terms with a low part, and the others.
template <int slices, int tiles>
struct SplitSums {
  float large[slices][tiles][4], small[slices][tiles][4];

  __device__ __forceinline__ SplitSums() {
    clear(large);
    clear(small);
  }

  // Products with two operands side by side, to `tile` and the next.
  __device__ __forceinline__ void add(int slice, int tile, const Split<8>& a, const Split<8>& b) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      multiply_tf32(small[slice][tile + side], a.low, b.high + 4 * side);
      multiply_tf32(small[slice][tile + side], a.high, b.low + 4 * side);
      multiply_tf32(large[slice][tile + side], a.high, b.high + 4 * side);
    }
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

// Of float64 on sm_90, where registers hold two of each operand beside the sums.
template <typename BTile>
constexpr bool reads_ahead = Config::wide_float64 && BTile::rows * BTile::columns <= 2048 &&
                             (BTile::columns == 64 || BTile::columns == 128);

// The same as multiply_transposed; the next operands are read while one is multiplied. (D59)
template <int slices, typename ATile, typename BTile>
__device__ __forceinline__ void multiply_reading_ahead(Real (&acc)[slices][BTile::rows / 8][4],
                                                       const RowsReader<ATile>& a,
                                                       const ColumnsReader<BTile>& b) {
  constexpr int pairs = BTile::rows / 16, steps = BTile::columns / 16 * pairs;
  Register a_frag[2][slices][operand_registers], b_frag[2][operand_registers];
  const auto read = [&](int step) {
    const int k = step / pairs, n = step % pairs;
#pragma unroll
    for (int s = 0; s < slices; ++s) {
      if (n == 0) a.read(a_frag[k % 2][s], s, k);
    }
    b.read(b_frag[step % 2], n, k);
  };
  read(0);
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    const int k = step / pairs, n = step % pairs;
    if (step + 1 < steps) read(step + 1);
#pragma unroll
    for (int s = 0; s < slices; ++s) {
      multiply_fragments(acc[s][2 * n], a_frag[k % 2][s], b_frag[step % 2]);
      multiply_fragments(acc[s][2 * n + 1], a_frag[k % 2][s],
                         b_frag[step % 2] + operand_registers / 2);
    }
  }
}

// acc += A . B^T: 16 `slices` rows of A, every row of B; columns are summed. (D92)
template <int slices, typename ATile, typename BTile>
__device__ __forceinline__ void multiply_transposed(Real (&acc)[slices][BTile::rows / 8][4],
                                                    const RowsReader<ATile>& a,
                                                    const ColumnsReader<BTile>& b) {
  static_assert(ATile::columns == BTile::columns, "the summed width");
  if constexpr (splits_operands) {
    SplitSums<slices, BTile::rows / 8> sums;
#pragma unroll 4
    for (int k = 0; k < BTile::columns / 16; ++k) {
      Split<8> a_split[slices];
#pragma unroll
      for (int s = 0; s < slices; ++s) a_split[s] = read_split(a, s, k);
#pragma unroll
      for (int n = 0; n < BTile::rows / 16; ++n) {
        const Split<8> b_split = read_split(b, n, k);
#pragma unroll
        for (int s = 0; s < slices; ++s) sums.add(s, 2 * n, a_split[s], b_split);
      }
    }
    sums.add_to(acc, 0);
  } else if constexpr (reads_ahead<BTile>) {
    multiply_reading_ahead(acc, a, b);
  } else {
#pragma unroll(sizeof(Element) == 2 ? BTile::columns / 16 : 4)
    for (int k = 0; k < BTile::columns / 16; ++k) {
      Register a_frag[slices][operand_registers];
#pragma unroll
      for (int s = 0; s < slices; ++s) a.read(a_frag[s], s, k);
#pragma unroll
      for (int n = 0; n < BTile::rows / 16; ++n) {
        Register b_frag[operand_registers];
        b.read(b_frag, n, k);
#pragma unroll
        for (int s = 0; s < slices; ++s) {
          multiply_fragments(acc[s][2 * n], a_frag[s], b_frag);
          multiply_fragments(acc[s][2 * n + 1], a_frag[s], b_frag + operand_registers / 2);
        }
      }
    }
  }
}

// acc += A . B: A in registers, the rows of B are summed; of its columns as many as acc has.
template <int slices, int tiles, typename BTile>
__device__ __forceinline__ void multiply(
    Real (&acc)[slices][tiles][4],
    const Register (&a_frag)[slices][BTile::rows / 16][operand_registers],
    const SumReader<BTile>& b) {
  constexpr int steps = BTile::rows / 16;
  if constexpr (splits_operands) {
    Split<8> a_split[slices][steps];
#pragma unroll
    for (int s = 0; s < slices; ++s) {
#pragma unroll
      for (int k = 0; k < steps; ++k) a_split[s][k] = Split<8>(a_frag[s][k]);
    }
#pragma unroll
    for (int n = 0; n < tiles / 2; ++n) {
      SplitSums<slices, 2> sums;
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        const Split<8> b_split = read_split(b, k, n);
#pragma unroll
        for (int s = 0; s < slices; ++s) sums.add(s, 0, a_split[s][k], b_split);
      }
      sums.add_to(acc, 2 * n);
    }
  } else {
#pragma unroll
    for (int k = 0; k < steps; ++k) {
#pragma unroll
      for (int n = 0; n < tiles / 2; ++n) {
        Register b_frag[operand_registers];
        b.read(b_frag, k, n);
#pragma unroll
        for (int s = 0; s < slices; ++s) {
          multiply_fragments(acc[s][2 * n], a_frag[s][k], b_frag);
          multiply_fragments(acc[s][2 * n + 1], a_frag[s][k], b_frag + operand_registers / 2);
        }
      }
    }
  }
}

}  // namespace cuflash
