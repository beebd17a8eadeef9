// What the backward passes need to know of every query: lse and
// delta = rowsum(dout * out) - dlse, which is subtracted from dp.
//
// A group of neighbouring lanes reads one row, several at once, so that enough is on its way. Rows
// that saw nothing (lse = -inf) get (+inf, 0), whatever their dout holds. A sink gives such a row a
// finite lse: there its out of 0 tells. Rows far from 0 get (NaN, delta): all results that they
// reach become NaN, and are computed again.
#include "config.cuh"
#include "params.cuh"
#include "numeric.cuh"
#include "scheduler.cuh"

namespace cuflash {

constexpr int chunks = Config::head_dim_v / 8;  // of eight columns
constexpr int lanes_per_row = chunks > 16 ? 32 : (chunks > 8 ? 16 : (chunks > 4 ? 8 : 4));
constexpr int rows_per_step = Config::num_threads / lanes_per_row;
static_assert(chunks <= lanes_per_row, "a lane reads at most one chunk");
constexpr int steps = Config::block_m / rows_per_step;
constexpr int rows_at_once = steps < 2 ? steps : 2;
static_assert(steps % rows_at_once == 0, "whole groups of rows");

// Eight columns of a row, zeros past the true width.
template <Dtype dtype>
__device__ __forceinline__ void read_chunk(Real (&values)[8], const void* array, int64_t offset,
                                           int64_t column_stride, int column, int num_columns) {
  using Value = typename Storage<dtype>::type;
  const Value* from = static_cast<const Value*>(array) + offset + column * column_stride;
  if constexpr (Config::copy_bytes == 16) {
    if (column + 8 <= num_columns) {
      alignas(16) Value chunk[8];
#pragma unroll
      for (int i = 0; i < 8 * sizeof(Value) / 16; ++i) {
        reinterpret_cast<uint4*>(chunk)[i] = reinterpret_cast<const uint4*>(from)[i];
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = to_real<dtype>(chunk[i]);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[i] = column + i < num_columns ? to_real<dtype>(from[i * column_stride]) : 0;
  }
}

// What a lane has of a row.
struct RowChunk {
  Real lse, dout[8], out[8];

  __device__ __forceinline__ void load(const DeltaParams& params, const BatchIndex& entry,
                                       int q_idx, int lane) {
    lse = params.lse[entry * params.lse_layout.batch + q_idx * params.lse_layout.row];
    const Layout& dout_layout = params.dout_layout;
    const Layout& out_layout = params.out_layout;
    read_chunk<Config::dtype>(dout, params.dout,
                              entry * dout_layout.batch + q_idx * dout_layout.row,
                              dout_layout.column, 8 * lane, params.head_dim_v);
    read_chunk<Config::out_dtype>(out, params.out,
                                  entry * out_layout.batch + q_idx * out_layout.row,
                                  out_layout.column, 8 * lane, params.head_dim_v);
  }

  __device__ __forceinline__ RowStatistics statistics(const DeltaParams& params,
                                                      const BatchIndex& entry, int q_idx) const {
    Real delta = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) delta += out[i] == 0 ? 0 : dout[i] * out[i];
#pragma unroll
    for (int distance = lanes_per_row / 2; distance > 0; distance /= 2) {
      delta += __shfl_xor_sync(0xffffffff, delta, distance, lanes_per_row);
    }
    if (lse == -infinity()) return {infinity(), 0};
    if constexpr (Config::grad_lse) {
      delta -= params.dlse[entry * params.dlse_layout.batch + q_idx * params.dlse_layout.row];
    }
    const Real least = params.recomputes_far_rows ? far_from_0 : infinity();
    const bool is_far = fabs(lse) >= least && lse != infinity();
    return {is_far ? infinity() - infinity() : lse, delta};
  }
};

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads)
    cuflash_backward_delta(const __grid_constant__ cuflash::DeltaParams params) {
  using namespace cuflash;
  const Tile tile = tile_of(params.grid, blockIdx.x);
  const BatchIndex entry(params.batch, tile.owner);
  const int first_row = tile.block * Config::block_m + threadIdx.x / lanes_per_row;
  const int lane = threadIdx.x % lanes_per_row;
  // Lanes past the end repeat the last row, so that whole warps take part in the sums.
  const auto existing = [&](int step) {
    return min(first_row + step * rows_per_step, params.seqlen_q - 1);
  };
#pragma unroll 1
  for (int first = 0; first < steps; first += rows_at_once) {
    RowChunk chunk[rows_at_once];
#pragma unroll
    for (int i = 0; i < rows_at_once; ++i) {
      chunk[i].load(params, entry, existing(first + i), lane);
    }
#pragma unroll
    for (int i = 0; i < rows_at_once; ++i) {
      const int q_idx = existing(first + i);
      const RowStatistics statistics = chunk[i].statistics(params, entry, q_idx);
      if (lane == 0 && q_idx == first_row + (first + i) * rows_per_step) {
        params.rows[entry * params.rows_layout.batch + q_idx * params.rows_layout.row] = statistics;
      }
    }
  }
}
