// The two products of attention by one warp, from shared memory and registers.
//
// Tensor cores multiply 16-bit elements and float64 directly. A float32 is the sum of two TF32
// numbers, high + low, and a product is high.high + high.low + low.high. The omitted low.low is
// below the rounding of float32. (In bfloat16 the two small products would run at twice the rate,
// but leave 1.6 times the error of float32 arithmetic: D33.) Tensor cores truncate their sums
// instead of rounding them, and sums of numbers of one sign lose in the same direction at every
// step. Sums are therefore taken in parts, small terms first, and the parts are added in float32,
// which rounds. (D32, D34)
#pragma once

#include "tile/operand.cuh"

namespace cuflash {

// How many products of split operands tensor cores sum before the part is added in float32. Forward
// and backward take a score's parts alike, so its error is the same in both, and an error that a
// row has in common cancels in softmax. Errors of dp and out matter more: dp - delta is a small
// difference, and delta comes from out. (D122)
constexpr int columns_of_a_score = 32, columns_of_dp = 16, rows_of_out = 32;

constexpr bool uses_3xtf32 =
    Config::dtype == Dtype::float32 && Config::precision == Precision::ieee;

// acc += a . b in TF32, by two instructions that sum over eight columns each.
CUFLASH_DEVICE void multiply_tf32(float (&acc)[4], const uint32_t (&a)[8], const uint32_t* b) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t left[4] = {a[4 * half], a[4 * half + 1], a[4 * half + 2], a[4 * half + 3]};
    ptx::mma_m16n8k8_tf32(acc, left, b[2 * half], b[2 * half + 1]);
  }
}

// Tensor cores truncate a float32 to the 11 significant bits of TF32. This factor makes up for the
// loss on average. A number that has no more bits keeps its value. (D35)
CUFLASH_DEVICE uint32_t to_tf32_operand(float x) {
  constexpr float factor = 1 + 0.72f / 2048;
  return __float_as_uint(x * factor);
}

// acc += a . b for 16-bit elements, TF32 and float64. `b` is one of two operands side by side.
template <Dtype dtype = Config::dtype>
CUFLASH_DEVICE void multiply_fragments(float (&acc)[4], const uint32_t (&a)[4], const uint32_t* b) {
  ptx::mma_m16n8k16<dtype>(acc, a, b[0], b[1]);
}

CUFLASH_DEVICE void multiply_fragments(float (&acc)[4], const float (&a)[8], const float* b) {
  uint32_t left[8], right[4];
#pragma unroll
  for (int i = 0; i < 8; ++i) left[i] = to_tf32_operand(a[i]);
#pragma unroll
  for (int i = 0; i < 4; ++i) right[i] = to_tf32_operand(b[i]);
  multiply_tf32(acc, left, right);
}

CUFLASH_DEVICE void multiply_fragments(double (&acc)[4], const double (&a)[8], const double* b) {
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

// A float32 operand in two parts: high is x rounded to the 11 significant bits of TF32, low is the
// rest, which tensor cores truncate to TF32. If the rounding overflows, low is infinite. Then no
// sum with it is finite, and simt/recompute_rows.cuh computes the row.
template <int count>
struct Tf32Pair {
  uint32_t high[count], low[count];

  Tf32Pair() = default;
  CUFLASH_DEVICE explicit Tf32Pair(const float* x) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      high[i] = (__float_as_uint(x[i]) + 0x1000) & 0xffffe000;
      low[i] = __float_as_uint(x[i] - __uint_as_float(high[i]));
    }
  }
};

// Reads an operand and splits it, or reads the parts of an operand that split_tile.cuh has split.
template <typename Reader>
CUFLASH_DEVICE Tf32Pair<8> read_split(const Reader& reader, int i, int j) {
  float x[8];
  reader.read(x, i, j);
  constexpr int distance = low_distance<typename Reader::Source>;
  if constexpr (distance == 0) return Tf32Pair<8>(x);
  float low[8];
  reader.read(low, i, j, distance);
  Tf32Pair<8> parts;
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    parts.high[t] = __float_as_uint(x[t]);
    parts.low[t] = __float_as_uint(low[t]);
  }
  return parts;
}

// Products of `a` with two operands side by side: those with a low part, and the others.
CUFLASH_DEVICE void add_small(float (&part)[2][4], const Tf32Pair<8>& a, const Tf32Pair<8>& b) {
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    multiply_tf32(part[side], a.low, b.high + 4 * side);
    multiply_tf32(part[side], a.high, b.low + 4 * side);
  }
}

CUFLASH_DEVICE void add_large(float (&part)[2][4], const Tf32Pair<8>& a, const Tf32Pair<8>& b) {
#pragma unroll
  for (int side = 0; side < 2; ++side) multiply_tf32(part[side], a.high, b.high + 4 * side);
}

