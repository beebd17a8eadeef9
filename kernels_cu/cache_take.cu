// Each sequence of a cache takes over the page table row and the length of its parent. A thread
// copies one element of the table.
#include "schedule/scheduler.cuh"

namespace cuflash {

CUFLASH_DEVICE void copy_states(const CacheTakeParams& params) {
  const int64_t i =
      static_cast<int64_t>(ptx::block_index()) * Config::num_threads + ptx::thread_index();
  const int s = static_cast<int>(i / params.num_columns), c = i % params.num_columns;
  if (s >= params.num_sequences) return;
  const int64_t parent = static_cast<const int64_t*>(params.parents)[s];
  const int64_t found = clamp(parent, 0, params.num_sequences - 1);
  params.page_table[i] = params.old_table[found * params.num_columns + c];
  if (c > 0) return;
  int64_t kept = parent < 0 ? 0 : params.old_lengths[found];
  if (params.kept != nullptr) kept = clamp(static_cast<const int64_t*>(params.kept)[s], 0, kept);
  params.lengths[s] = static_cast<int32_t>(kept);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads)
    cuflash_cache_take(const __grid_constant__ cuflash::CacheTakeParams params) {
  cuflash::copy_states(params);
}
