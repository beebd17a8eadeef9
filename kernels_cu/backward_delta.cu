// Statistics of every query for the backward passes: lse, and delta = rowsum(dout * out) - dlse,
// which is subtracted from dp. The kernel also clears the turns of a one-pass backward kernel.
//
// A group of neighbouring lanes reads one row. Each lane starts the loads of several rows before it
// uses any of them, so that enough bytes are in flight. Rows that saw no key (lse = -inf) get
// (+inf, 0), whatever their dout holds. With a sink the lse of such a row is finite: its delta is 0
// because its out is 0. Rows far from 0 get (NaN, delta): all results that they reach become NaN,
// and are computed again.
#include "ptx/dependents.cuh"
#include "ptx/once.cuh"
#include "schedule/scheduler.cuh"

namespace cuflash {

constexpr int chunks = Config::head_dim_v / 8;  // chunks of eight columns
constexpr int lanes_per_row = chunks > 16 ? 32 : (chunks > 8 ? 16 : (chunks > 4 ? 8 : 4));
constexpr int rows_per_step = Config::num_threads / lanes_per_row;
static_assert(chunks <= lanes_per_row, "a lane reads at most one chunk");
constexpr int steps = Config::block_m / rows_per_step;
constexpr int rows_at_once = steps < 2 ? steps : 2;
static_assert(steps % rows_at_once == 0, "block_m is a multiple of the rows read at once");

// The eight columns that a lane reads of each row of a batch entry.
template <Dtype dtype, bool once>
struct LaneColumns {
  using Value = Storage<dtype>;
  static constexpr int columns_at_once = Config::copy_bytes == 16 ? 16 / sizeof(Value) : 1;
  struct alignas(16) Row {
    Value value[8];
  };

  const Value* data;
  int64_t row_stride, column_stride;
  int count;  // columns before the true width, which no copy of 16 bytes crosses

  CUFLASH_DEVICE LaneColumns(const void* array, const Layout& layout, const BatchIndex& entry,
                             int column, int num_columns)
      : data(static_cast<const Value*>(array) + entry * layout.batch + column * layout.column),
        row_stride(layout.row),
        column_stride(layout.column),
        count(num_columns - column) {}

  // Raw elements, with zeros past the true width.
  CUFLASH_DEVICE Row read(int q_idx) const {
    const Value* from = data + q_idx * row_stride;
    Row row;
#pragma unroll
    for (int i = 0; i < 8; i += columns_at_once) {
      if constexpr (columns_at_once > 1) {
        const uint4* const piece = reinterpret_cast<const uint4*>(from + i);
        uint4 copy{};
        if (i < count) copy = once ? ptx::load_once(piece) : *piece;
        *reinterpret_cast<uint4*>(row.value + i) = copy;
      } else {
        row.value[i] = i < count ? from[i * column_stride] : Value(0);
      }
    }
    return row;
  }
};

// Each thread clears its share of the turns. Grids of 2^25 thread blocks have 2^32 threads.
CUFLASH_DEVICE void clear_turns(const DeltaParams& params) {
  const int64_t threads = int64_t(gridDim.x) * Config::num_threads;
  const int64_t first = int64_t(blockIdx.x) * Config::num_threads + threadIdx.x;
  for (int64_t i = first; i < params.num_turns; i += threads) params.turns[i] = 0;
}

}  // namespace cuflash

// The launch bounds ask for one thread block on each SM. Without them the compiler aims at more. It
// then spills an address, or reads a row only after it has finished the previous one.
extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads, 1)
    cuflash_backward_delta(const __grid_constant__ cuflash::DeltaParams params) {
  using namespace cuflash;
  // Later kernels read dout again, but not out.
  using DoutColumns = LaneColumns<Config::dtype, false>;
  using OutColumns = LaneColumns<Config::out_dtype, true>;
  if constexpr (Config::overlaps) ptx::launch_dependents();  // a one-pass kernel waits for this one
  clear_turns(params);
  // The last tiles first: the out that the forward wrote last is still in the L2 cache. At the end
  // the cache holds the tiles of dout with which the next kernel starts.
  const Tile tile = tile_of(params.grid, gridDim.x - 1 - blockIdx.x);
  const BatchIndex entry(params.batch, tile.owner);
  const int first_row = tile.block * Config::block_m + threadIdx.x / lanes_per_row;
  const int lane = threadIdx.x % lanes_per_row, width = params.head_dim_v;
  const DoutColumns dout_columns(params.dout, params.dout_layout, entry, 8 * lane, width);
  const OutColumns out_columns(params.out, params.out_layout, entry, 8 * lane, width);
  const Real least_far = params.recomputes_far_rows ? far_from_0 : infinity();
  // Lanes past the end repeat the last row, so that whole warps take part in the sums.
  const auto existing = [&](int step) {
    return min(first_row + step * rows_per_step, params.seqlen_q - 1);
  };
#pragma unroll 1
  for (int first = 0; first < steps; first += rows_at_once) {
    DoutColumns::Row dout[rows_at_once];
    OutColumns::Row out[rows_at_once];
    Real lse[rows_at_once], dlse[rows_at_once] = {};
#pragma unroll
    for (int i = 0; i < rows_at_once; ++i) {
      const int q_idx = existing(first + i);
      dout[i] = dout_columns.read(q_idx);
      out[i] = out_columns.read(q_idx);
      lse[i] = params.lse[entry * params.lse_layout.batch + q_idx * params.lse_layout.row];
      if constexpr (Config::grad_lse) {
        dlse[i] = params.dlse[entry * params.dlse_layout.batch + q_idx * params.dlse_layout.row];
      }
    }
#pragma unroll
    for (int i = 0; i < rows_at_once; ++i) {
      const int q_idx = existing(first + i);
      Real delta = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const Real factor = to_real<Config::out_dtype>(out[i].value[j]);
        const Real value = to_real<Config::dtype>(dout[i].value[j]);
        delta = factor == 0 ? delta : fma(value, factor, delta);
      }
      // All lanes use lse, not only the storing lane, so that lse is loaded with the other values.
      const bool hidden = lse[i] == -infinity();
      if (hidden) delta = 0;
#pragma unroll
      for (int distance = lanes_per_row / 2; distance > 0; distance /= 2) {
        delta += __shfl_xor_sync(0xffffffff, delta, distance, lanes_per_row);
      }
      if constexpr (Config::grad_lse) delta -= hidden ? 0 : dlse[i];
      if (lane == 0 && q_idx == first_row + (first + i) * rows_per_step) {
        const bool is_far = fabs(lse[i]) >= least_far && lse[i] != infinity();
        const Real known = is_far ? infinity() - infinity() : lse[i];
        params.rows[entry * params.rows_layout.batch + q_idx * params.rows_layout.row] = {
            hidden ? infinity() : known, delta};
      }
    }
  }
}
