// How a producer warpgroup turns rows of float32 into tiles of TF32 parts, split once for all
// consumers.
//
// A thread owns one column of the rows, or every second group of eight rows of a column. The lanes
// of a warp load neighbouring elements. The same registers are stored as rows of a tile, or as rows
// of its transpose.
#pragma once

#include "ptx/load_global.cuh"
#include "tile/load.cuh"
#include "sm90_tf32/matmul.cuh"

namespace cuflash {

// A thread's column of one operand; columns past the true width are zeros.
template <int width>
struct ColumnSource {
  const float* data;
  int64_t row_stride;
  bool exists;

  CUFLASH_DEVICE explicit ColumnSource(const RowSource& rows)
      : data(rows.data + ptx::thread_index() % width * rows.column_stride),
        row_stride(rows.row_stride),
        exists(ptx::thread_index() % width < rows.num_columns) {}
};

template <int width, int rows>
struct Tf32PairColumn {
  static_assert(width == 64 || width == 128, "128 threads cover one or two rows");
  static constexpr int sharers = 128 / width;        // threads of a column
  static constexpr int groups = rows / 8 / sharers;  // groups of eight rows of a thread

  float value[groups][8];

  // Rows outside `valid`, and rows whose bit of `hidden` is set, become zeros and are not read.
  CUFLASH_DEVICE void load(const ColumnSource<width>& source, int first_row, Range valid,
                           uint32_t hidden = 0) {
    const int own_row = 8 * first_group();
    hidden >>= own_row;
    first_row += own_row;
    const int64_t row_stride = ptx::opaque_value(source.row_stride);
    const float* at = source.data + first_row * row_stride;
    const Range own = valid.relative_to(first_row);
    const int count = source.exists ? own.end - own.begin : 0;
    unrolled<groups>([&](int g) {
      unrolled<8>([&](int i) {
        const int row = 8 * sharers * g + i;
        const bool is_hidden = Score::may_hide_rows && (hidden >> row & 1);
        value[g][i] = ptx::load_global_below(at, row - own.begin, is_hidden ? 0 : count);
        at += row_stride;
      });
      at += 8 * (sharers - 1) * row_stride;
    });
  }

  // Stores the parts as rows of a tile from `first_row` on. A warp writes 32 neighbours of one row.
  template <typename Tile>
  CUFLASH_DEVICE void store_rows(Tile (&tiles)[operand_parts], int first_row = 0) const {
    const int own = column(), chunk = own % 32 / 4;
    const int first = own / 32 * (32 * Tile::rows) + 32 * first_row + 256 * first_group() + own % 4;
    unrolled<groups, 8>([&](int g, int i) {
      const Tf32Parts<1> parts(&value[g][i]);
      const int index = first + 32 * (8 * sharers * g + i) + 4 * (chunk ^ i);
      unrolled<operand_parts>(
          [&](int p) { tiles[p].data[index] = __uint_as_float(parts.part[p][0]); });
    });
  }

  // Stores the parts as columns of a tile from `first_column` on. Each eight columns have the order
  // of an accumulator's registers: even ones first (tile/fragment.cuh).
  template <typename Tile>
  CUFLASH_DEVICE void store_columns(Tile (&tiles)[operand_parts], int first_column = 0) const {
    const int own = column(), own_group = first_group();
    unrolled<groups>([&](int g) {
      const int group = first_column / 8 + own_group + sharers * g;
      const int row = group / 4 * (32 * Tile::rows) + 32 * own;
      unrolled<2>([&](int odd) {
        const float four[4] = {value[g][odd], value[g][odd + 2], value[g][odd + 4],
                               value[g][odd + 6]};
        const Tf32Parts<4> parts(four);
        const int index = row + 4 * ((group % 4 * 2 + odd) ^ (own & 7));
        unrolled<operand_parts>([&](int p) {
          const auto& x = parts.part[p];
          *reinterpret_cast<uint4*>(tiles[p].data + index) = make_uint4(x[0], x[1], x[2], x[3]);
        });
      });
    });
  }

 private:
  // Computed where they are used, so that addresses derived from them occupy no registers during
  // the loop. (D89)
  CUFLASH_DEVICE static int column() { return ptx::thread_index() % width; }
  CUFLASH_DEVICE static int first_group() { return ptx::thread_index() % 128 / width; }
};

}  // namespace cuflash
