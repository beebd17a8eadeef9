// dk and dv from the float32 sums of parts of the queries. The sums are added in the order of the
// parts, scaled, rounded, and stored in the caller's strides. Rows that came out non-finite are
// computed again, pair by pair.
//
// A thread block computes 16 keys, each of its warps 32 columns of dk or of dv.
#include "simt/recompute_rows.cuh"
#include "sm90/dkv_parts.cuh"

namespace cuflash {

constexpr int warps_of_dk = Config::head_dim / 32;
static_assert(Config::num_warps == warps_of_dk + Config::head_dim_v / 32,
              "each warp sums 32 columns");
static_assert(Config::block_n == 16, "a thread block sums one slice of 16 keys");

// Returns a bit mask of the non-finite rows.
CUFLASH_DEVICE uint32_t combine_parts(const BackwardParams& params, const KeyTile& work,
                                      int num_keys) {
  using Columns = DqSlice<4>;
  const BatchIndex entry = work.entry(params, 0);
  const DkvParts parts(params, params.sums, work.sequence);
  const bool of_k = warp_any(warp_index() < warps_of_dk);
  float acc[4][4] = {};
#pragma unroll 4
  for (int i = 0; i < params.num_parts; ++i) {
    const int part = work.owner * params.num_parts + i;
    // A slice holds the columns of dk, then those of dv.
    const auto* columns = reinterpret_cast<const Columns*>(&parts.slice(part, work.first_key));
    columns[warp_index()].add_to(acc, lane_index());
  }
  const int first_k = Seqlen(params.score, entry).first_k;
  const int first_column = 32 * (of_k ? warp_index() : warp_index() - warps_of_dk);
  RowTarget target =
      of_k ? RowTarget(params.dk, params.dk_layout, entry, first_k, params.head_dim, 0)
           : RowTarget(params.dv, params.dv_layout, entry, first_k, params.head_dim_v, 0);
  target.data += first_column * target.column_stride;
  target.num_columns -= first_column;
  const float factor = of_k ? params.score.scale : kept_scale(params.score);
  store_slice_wide(target, work.first_key, num_keys, factor, acc);
  return non_finite_rows(acc) & ((1u << num_keys) - 1);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads)
    cuflash_backward_combine(const __grid_constant__ cuflash::BackwardParams params) {
  using namespace cuflash;
  const KeyTile work = KeyTile::of_thread_block(params);
  const Seqlen seqlen(params.score, work.entry(params, 0));
  const int num_keys = min(max(seqlen.rows_k - work.first_key, 0), 16);
  if (num_keys == 0) return;
  const uint32_t rows_to_recompute = combine_parts(params, work, num_keys);
  __syncthreads();  // several warps wrote each row, and one may overwrite it below
  for_each_bit(rows_to_recompute, [&](int row) {
    recompute_dkv(params, work.owner, work.sequence, work.first_key + row);
  });
}
