// Writes new keys and values of a cache to the pages that cache_grow.cu gave to the sequences.
//
//   for each head of each sequence, and each `tokens_of_block` new keys:         one thread block
//     first block: copy the rows of a shared page to the page that replaces it    one warp a row
//     write k, rotated by its position if the cache has a rotation, and v         one warp a row
#include "cache/page_rows.cuh"

namespace cuflash {

constexpr int tokens_of_block = 16;
// Eight thread blocks leave 64 registers to a thread. Without this bound ptxas aims for 32 to 48
// registers and spills.
constexpr int blocks_per_sm = 8;

CUFLASH_DEVICE void copy_row(const PageRow& to, const Element* from, int width,
                             int64_t from_stride) {
  for (int i = ptx::thread_index() % 32; i < width; i += 32) to.store(i, from[i * from_stride]);
}

// The scale of a head: its own, or that of all heads.
CUFLASH_DEVICE Real scale_of(const float* scales, int head, Real scale) {
  if constexpr (!rounds_to_8_bits) return 1;
  return scales != nullptr ? scales[head] : scale;
}

CUFLASH_DEVICE void write_tokens(const CacheWriteParams& params) {
  const int chunks = (params.num_tokens + tokens_of_block - 1) / tokens_of_block;
  const int chunk = ptx::block_index() % chunks, of_all = ptx::block_index() / chunks;
  const int head = of_all % params.num_heads, s = of_all / params.num_heads;
  const int warp = ptx::thread_index() / 32;
  const int32_t* const table = params.page_table + static_cast<int64_t>(s) * params.num_columns;
  const int start = params.starts[s], count = params.lengths[s] - start, size = params.page_size;
  const PageRows k_rows{static_cast<PageElement*>(params.k_pages), params.num_heads, size,
                        params.head_dim};
  const PageRows v_rows{static_cast<PageElement*>(params.v_pages), params.num_heads, size,
                        params.head_dim_v};

  const int source = params.sources[s];
  if (chunk == 0 && source >= 0) {
    const int page = table[start / size];
    for (int slot = warp; slot < start % size; slot += Config::num_warps) {
      k_rows.copy(page, source, head, slot);
      v_rows.copy(page, source, head, slot);
    }
  }

  const Layout &of_k = params.k_layout, &of_v = params.v_layout;
  const Element* const k =
      static_cast<const Element*>(params.k) + s * of_k.batch.axis[0] + head * of_k.batch.axis[1];
  const Element* const v =
      static_cast<const Element*>(params.v) + s * of_v.batch.axis[0] + head * of_v.batch.axis[1];
  const Pairs pairs{params.frequencies, params.num_pairs};
  const Real k_scale = scale_of(params.k_scales, head, params.k_scale);
  const Real v_scale = scale_of(params.v_scales, head, params.v_scale);
  const int end = min((chunk + 1) * tokens_of_block, min(count, params.num_tokens));
  for (int i = chunk * tokens_of_block + warp; i < end; i += Config::num_warps) {
    const int key = start + i, page = table[key / size], slot = key % size;
    rotate_row(PageRow{k_rows.row(page, head, slot), k_scale}, k + i * of_k.row, of_k.column,
               params.head_dim, pairs, key);
    copy_row({v_rows.row(page, head, slot), v_scale}, v + i * of_v.row, params.head_dim_v,
             of_v.column);
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads, cuflash::blocks_per_sm)
    cuflash_cache_write(const __grid_constant__ cuflash::CacheWriteParams params) {
  cuflash::write_tokens(params);
}
