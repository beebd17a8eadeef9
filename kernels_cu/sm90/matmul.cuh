// The two products of attention, warpgroup by warpgroup, on tiles that TMA has loaded.
#pragma once

#include "numeric.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/special.cuh"
#include "ptx/wgmma_k_major.cuh"
#include "ptx/wgmma_products.cuh"

namespace cuflash {

using ptx::Major;

// A matrix in shared memory as panels of 64 columns of 16-bit elements, or of 128 columns of 8-bit
// elements. A row of a panel is 128 bytes, and the 16-byte chunk c of row r lies at chunk c ^ (r %
// 8), as in smem_tile.cuh. TMA fills the last panel past the tile's width as well (with zeros past
// the end of the tensor), but these columns are not multiplied.
template <int rows_, int columns_>
struct PanelTile {
  static constexpr int rows = rows_;
  static constexpr int columns = columns_;
  static constexpr int panel_columns = 128 / sizeof(Element);
  static constexpr int num_panels = (columns + panel_columns - 1) / panel_columns;
  static constexpr int panel_bytes = rows * 128;
  static constexpr int bytes = num_panels * panel_bytes;

  alignas(
      1024) Element data[num_panels][rows][panel_columns];  // 8 rows are one atom of the swizzle

  // Byte offset of a 16-byte chunk within its panel.
  CUFLASH_DEVICE static constexpr int chunk_offset(int row, int chunk) {
    return row * 128 + ((chunk ^ (row & 7)) << 4);
  }

  // Descriptor of an operand whose columns are summed: Q and K in Q K^T.
  CUFLASH_DEVICE uint64_t k_major(int first_row = 0) const {
    return ptx::smem_descriptor(ptx::shared_address(data) + first_row * 128, 16);
  }

  // Descriptor of an operand whose rows are summed: V in P V. The leading offset is from one panel
  // to the next.
  CUFLASH_DEVICE uint64_t mn_major(int first_row = 0, int first_panel = 0) const {
    return ptx::smem_descriptor(
        ptx::shared_address(data) + first_row * 128 + first_panel * panel_bytes, panel_bytes);
  }
};

// An accumulator of 64 rows as the registers of one instruction. Warp w of the warpgroup has rows
// 16 w to 16 w + 15, which its lanes hold as in fragment.cuh.
template <int tiles>
CUFLASH_DEVICE float (&flat(float (&acc)[1][tiles][4]))[4 * tiles] {
  return reinterpret_cast<float (&)[4 * tiles]>(acc);
}

// Calls multiply(columns, panel) for the columns of acc that one instruction takes at a time, and
// the first panel of B that holds them. ptxas requires that all registers of an instruction are
// among the registers that a thread has at launch. With 16 warps these hold fewer than 256 columns.
// (D83)
template <int tiles, typename Multiply>
CUFLASH_DEVICE void for_columns(float (&acc)[1][tiles][4], Multiply multiply) {
  constexpr int parts = Config::num_warps > 12 && tiles == 32 ? 2 : 1;
  unrolled<parts>([&](int i) {
    multiply(reinterpret_cast<float (&)[4 * tiles / parts]>(acc[0][i * (tiles / parts)]),
             i * (tiles / parts / 8));
  });
}

// Starts acc = A . B^T, for as many rows of B as acc has columns.
template <typename ATile, typename BTile, int tiles>
CUFLASH_DEVICE void start_transposed_product(float (&acc)[1][tiles][4], uint64_t a, uint64_t b) {
  static_assert(tiles <= BTile::rows / 8 && ATile::columns == BTile::columns, "shapes of A . B^T");
  ptx::wgmma_group(flat(acc), [&] {
    unrolled<ATile::columns * sizeof(Element) / 32>([&](int k) {
      // One product sums 32 bytes of a panel's row.
      const uint64_t at_a = a + k % 4 * 2 + k / 4 * (ATile::panel_bytes / 16);
      const uint64_t at_b = b + k % 4 * 2 + k / 4 * (BTile::panel_bytes / 16);
      if constexpr (is_fp8) {
        ptx::wgmma_e4m3(flat(acc), at_a, at_b, k > 0);
      } else {
        ptx::wgmma_ss<Major::k, Major::k>(flat(acc), at_a, at_b, k > 0);
      }
    });
  });
}

// Starts acc = A . B^T with A in registers.
template <typename BTile, int tiles, int steps>
CUFLASH_DEVICE void start_transposed_product(float (&acc)[1][tiles][4],
                                             uint32_t (&a_frag)[1][steps][4], uint64_t b) {
  static_assert(tiles <= BTile::rows / 8 && steps == BTile::columns / 16, "shapes of A . B^T");
  auto& a_registers = reinterpret_cast<uint32_t (&)[4 * steps]>(a_frag);
  ptx::pin(a_registers);
  ptx::wgmma_group(flat(acc), [&] {
    unrolled<steps>([&](int k) {
      ptx::wgmma_rs<Major::k>(flat(acc), a_frag[0][k],
                              b + k / 4 * (BTile::panel_bytes / 16) + k % 4 * 2, k > 0);
    });
  });
  ptx::pin(a_registers);
}

// Reads 64 rows of a tile as the operand A in registers. Called by a warpgroup.
template <typename Tile, int steps>
CUFLASH_DEVICE void read_operand(uint32_t (&frag)[1][steps][4], const Tile& tile, int first_row) {
  const uint32_t thread = ptx::thread_index() % 128, lane = thread % 32;
  const uint32_t row = first_row + thread / 32 * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < steps; ++k) {
    ptx::ldmatrix_x4(frag[0][k], ptx::shared_address(tile.data[k / 4]) +
                                     Tile::chunk_offset(row, k % 4 * 2 + lane / 16));
  }
}

