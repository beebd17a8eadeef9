// Results of rows that belong to no packed sequence: rows before the first and after the last one.
#pragma once

#include "simt/recompute_rows.cuh"

namespace cuflash {

// Writes out 0 and lse -inf. Called by one warp of each thread block.
CUFLASH_DEVICE void clear_rows_outside_sequences(const ForwardSm90Params& params) {
  const Packing queries = Packing::of_queries(params.score);
  const int begin = queries.begin(0), end = max(queries.begin(queries.num_sequences), begin);
  const int rows = begin + queries.total - end, lane = lane_index();
  const int64_t count = int64_t(rows) * params.grid.num_owners;
#pragma unroll 1
  for (int64_t i = ptx::block_index(); warp_any(i < count); i += gridDim.x) {
    const int owner = static_cast<int>(i / rows),
              rank = static_cast<int>(i - int64_t(owner) * rows);
    const int row = rank < begin ? rank : rank - begin + end;
    const BatchIndex entry(params.batch, owner);
    using Value = Storage<Config::out_dtype>;
    Value* out = static_cast<Value*>(params.out) + entry * params.out_layout.batch +
                 row * params.out_layout.row;
    float* lse = params.lse + entry * params.lse_layout.batch + row * params.lse_layout.row;
    if (8 * lane < params.head_dim_v) {
      uint4* const eight = reinterpret_cast<uint4*>(out + 8 * lane);  // columns: 16 or 32 bytes
      unrolled<8 * sizeof(Value) / 16>([&](int i) { eight[i] = make_uint4(0, 0, 0, 0); });
    }
    if (lane == 0 && params.lse != nullptr) *lse = -infinity();
    __syncwarp();
  }
}

}  // namespace cuflash
