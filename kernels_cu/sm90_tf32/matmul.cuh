// The two products of attention in float32 on Hopper, warpgroup by warpgroup, as products of TF32.
//
// tile/matmul_sm80.cuh explains how a float32 is split, and why sums are taken in parts. The left
// operand is split in registers, by the lane that holds it. The right operand lies in shared memory
// as tiles of its parts, split once for all warpgroups.
#pragma once

#include "ptx/wgmma_k_major.cuh"
#include "tile/matmul_sm80.cuh"

namespace cuflash {

constexpr int operand_parts = uses_3xtf32 ? 2 : 1;

// The TF32 parts of float32 numbers: high and low, or a single rounded one.
template <int count>
struct Tf32Parts {
  uint32_t part[operand_parts][count];

  Tf32Parts() = default;
  CUFLASH_DEVICE explicit Tf32Parts(const float* x) {
    if constexpr (uses_3xtf32) {
      const Tf32Pair<count> split(x);
      unrolled<count>([&](int i) {
        part[0][i] = split.high[i];
        part[1][i] = split.low[i];
      });
    } else {
      unrolled<count>([&](int i) { part[0][i] = to_tf32_operand(x[i]); });
    }
  }

  CUFLASH_DEVICE void pin() {
    unrolled<operand_parts>([&](int p) { ptx::pin(part[p]); });
  }
};

// Descriptors of a tile's parts, from `first_row` on. Products sum over the columns.
template <typename Tile>
struct SharedOperand {
  uint64_t part[operand_parts];

  CUFLASH_DEVICE explicit SharedOperand(const Tile (&tiles)[operand_parts], int first_row = 0) {
    static_assert(Tile::row_bytes == 128, "smem_descriptor has the 128-byte swizzle");
    unrolled<operand_parts>([&](int p) {
      part[p] = ptx::smem_descriptor(ptx::shared_address(tiles[p].data) + first_row * 128, 16);
    });
  }

