// Where the rows of keys and of values are: in order, or in pages that a page table puts in order.
#pragma once

#include "tile/load.cuh"

namespace cuflash {

// The offset of a key's row from the first page, in elements. `numbers` is the entry's row of the
// page table. Invalid page numbers become the first or the last page: no other memory is read.
CUFLASH_DEVICE int64_t place_in_pages(const ForwardParams& params, const int32_t* numbers, int key,
                                      int64_t page_stride, int64_t row_stride) {
  const int column = key / params.page_size;
  const int number = numbers[column * params.page_table_layout.row];
  return max(0, min(number, params.num_pages - 1)) * page_stride +
         (key - column * params.page_size) * row_stride;
}

CUFLASH_DEVICE const int32_t* table_of(const ForwardParams& params, const BatchIndex& entry) {
  return params.page_table + entry * params.page_table_layout.batch;
}

// The rows of k or v of one batch entry, looked up one by one.
template <bool paged>
struct KeySource : KeyRows {
  CUFLASH_DEVICE KeySource(const ForwardParams&, const KeyRows& rows, const BatchIndex&, int64_t)
      : KeyRows(rows) {}
};
template <>
struct KeySource<true> : KeyRows {
  const ForwardParams& params;
  const int32_t* numbers;
  int64_t page_stride;

  CUFLASH_DEVICE KeySource(const ForwardParams& forward_params, const KeyRows& rows,
                           const BatchIndex& entry, int64_t elements)
      : KeyRows(rows),
        params(forward_params),
        numbers(table_of(params, entry)),
        page_stride(elements) {}

  CUFLASH_DEVICE const Stored* row(int key) const {
    return data + place_in_pages(params, numbers, key, page_stride, row_stride);
  }
};

// The places (offsets) of the rows of a block of keys, in shared memory for all threads. There are
// buffers for the block that is multiplied and for the next one (D154). CUDA cores need a third:
// they read rows directly from global memory, and some warps may still be at the block before.
constexpr int place_buffers = Config::simt ? 3 : 2;
CUFLASH_DEVICE int next_places(int buffer) { return buffer + 1 == place_buffers ? 0 : buffer + 1; }

template <bool paged>
struct BlockPlaces {
  // Keys in order need no look-up.
  CUFLASH_DEVICE void begin(const ForwardParams&, const BatchIndex&) {}
  CUFLASH_DEVICE void look_up(int, const ForwardParams&, int, Range) {}
  CUFLASH_DEVICE const KeyRows& of_k(const KeyRows& rows, int) const { return rows; }
  CUFLASH_DEVICE const KeyRows& of_v(const KeyRows& rows, int) const { return rows; }
};
template <>
struct alignas(128) BlockPlaces<true> {
  int64_t k_places[place_buffers][Config::block_n], v_places[place_buffers][Config::block_n];
  const int32_t* numbers;  // the entry's row of the page table

  CUFLASH_DEVICE void begin(const ForwardParams& params, const BatchIndex& entry) {
    if (ptx::thread_index() == 0) numbers = table_of(params, entry);
    __syncthreads();  // numbers is written
  }

  // Looks up the keys from `first_key` on. All threads call it, and read the places after a
  // barrier. Keys outside `valid` are not looked up: their page may be beyond the table.
  CUFLASH_DEVICE void look_up(int buffer, const ForwardParams& params, int first_key, Range valid) {
    for (int i = ptx::thread_index(); i < Config::block_n; i += Config::num_threads) {
      const int key = first_key + i;
      int64_t k = 0, v = 0;
      if (valid.contains(key)) {
        k = place_in_pages(params, numbers, key, params.k_page, params.k_layout.row);
        v = place_in_pages(params, numbers, key, params.v_page, params.v_layout.row);
      }
      k_places[buffer][i] = k;
      v_places[buffer][i] = v;
    }
  }

  CUFLASH_DEVICE PlacedRows of_k(const KeyRows& rows, int buffer) const {
    return {rows, k_places[buffer]};
  }
  CUFLASH_DEVICE PlacedRows of_v(const KeyRows& rows, int buffer) const {
    return {rows, v_places[buffer]};
  }
};

}  // namespace cuflash
