// Which score a register holds, and how a product's result becomes the next product's operand.
//
// An accumulator of mma.m16n8k16 is 16x8: lane t holds rows t/4 and t/4 + 8, columns 2 (t%4) and
// the next. A warp's accumulator is acc[slices][tiles][4]: 16 rows per slice, 8 columns per tile.
//
//      columns   0 1 | 2 3 | 4 5 | 6 7
//      row 0      t0    t1    t2    t3        registers 0, 1: row t/4
//      row 1      t4    t5    t6    t7        registers 2, 3: row t/4 + 8
//      ...
//
// A product of fragments sums 16 columns of the left operand, rows of the right one. Lane t gives
// it of rows t/4 and t/4 + 8 of the left operand, and of column t/4 of the right one:
//
//      16-bit     elements 2 (t%4) and the next, and those plus 8, in pairs: the order of memory
//      wider      of each eight elements t%4 and t%4 + 4. Sums may be taken in any order: where the
//                 left operand is an accumulator, these stand for 2 (t%4) and the next, which the
//                 lane has, and so they do for float64 throughout
#pragma once

#include "numeric.cuh"

namespace cuflash {

// What a lane holds of an operand in one register, two elements or one, and how many of them.
constexpr bool packs_operands = sizeof(Element) == 2 && !Config::simt;
using Register = If<packs_operands, uint32_t, Real>;
constexpr int operand_registers = packs_operands ? 4 : 8;

// Calls body(i) for i below n, or body(i, j) with j below m, unrolled: slices and halves, tiles and
// registers.
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

// What holds in any lane, as a vote: the compiler takes a warp that branches on anything else for
// diverged, and keeps the addresses of a whole kernel's products out of the uniform registers.
CUFLASH_DEVICE bool warp_agrees(bool condition) { return __any_sync(0xffffffff, condition); }

// Row of register i of a slice, column of register i of a tile, for one lane.
CUFLASH_DEVICE int fragment_row(int slice, int i, int lane = lane_index()) {
  return 16 * slice + lane / 4 + 8 * (i / 2);
}
CUFLASH_DEVICE int fragment_column(int tile, int i, int lane = lane_index()) {
  return 8 * tile + 2 * (lane % 4) + i % 2;
}

template <int slices, int tiles>
CUFLASH_DEVICE void clear(Real (&acc)[slices][tiles][4]) {
  unrolled<slices, tiles>([&](int s, int t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[s][t][i] = 0;
  });
}

// The largest of `least` and the scores that this lane holds of the `half`th row of a slice.
template <int tiles>
CUFLASH_DEVICE Real lane_maximum(const Real (&s_acc)[tiles][4], int half, Real least) {
#pragma unroll
  for (int t = 0; t < tiles; ++t) {
    least = fmax(least, fmax(s_acc[t][2 * half], s_acc[t][2 * half + 1]));
  }
  return least;
}

// Multiplies what this lane holds of the `half`th row of a slice.
template <int tiles>
CUFLASH_DEVICE void scale_row(Real (&acc)[tiles][4], int half, Real factor) {
#pragma unroll
  for (int t = 0; t < tiles; ++t) {
    acc[t][2 * half] *= factor;
    acc[t][2 * half + 1] *= factor;
  }
}

// Two neighbouring 16x8 accumulators are one 16x16 operand, of 16-bit elements rounded once.
template <int slices, int tiles>
CUFLASH_DEVICE void to_operand(Register (&frag)[slices][tiles / 2][operand_registers],
                               const Real (&acc)[slices][tiles][4]) {
  unrolled<slices, tiles>([&](int s, int t) {
    if constexpr (packs_operands) {
      frag[s][t / 2][t % 2 * 2] = pack<Config::dtype>(acc[s][t][0], acc[s][t][1]);
      frag[s][t / 2][t % 2 * 2 + 1] = pack<Config::dtype>(acc[s][t][2], acc[s][t][3]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) frag[s][t / 2][t % 2 * 4 + i] = acc[s][t][i % 2 * 2 + i / 2];
    }
  });
}

}  // namespace cuflash