  // Columns from 8 * k on: 32 bytes of a panel's row.
  CUFLASH_DEVICE uint64_t columns(int p, int k) const {
    return part[p] + k % 4 * 2 + k / 4 * (Tile::panel_bytes / 16);
  }
};

// Adds a part to a sum, or starts the sum with it.
template <int count>
CUFLASH_DEVICE void take_part(float* sum, float (&part)[count], bool is_first) {
  ptx::pin(part);
  unrolled<count>([&](int i) { sum[i] = is_first ? part[i] : sum[i] + part[i]; });
}

// Reads 16 columns of A from column 16 k on, as two steps of 8.
template <typename ATile>
CUFLASH_DEVICE void read_parts(Tf32Parts<4> (&frag)[2], const RowsReader<ATile>& a, int k) {
  float a_frag[8];
  a.read(a_frag, 0, k);
  unrolled<2>([&](int half) {
    frag[half] = Tf32Parts<4>(a_frag + 4 * half);
    frag[half].pin();
  });
}

// acc = A . B^T, for 64 rows of A and as many rows of B as acc has columns. The sum over columns is
// taken in parts of 16 * part_steps columns. If registers hold two parts, one is added while the
// next is computed.
template <int part_steps, bool holds_two, int tiles, typename ATile, typename BTile>
CUFLASH_DEVICE void multiply_in_parts(float (&acc)[1][tiles][4], const RowsReader<ATile>& a,
                                      const SharedOperand<BTile>& b) {
  constexpr int buffers = tiles <= 4 && holds_two ? 2 : 1, steps = ATile::columns / 16;
  constexpr int parts = steps / part_steps;
  static_assert(parts * part_steps == steps && parts >= 2, "the sum has two or more whole parts");
  float part[buffers][4 * tiles];
  Tf32Parts<4> frag[2][2];
  const auto take = [&](int index) { take_part(&acc[0][0][0], part[index % buffers], index == 0); };
  if constexpr (buffers == 1) read_parts(frag[0], a, 0);
#pragma unroll
  for (int k = 0; k < steps; ++k) {
    const int index = k / part_steps;
    if constexpr (buffers == 2) {
      if (k >= 2) ptx::wgmma_wait<1>();  // an earlier product has read these registers
      if (k % part_steps == 0 && index >= 2) take(index - 2);
      read_parts(frag[k % 2], a, k);
    }
    auto& sums = part[index % buffers];
    ptx::wgmma_group(sums, [&] {
      unrolled<2>([&](int half) {
        const auto& left = frag[k % 2][half].part;
        const int step = 2 * k + half;
        ptx::wgmma_tf32(sums, left[1], b.columns(0, step), k % part_steps > 0 || half > 0);
        ptx::wgmma_tf32(sums, left[0], b.columns(1, step), 1);
      });
      unrolled<2>([&](int half) {
        ptx::wgmma_tf32(sums, frag[k % 2][half].part[0], b.columns(0, 2 * k + half), 1);
      });
    });
    if constexpr (buffers == 1) {
      const bool is_last = k % part_steps == part_steps - 1;
      if (part_steps > 1 && is_last) ptx::wgmma_wait<1>();  // frag of the next step was read
      if (k + 1 < steps) read_parts(frag[(k + 1) % 2], a, k + 1);
      if (is_last) {
        ptx::wgmma_wait<0>();
        take(index);
      }
    }
  }
  if constexpr (buffers == 2) {
    ptx::wgmma_wait<part_steps>();
    take(parts - 2);
    ptx::wgmma_wait<0>();
    take(parts - 1);
  }
}

// acc = A . B^T for operands of a single TF32 part.
template <int tiles, typename ATile, typename BTile>
CUFLASH_DEVICE void multiply_once(float (&acc)[1][tiles][4], const RowsReader<ATile>& a,
                                  const SharedOperand<BTile>& b) {
  auto& sums = reinterpret_cast<float (&)[4 * tiles]>(acc);
  Tf32Parts<4> frag[2][2];
  unrolled<ATile::columns / 16>([&](int k) {
    if (k >= 2) ptx::wgmma_wait<1>();  // an earlier product has read these registers
    read_parts(frag[k % 2], a, k);
    ptx::wgmma_group(sums, [&] {
      unrolled<2>([&](int half) {
        const int step = 2 * k + half;
        ptx::wgmma_tf32(sums, frag[k % 2][half].part[0], b.columns(0, step), step > 0);
      });
    });
  });
  ptx::wgmma_wait<0>();
  ptx::pin(sums);
}

// acc = A . B^T, for 64 rows of A and as many rows of B as acc has columns. Split operands are
// summed in parts of `part_columns`. Registers hold two parts if the caller keeps little else in
// them. (D123)
template <int part_columns, bool holds_two, int tiles, typename ATile, typename BTile>
CUFLASH_DEVICE void multiply_transposed(float (&acc)[1][tiles][4], const RowsReader<ATile>& a,
                                        const SharedOperand<BTile>& b) {
  static_assert(ATile::columns == BTile::columns && BTile::rows == 8 * tiles, "shapes of A . B^T");
  if constexpr (uses_3xtf32) {
    multiply_in_parts<part_columns / 16, holds_two>(acc, a, b);
  } else {
    multiply_once(acc, a, b);
  }
}

// acc = A . B^T for operands of a single TF32 part, with A in shared memory.
template <int tiles, typename ATile, typename BTile>
CUFLASH_DEVICE void multiply_transposed(float (&acc)[1][tiles][4], const SharedOperand<ATile>& a,
                                        const SharedOperand<BTile>& b) {
  static_assert(ATile::columns == BTile::columns && BTile::rows == 8 * tiles, "shapes of A . B^T");
  static_assert(operand_parts == 1, "operands have one TF32 part");
  auto& sums = reinterpret_cast<float (&)[4 * tiles]>(acc);
  ptx::wgmma_group(sums, [&] {
    unrolled<ATile::columns / 8>(
        [&](int k) { ptx::wgmma_tf32(sums, a.columns(0, k), b.columns(0, k), k > 0); });
  });
  ptx::wgmma_wait<0>();
  ptx::pin(sums);
}

// acc += A . B^T for 64 rows of B and as many columns of acc: A is in registers, `count` steps of 8
// columns from step `first` on. Split operands are summed separately, small terms first, and the
// sum is added to acc in float32.
template <int count, typename BTile, int steps>
CUFLASH_DEVICE void multiply_columns(float (&acc)[32], Tf32Parts<4> (&a)[steps],
                                     const SharedOperand<BTile>& b, int first) {
  [[maybe_unused]] float part[32];
  auto& target = uses_3xtf32 ? part : acc;
#pragma unroll
  for (int k = first; k < first + count; ++k) a[k].pin();
  ptx::wgmma_group(target, [&] {
    if constexpr (uses_3xtf32) {
#pragma unroll
      for (int k = first; k < first + count; ++k) {
        ptx::wgmma_tf32(target, a[k].part[1], b.columns(0, k), k > first);
        ptx::wgmma_tf32(target, a[k].part[0], b.columns(1, k), 1);
      }
    }
#pragma unroll
    for (int k = first; k < first + count; ++k) {
      ptx::wgmma_tf32(target, a[k].part[0], b.columns(0, k), 1);
    }
  });
  ptx::wgmma_wait<0>();
  ptx::pin(target);
  if constexpr (uses_3xtf32) take_part(acc, part, false);
}

// acc += A . B^T for all columns of acc, where A is an accumulator. Split operands are summed in
// parts of at most `part_rows` terms.
template <int part_rows = 64, typename BTile, int tiles, int steps>
CUFLASH_DEVICE void multiply_sums(float (&acc)[1][tiles][4], const float (&a)[1][steps][4],
                                  const BTile (&b)[operand_parts]) {
  static_assert(BTile::rows == 8 * tiles && BTile::columns == 8 * steps, "shapes of A . B^T");
  constexpr int count = uses_3xtf32 && part_rows < 8 * steps ? part_rows / 8 : steps;
  static_assert(steps % count == 0, "the sum has whole parts");
  Tf32Parts<4> parts[steps];
  unrolled<steps>([&](int k) {
    const float frag[4] = {a[0][k][0], a[0][k][2], a[0][k][1], a[0][k][3]};
    parts[k] = Tf32Parts<4>(frag);
  });
#pragma unroll
  for (int t = 0; t < tiles; t += 8) {
    const SharedOperand<BTile> columns(b, 8 * t);
#pragma unroll
    for (int first = 0; first < steps; first += count) {
      multiply_columns<count>(reinterpret_cast<float (&)[32]>(acc[0][t]), parts, columns, first);
    }
  }
}

}  // namespace cuflash
