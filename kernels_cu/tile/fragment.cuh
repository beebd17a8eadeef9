// Which element of an accumulator a register holds, and how an accumulator becomes an operand of
// the next product.
//
// An accumulator of mma.m16n8k16 is 16x8: lane t holds rows t/4 and t/4 + 8, columns 2 (t%4) and
// the next one. A warp's accumulator is acc[slices][tiles][4]: 16 rows per slice, 8 columns per
// tile.
//
//      columns   0 1 | 2 3 | 4 5 | 6 7
//      row 0      t0    t1    t2    t3        registers 0, 1: row t/4
//      row 1      t4    t5    t6    t7        registers 2, 3: row t/4 + 8
//      ...
//
// A product of fragments sums over 16 columns of the left operand, which are 16 rows of the right
// one. Lane t holds rows t/4 and t/4 + 8 of the left operand and column t/4 of the right one, at
// these places of the sum:
//
//      16-bit     2 (t%4) and 2 (t%4) + 1, and both plus 8, in pairs: the order of memory
//      wider      t%4 and t%4 + 4 of each eight. A sum may be taken in any order. Where the left
//                 operand is an accumulator, and always in float64, both operands have 2 (t%4) and
//                 2 (t%4) + 1 instead, which are the columns that the lane holds
#pragma once

#include "numeric.cuh"

namespace cuflash {

// A register of an operand holds two 16-bit elements or one wider element. A lane has
// operand_registers of them.
constexpr bool packs_operands = sizeof(Element) == 2 && !Config::simt;
using Register = If<packs_operands, uint32_t, Real>;
constexpr int operand_registers = packs_operands ? 4 : 8;

// Calls body(i) for i below n, or body(i, j) with j below m, unrolled.
template <int n, typename Body>
CUFLASH_DEVICE void unrolled(Body body) {
#pragma unroll
  for (int i = 0; i < n; ++i) body(i);
}
template <int n, int m, typename Body>
CUFLASH_DEVICE void unrolled(Body body) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
#pragma unroll
    for (int j = 0; j < m; ++j) body(i, j);
  }
}

CUFLASH_DEVICE int lane_index() { return threadIdx.x % 32; }
CUFLASH_DEVICE int warp_index() { return threadIdx.x / 32; }

// Does the condition hold in any lane? The result is a vote. After a branch on anything else the
// compiler assumes that the warp has diverged, and keeps the addresses of a whole kernel's products
// out of the uniform registers.
CUFLASH_DEVICE bool warp_any(bool condition) { return __any_sync(0xffffffff, condition); }

// The row of register i of a slice, and the column of register i of a tile, for one lane.
CUFLASH_DEVICE int fragment_row(int slice, int i, int lane = lane_index()) {
  return 16 * slice + lane / 4 + 8 * (i / 2);
}
CUFLASH_DEVICE int fragment_column(int tile, int i, int lane = lane_index()) {
  return 8 * tile + 2 * (lane % 4) + i % 2;
}

// The first of a lane's two columns of a result. Products with values of 8 bits have their own
// order.
CUFLASH_DEVICE int result_column(int tile) {
  if constexpr (!has_8_bit_keys) return fragment_column(tile, 0);
  return 16 * (tile / 2) + 4 * (lane_index() % 4) + 2 * (tile % 2);
}

template <int slices, int tiles>
CUFLASH_DEVICE void clear(Real (&acc)[slices][tiles][4]) {
  unrolled<slices, tiles>([&](int s, int t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[s][t][i] = 0;
  });
}

// The largest of `least` and this lane's scores in one of its two rows of a slice: row t/4 (half 0)
// or t/4 + 8 (half 1).
template <int tiles>
CUFLASH_DEVICE Real lane_maximum(const Real (&s_acc)[tiles][4], int half, Real least) {
#pragma unroll
  for (int t = 0; t < tiles; ++t) {
    least = fmax(least, fmax(s_acc[t][2 * half], s_acc[t][2 * half + 1]));
  }
  return least;
}

// Multiplies this lane's elements in one of its two rows of a slice.
template <int tiles>
CUFLASH_DEVICE void scale_row(Real (&acc)[tiles][4], int half, Real factor) {
#pragma unroll
  for (int t = 0; t < tiles; ++t) {
    acc[t][2 * half] *= factor;
    acc[t][2 * half + 1] *= factor;
  }
}

// What weights are multiplied by before they are rounded to an operand. Weights of 2^-30 keep the
// bits of bfloat16 in float16.
constexpr Real operand_unit = narrows_range ? 0x1p15 : 1;

// Two neighbouring 16x8 accumulators become one 16x16 operand, of 16-bit elements rounded once.
template <int slices, int tiles>
CUFLASH_DEVICE void to_operand(Register (&frag)[slices][tiles / 2][operand_registers],
                               const Real (&acc)[slices][tiles][4]) {
  unrolled<slices, tiles>([&](int s, int t) {
    if constexpr (packs_operands) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Real low = acc[s][t][2 * half], high = acc[s][t][2 * half + 1];
        frag[s][t / 2][t % 2 * 2 + half] =
            pack<operand_dtype>(operand_unit * low, operand_unit * high);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) frag[s][t / 2][t % 2 * 4 + i] = acc[s][t][i % 2 * 2 + i / 2];
    }
  });
}

}  // namespace cuflash
