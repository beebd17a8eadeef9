// Where the float32 sums of dq lie: written by backward_sm90.cu, read by backward_convert.cu.
//
// Slices of 16 rows and 64 columns, in the order in which the lanes of a warp hold them as an
// accumulator, so that both sides move 16 bytes a lane. A block of queries is one part of 64 x 64
// for each warpgroup; of the last one, slices past the end do not exist.
#pragma once

#include "params.cuh"
#include "ptx/once.cuh"
#include "ptx/red.cuh"
#include "ptx/sync.cuh"
#include "scheduler.cuh"

namespace cuflash {

struct DqSums {
  struct Slice {
    static constexpr int bytes = 4096;

    float value[8][32][4];  // of a tile of 8 columns, a lane

    __device__ __forceinline__ void write(const float (&acc)[8][4], int lane) {
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        *reinterpret_cast<float4*>(value[t][lane]) =
            make_float4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]);
      }
    }

    // By a warp that has used what it read.
    __device__ __forceinline__ void discard(int lane) {
      static_assert(bytes == 32 * 128, "a line for each lane");
      ptx::discard_line(&value[lane / 4][lane % 4 * 8]);
    }

    // Pauses after each addition of 512 bytes.
    template <int nanoseconds>
    __device__ __forceinline__ void add(const float (&acc)[8][4], int lane) {
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        ptx::red_add(value[t][lane], acc[t]);
        ptx::pause<nanoseconds>();
      }
    }

    __device__ __forceinline__ void read(float (&acc)[8][4], int lane) const {
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        const uint4 x = ptx::load_once(value[t][lane]);
        acc[t][0] = __uint_as_float(x.x), acc[t][1] = __uint_as_float(x.y);
        acc[t][2] = __uint_as_float(x.z), acc[t][3] = __uint_as_float(x.w);
      }
    }
  };

  // Part p has the rows 64 (p % row_parts) and on of the block, the columns 64 (p / row_parts).
  static constexpr int row_parts = Config::block_m / 64, column_parts = Config::head_dim / 64;
  static constexpr int parts = row_parts * column_parts;

  Slice* of_entry;
  int num_rows;

  __device__ __forceinline__ DqSums(const BackwardParams& params, const BatchIndex& entry)
      : of_entry(reinterpret_cast<Slice*>(params.sums + entry * params.sums_layout.batch)),
        num_rows(params.score.seqlen_q) {}

  // Slices that a part has.
  __device__ __forceinline__ int slices(int block, int part) const {
    const int rows = num_rows - block * Config::block_m - part % row_parts * 64;
    return min(max((rows + 15) / 16, 0), 4);
  }

  __device__ __forceinline__ Slice* part(int block, int part) const {
    // Parts that share rows follow each other, as long as they are.
    Slice* const of_rows =
        of_entry + (block * (Config::block_m / 16) + part % row_parts * 4) * column_parts;
    return of_rows + part / row_parts * slices(block, part);
  }
};

}  // namespace cuflash