// Adds a part to two tiles of sums, or stores it there if it is the first.
template <int slices, int tiles>
CUFLASH_DEVICE void take_parts(float (&acc)[slices][tiles][4], const float (&part)[slices][2][4],
                               int first_tile, bool is_first = false) {
  unrolled<slices, 8>([&](int s, int i) {
    float& sum = acc[s][first_tile + i / 4][i % 4];
    sum = is_first ? part[s][i / 4][i % 4] : sum + part[s][i / 4][i % 4];
  });
}

// float64 on sm_90 and later, where registers hold two of each operand beside the sums.
template <typename BTile>
constexpr bool reads_ahead = Config::wide_float64 && BTile::rows * BTile::columns <= 2048 &&
                             (BTile::columns == 64 || BTile::columns == 128);

// Computes the same as multiply_transposed, but reads the next operands while it multiplies the
// current ones. (D59)
template <int slices, typename ATile, typename BTile>
CUFLASH_DEVICE void multiply_reading_ahead(Real (&acc)[slices][BTile::rows / 8][4],
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

// acc += A . B^T, summed over the columns, with 16 `slices` rows of A and all rows of B. With split
// operands acc has to be 0 before. (D92)
template <int part_columns = columns_of_a_score, int slices, typename ATile, typename BTile>
CUFLASH_DEVICE void multiply_transposed(Real (&acc)[slices][BTile::rows / 8][4],
                                        const RowsReader<ATile>& a, const ColumnsReader<BTile>& b) {
  static_assert(ATile::columns == BTile::columns, "A and B have the same summed width");
  if constexpr (uses_3xtf32) {
    // Widths of 32 and 96 take parts of 16 columns: 32 for the sake of two parts, 96 because
    // registers hold no more.
    constexpr int part_steps = BTile::columns % 64 == 0 ? part_columns / 16 : 1;
    constexpr int parts = BTile::columns / 16 / part_steps;
    // How many parts are unrolled: as many as registers hold, without a remainder. (D126)
    constexpr int steps_at_once = parts % 4 == 0 && parts > 4 ? 4 : 2;
    constexpr bool two_at_once = BTile::rows == 16 || parts == 2 || parts > 6;
    constexpr int at_once = part_steps == 1 ? steps_at_once : two_at_once ? 2 : 1;
#pragma unroll at_once
    for (int index = 0; index < parts; ++index) {
      Tf32Pair<8> a_split[part_steps][slices];
      unrolled<part_steps, slices>(
          [&](int k, int s) { a_split[k][s] = read_split(a, s, index * part_steps + k); });
#pragma unroll
      for (int n = 0; n < BTile::rows / 16; ++n) {
        float part[slices][2][4] = {};
#pragma unroll
        for (int k = 0; k < part_steps; ++k) {
          const Tf32Pair<8> b_split = read_split(b, n, index * part_steps + k);
#pragma unroll
          for (int s = 0; s < slices; ++s) {
            add_small(part[s], a_split[k][s], b_split);
            add_large(part[s], a_split[k][s], b_split);
          }
        }
        take_parts(acc, part, 2 * n, parts <= at_once && index == 0);
      }
    }
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

// acc += A . B, summed over the rows of B, with A in registers and as many columns of B as acc has.
template <int slices, int tiles, typename BTile>
CUFLASH_DEVICE void multiply(Real (&acc)[slices][tiles][4],
                             const Register (&a_frag)[slices][BTile::rows / 16][operand_registers],
                             const SumReader<BTile>& b) {
  [[maybe_unused]] constexpr int steps = BTile::rows / 16,
                                 part_steps = steps % 2 == 0 ? rows_of_out / 16 : 1;
  if constexpr (uses_3xtf32) {
    Tf32Pair<8> a_split[slices][steps];
    unrolled<slices, steps>([&](int s, int k) { a_split[s][k] = Tf32Pair<8>(a_frag[s][k]); });
#pragma unroll
    for (int n = 0; n < tiles / 2; ++n) {
#pragma unroll
      for (int first = 0; first < steps; first += part_steps) {
        float part[slices][2][4] = {};
        Tf32Pair<8> b_split[part_steps];
#pragma unroll
        for (int k = first; k < first + part_steps && k < steps; ++k) {
          b_split[k - first] = read_split(b, k, n);
#pragma unroll
          for (int s = 0; s < slices; ++s) add_small(part[s], a_split[s][k], b_split[k - first]);
        }
#pragma unroll
        for (int k = first; k < first + part_steps && k < steps; ++k) {
#pragma unroll
          for (int s = 0; s < slices; ++s) add_large(part[s], a_split[s][k], b_split[k - first]);
        }
        take_parts(acc, part, 2 * n);
      }
    }
  } else {
    unrolled<steps, tiles / 2>([&](int k, int n) {
      Register b_frag[operand_registers];
      b.read(b_frag, k, n);
#pragma unroll
      for (int s = 0; s < slices; ++s) {
        multiply_fragments(acc[s][2 * n], a_frag[s][k], b_frag);
        multiply_fragments(acc[s][2 * n + 1], a_frag[s][k], b_frag + operand_registers / 2);
      }
    });
  }
}

}  // namespace cuflash
