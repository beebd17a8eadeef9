// dq from its float32 sums: scaled, rounded, and stored in the caller's strides. Rows that came out
// non-finite are computed again, pair by pair.
//
// A thread block converts one block of queries of backward_sm90.cu, each warp one slice of it. If
// the block has several sums, they are added in order. Nothing was stored for a block that sees no
// key: its dq is zero. Where the tile that added last has stored dq (Config::finishes_dq), only
// rows that are not finite are left to do.
#include "sm90/bias_gradient.cuh"
#include "sm90/dq_accum.cuh"
#include "sm90/dq_semaphore.cuh"

namespace cuflash {

static_assert(Config::num_warps == 4 * DqAccum::parts, "one warp per slice");

// Scales and stores a warp's slice. Returns a bit mask of its non-finite rows.
template <int tiles>
CUFLASH_DEVICE uint32_t convert_slice(const BackwardParams& params, const BatchIndex& entry,
                                      int block) {
  const int part = warp_index() / 4, slice = warp_index() % 4;
  const DqAccum sums(params, entry);
  if (slice >= sums.slices(block, part)) return 0;
  const Score score(params.score, entry);
  const int end = score.kv_blocks(block * Config::block_m, (block + 1) * Config::block_m).end;
  if (Config::finishes_dq && end > 0) {  // some tile added, and the last one stored dq
    return sums.template slice<tiles>(block, part, slice).non_finite_rows();
  }
  const auto for_each_stored = [&](auto visit) {
#pragma unroll 1
    for (int sum = 0; sum < params.dq_sums; ++sum) {
      const int adding = tiles_before(score, block, end, sum, params.dq_sums);
      if (!warp_any(adding > 0)) continue;
      visit(DqAccum(params, entry, sum).slice<tiles>(block, part, slice));
    }
  };
  float acc[tiles][4] = {};
  for_each_stored([&](const DqSlice<tiles>& stored) { stored.add_to(acc, lane_index()); });
  unrolled<tiles, 4>([&](int t, int i) {
    acc[t][i] += 0.0f;  // a row to which no key contributes is +0
  });
  const int first_column = part / DqAccum::row_parts * 64;
  const int first_row = block * Config::block_m + part % DqAccum::row_parts * 64 + slice * 16;
  RowTarget target(params.dq, params.dq_layout, entry, Seqlen(params.score, entry).first_q,
                   params.head_dim, Config::head_dim);
  target.data += first_column * target.column_stride;
  target.num_columns -= first_column;
  const int num_rows = min(sums.num_rows - first_row, 16);
  store_slice_wide(target, first_row, num_rows, params.score.scale, acc);
  __syncwarp();  // all lanes have read their sums
  for_each_stored([&](DqSlice<tiles>& stored) { stored.discard(lane_index()); });
  return non_finite_rows(acc) & ((1u << num_rows) - 1);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads)
    cuflash_backward_convert(const __grid_constant__ cuflash::BackwardParams params) {
  using namespace cuflash;
  if constexpr (Config::overlaps) ptx::wait_for_previous_kernel();
  // The last tiles first: their sums are still in the L2 cache.
  const Tile tile = tile_of(params.grid, gridDim.x - 1 - blockIdx.x);
  const Place place = place_of<Config::block_m>(Packing::of_queries(params.score), tile.block);
  const BatchIndex entry(params.batch, tile.owner, place.sequence);
  const int first_row = place.block * Config::block_m;
  constexpr int last_tiles = DqAccum::tiles(DqAccum::parts - 1);
  uint32_t rows_to_recompute = 0;
  if (last_tiles == 8 || warp_any(warp_index() / 4 < DqAccum::parts - DqAccum::row_parts)) {
    rows_to_recompute = convert_slice<8>(params, entry, place.block);
  } else {
    rows_to_recompute = convert_slice<last_tiles>(params, entry, place.block);
  }
  __syncthreads();  // several warps wrote each row, and one may overwrite it below
  const int part = warp_index() / 4;
  const int row = first_row + part % DqAccum::row_parts * 64 + warp_index() % 4 * 16;
  for_each_bit(rows_to_recompute, [&](int bit) {
    recompute_dq(params, tile.owner, place.sequence, row + bit);
    if constexpr (Config::grad_bias) recompute_dbias(params, entry, row + bit);
  });
}
