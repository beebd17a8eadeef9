// Bounds of the segment ids of every 64 queries and every 64 keys, for schedule/segments.cuh.
//
// A warp reads the 64 ids of one pair of bounds. Lanes past the end repeat the last id. The thread
// blocks of a batch entry cover its queries, then its keys.
#include "score/score.cuh"

namespace cuflash {

using Id = Score::Id;
constexpr int ids_per_block = bounded_ids * Config::num_warps;

// Writes the bounds of the ids of the `block`-th thread block.
CUFLASH_DEVICE void write_bounds(const Id* ids, IdBounds<Id>* bounds, int num_ids, int block) {
  const int pair = block * Config::num_warps + warp_index();
  const int first = pair * bounded_ids + lane_index();
  const auto id_at = [&](int i) { return ids[min(first + i, num_ids - 1)]; };
  IdBounds<Id> all{id_at(0), id_at(0)};
#pragma unroll
  for (int i = 32; i < bounded_ids; i += 32) {
    all.add({id_at(i), id_at(i)});
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    all.add({__shfl_xor_sync(0xffffffff, all.low, distance),
             __shfl_xor_sync(0xffffffff, all.high, distance)});
  }
  if (lane_index() == 0 && pair * bounded_ids < num_ids) bounds[pair] = all;
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads)
    cuflash_segment_bounds(const __grid_constant__ cuflash::SegmentBoundsParams params) {
  using namespace cuflash;
  const int blocks_q = (params.num_ids_q + ids_per_block - 1) / ids_per_block;
  const int blocks_k = (params.num_ids_k + ids_per_block - 1) / ids_per_block;
  const int owner = blockIdx.x / (blocks_q + blocks_k);
  const int block = blockIdx.x % (blocks_q + blocks_k);
  const BatchIndex entry(params.batch, owner);
  if (block < blocks_q) {
    write_bounds(static_cast<const Id*>(params.ids_q) + entry * params.ids_q_strides,
                 static_cast<IdBounds<Id>*>(params.bounds_q) + entry * params.bounds_q_strides,
                 params.num_ids_q, block);
  } else {
    write_bounds(static_cast<const Id*>(params.ids_k) + entry * params.ids_k_strides,
                 static_cast<IdBounds<Id>*>(params.bounds_k) + entry * params.bounds_k_strides,
                 params.num_ids_k, block - blocks_q);
  }
}