// Starts acc = A^T . B, or acc += A^T . B if `accumulates`, for one panel of A and as many columns
// of B as acc has. The rows of both are summed.
template <typename ATile, typename BTile, int tiles>
CUFLASH_DEVICE void start_panel_product(float (&acc)[1][tiles][4], uint64_t a, uint64_t b,
                                        bool accumulates = false) {
  static_assert(ATile::rows == BTile::rows && tiles <= BTile::columns / 8, "shapes of A^T . B");
  ptx::wgmma_group(flat(acc), [&] {
    unrolled<ATile::rows / 16>([&](int k) {
      ptx::wgmma_ss<Major::mn, Major::mn>(flat(acc), a + k * 128, b + k * 128,
                                          k > 0 || accumulates);
    });
  });
}

// Starts acc += A . B, which sums over the columns of one panel of A and the rows of B.
template <typename ATile, typename BTile, int tiles>
CUFLASH_DEVICE void start_shared_product(float (&acc)[1][tiles][4], uint64_t a, uint64_t b) {
  static_assert(ATile::columns == 64 && BTile::rows == 64 && tiles == BTile::columns / 8,
                "shapes of A . B");
  ptx::wgmma_group(flat(acc), [&] {
    unrolled<4>([&](int k) {
      for_columns(acc, [&](auto& columns, int panel) {
        ptx::wgmma_ss<Major::k, Major::mn>(columns, a + k * 2,
                                           b + k * 128 + panel * (BTile::panel_bytes / 16), 1);
      });
    });
  });
}

// Starts acc = A . B of e4m3, with A in registers and the columns of B as rows of a tile, for
// `count` steps of 32 from step `first` on.
template <typename BTile, int first, int count, int tiles, int steps>
CUFLASH_DEVICE void start_product_e4m3(float (&acc)[1][tiles][4], uint32_t (&a_frag)[1][steps][4],
                                       uint64_t b) {
  static_assert(tiles == BTile::rows / 8 && steps == BTile::columns / 32, "shapes of A . B^T");
  auto& a_registers = reinterpret_cast<uint32_t (&)[4 * steps]>(a_frag);
  ptx::pin(a_registers);
  ptx::wgmma_group(flat(acc), [&] {
    unrolled<count>([&](int k) {
      ptx::wgmma_e4m3(flat(acc), a_frag[0][first + k], b + (first + k) * 2, k > 0);
    });
  });
  ptx::pin(a_registers);
}

// Starts acc += A . B with A in registers, for `count` steps of 16 from step `first` on.
template <typename BTile, int first = 0, int count = BTile::rows / 16, int tiles, int steps>
CUFLASH_DEVICE void start_product(float (&acc)[1][tiles][4], uint32_t (&a_frag)[1][steps][4],
                                  uint64_t b) {
  static_assert(tiles == BTile::columns / 8 && steps <= BTile::rows / 16, "shapes of A . B");
  static_assert(first + count <= steps, "A has these steps");
  auto& a_registers = reinterpret_cast<uint32_t (&)[4 * steps]>(a_frag);
  ptx::pin(a_registers);
  ptx::wgmma_group(flat(acc), [&] {
#pragma unroll
    for (int k = first; k < first + count; ++k) {
      // 16 rows are 2048 bytes of every panel.
      for_columns(acc, [&](auto& columns, int panel) {
        ptx::wgmma_rs<Major::mn>(columns, a_frag[0][k],
                                 b + k * 128 + panel * (BTile::panel_bytes / 16), 1);
      });
    }
  });
  ptx::pin(a_registers);
}

}  // namespace cuflash
