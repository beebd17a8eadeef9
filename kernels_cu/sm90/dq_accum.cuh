// Layout of the float32 sums of dq: backward_sm90.cu and backward_pair_sm90.cu write them,
// backward_convert.cu reads them.
//
// A slice is 16 rows of one panel of columns. Its elements have the order of a warp's accumulator,
// so that each lane writes and reads 16 bytes at a time. A panel has 64 columns, the last panel
// only the remaining ones. A part is 64 rows of one panel of a block of queries. Slices past the
// last row do not exist. Each packed sequence begins a new block.
#pragma once

#include "ptx/once.cuh"
#include "ptx/red.cuh"
#include "ptx/sync.cuh"
#include "schedule/tiles.cuh"
#include "score/seqlen.cuh"

namespace cuflash {

template <int tiles>
struct DqSlice {
  static constexpr int bytes = 512 * tiles;

  float value[tiles][32][4];  // by tile of 8 columns, lane and register

  CUFLASH_DEVICE void write(const float (&acc)[tiles][4], int lane) {
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      *reinterpret_cast<float4*>(value[t][lane]) =
          make_float4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]);
    }
  }

  // Adds an accumulator, with a pause after every 512 bytes. (D24)
  template <int nanoseconds>
  CUFLASH_DEVICE void add(const float (&acc)[tiles][4], int lane) {
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      ptx::red_add(value[t][lane], acc[t]);
      ptx::pause<nanoseconds>();
    }
  }

  CUFLASH_DEVICE void add_to(float (&acc)[tiles][4], int lane) const {
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      const uint4 x = ptx::load_once(value[t][lane]);
      acc[t][0] += __uint_as_float(x.x), acc[t][1] += __uint_as_float(x.y);
      acc[t][2] += __uint_as_float(x.z), acc[t][3] += __uint_as_float(x.w);
    }
  }
  // The same for a slice in shared memory.
  CUFLASH_DEVICE void add_staged_to(float (&acc)[tiles][4], int lane) const {
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      const float4 x = *reinterpret_cast<const float4*>(value[t][lane]);
      acc[t][0] += x.x, acc[t][1] += x.y, acc[t][2] += x.z, acc[t][3] += x.w;
      ptx::keep_order();  // loaded all at once, the tiles would spill registers
    }
  }

  // Bit mask of the slice's rows of dq that are not finite: stored where the slice was, once dq of
  // the slice is complete.
  CUFLASH_DEVICE uint32_t& non_finite_rows() { return *reinterpret_cast<uint32_t*>(value); }

  // Discards the slice, which the warp has used: one line of 128 bytes for each of the first lanes.
  CUFLASH_DEVICE void discard(int lane) {
    if (lane < bytes / 128) ptx::discard_line(&value[lane / 4][lane % 4 * 8]);
  }
};

struct DqAccum {
  // Part p has 64 rows from row 64 (p % row_parts) of the block on, of panel p / row_parts.
  static constexpr int row_parts = Config::block_m / 64, panels = (Config::head_dim + 63) / 64;
  static constexpr int parts = row_parts * panels;
  static constexpr int slice_floats = 16 * Config::head_dim;  // 16 rows of all panels

  // Number of tiles of 8 columns in a part, and the first float of a part in a whole block.
  CUFLASH_DEVICE static constexpr int tiles(int part) {
    const int left = Config::head_dim / 8 - part / row_parts * 8;
    return left < 8 ? left : 8;
  }
  CUFLASH_DEVICE static constexpr int begin(int part) {
    return 64 * (part / row_parts * row_parts * 64 + part % row_parts * 8 * tiles(part));
  }
  float* of_entry;
  int num_rows;

  // There are dq_sums arrays, one after another, each with the sums of all entries.
  CUFLASH_DEVICE DqAccum(const BackwardParams& params, const BatchIndex& entry, int sum = 0)
      : of_entry(params.sums + entry * params.sums_layout.batch + sum * params.sums_layout.row),
        num_rows(Seqlen(params.score, entry).rows_q) {
    const int64_t first_row =
        int64_t(QueryBlocks(params.score, entry.sequence()).first) * Config::block_m;
    of_entry += first_row * Config::head_dim;
  }

  // Number of slices of a part.
  CUFLASH_DEVICE int slices(int block, int part) const {
    const int rows = num_rows - block * Config::block_m - part % row_parts * 64;
    return min(max((rows + 15) / 16, 0), 4);
  }

  CUFLASH_DEVICE int part_bytes(int block, int part) const {
    return 512 * tiles(part) * slices(block, part);
  }

  CUFLASH_DEVICE float* part(int block, int part) const {
    // Parts with the same rows follow each other, without room for slices that do not exist.
    const int slice = block * (Config::block_m / 16) + part % row_parts * 4;
    return of_entry + int64_t(slice) * slice_floats + part / row_parts * 1024 * slices(block, part);
  }

  template <int tiles>
  CUFLASH_DEVICE DqSlice<tiles>& slice(int block, int part, int slice) const {
    return reinterpret_cast<DqSlice<tiles>*>(this->part(block, part))[slice];
  }
};
static_assert(DqAccum::begin(DqAccum::parts - 1) + 512 * DqAccum::tiles(DqAccum::parts - 1) ==
                  Config::block_m * Config::head_dim,
              "the parts fill a whole block");

}  // namespace cuflash
