// New lengths of the sequences of a cache that receives new keys, and the pages that they take.
//
//   mark the pages that hold keys of some sequence, and the pages that several sequences share
//   for each sequence, in order: count the pages that it needs for new keys, and to replace a last
//     page that is not full and that is shared or does not exist
//   assign the free pages in this order, lowest number first; keys without a page are dropped
//
// One thread block. The host reads nothing back, so that a captured graph can grow a cache. (D155)
#include "schedule/scheduler.cuh"

namespace cuflash {

struct SharedMemory {
  uint32_t named[Config::page_words];   // one bit for each page: is it in the table?
  uint32_t shared[Config::page_words];  // is it in the table more than once?
  int32_t sums[32];
};
static_assert(Config::smem_bytes == 0 || sizeof(SharedMemory) == Config::smem_bytes,
              "CacheGrowConfig.smem_bytes counts this struct");

constexpr int reads_at_once = 8;  // page numbers that one thread loads at once

CUFLASH_DEVICE bool bit_of(const uint32_t* bits, int i) { return bits[i / 32] >> i % 32 & 1; }

// Exclusive prefix sum of `value` over the threads, plus `total`. `total` grows by the whole sum.
CUFLASH_DEVICE int exclusive_prefix_sum(int value, int32_t (&sums)[32], int& total) {
  const int lane = ptx::thread_index() % 32, warp = ptx::thread_index() / 32;
  int sum = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int below = __shfl_up_sync(0xffffffff, sum, distance);
    if (lane >= distance) sum += below;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();  // every warp has written its sum
  int before = total + sum - value;
  for (int w = 0; w < Config::num_warps; ++w) {
    if (w < warp) before += sums[w];
    total += sums[w];
  }
  __syncthreads();  // every thread has read the sums
  return before;
}

// Marks the pages that the table gives to sequences within their lengths. Threads are divided
// evenly among the sequences.
CUFLASH_DEVICE void mark_pages(const CacheGrowParams& params, SharedMemory& smem) {
  const int of_each = max(Config::num_threads / params.num_sequences, 1);
  const int at_once = Config::num_threads / of_each;
  const int own = ptx::thread_index() / of_each;
  for (int s = own; own < at_once && s < params.num_sequences; s += at_once) {
    const int length = min(params.lengths[s], params.max_length);
    const int columns = (length + params.page_size - 1) / params.page_size;
    const int32_t* const row = params.page_table + static_cast<int64_t>(s) * params.num_columns;
    for (int c = ptx::thread_index() % of_each; c < columns; c += reads_at_once * of_each) {
      int pages[reads_at_once];
#pragma unroll
      for (int i = 0; i < reads_at_once; ++i) {
        pages[i] = c + i * of_each < columns ? row[c + i * of_each] : -1;
      }
#pragma unroll
      for (int i = 0; i < reads_at_once; ++i) {
        const int page = pages[i];
        if (page < 0 || page >= params.num_pages) continue;
        const uint32_t bit = 1u << page % 32;
        if (atomicOr(&smem.named[page / 32], bit) & bit) atomicOr(&smem.shared[page / 32], bit);
      }
    }
  }
}

// The length that a sequence wants, and the pages that it needs for that.
struct Growth {
  int start, end, first_column;
  int last_page;   // a page that is not full and receives a key; -1: none
  int64_t wanted;  // length with all new keys
  bool replaces;   // is the last page replaced, because it is shared or does not exist?
  int needed;      // number of pages

  CUFLASH_DEVICE Growth(const CacheGrowParams& params, const SharedMemory& smem, int s) {
    const int size = params.page_size;
    start = max(0, min(params.lengths[s], params.max_length));
    int64_t count = params.num_tokens;
    if (params.counts != nullptr) {
      count = clamp(static_cast<const int64_t*>(params.counts)[s], 0, count);
    }
    wanted = start + count;
    end = static_cast<int>(clamp(wanted, 0, params.max_length));
    first_column = (start + size - 1) / size;
    const bool begun = start % size != 0 && end > start;
    last_page = -1;
    if (begun) {
      last_page = params.page_table[static_cast<int64_t>(s) * params.num_columns + start / size];
      if (last_page >= params.num_pages) last_page = -1;
    }
    replaces = begun && (last_page < 0 || bit_of(smem.shared, last_page));
    needed = (end + size - 1) / size - first_column + replaces;
  }
};

CUFLASH_DEVICE void grow_sequences(const CacheGrowParams& params, SharedMemory& smem) {
  const int thread = ptx::thread_index();
  const int words = (params.num_pages + 31) / 32;
  for (int i = thread; i < words; i += Config::num_threads) smem.named[i] = smem.shared[i] = 0;
  __syncthreads();  // all marks are cleared
  mark_pages(params, smem);
  __syncthreads();  // all pages in the table are marked

  int needed = 0;
  for (int first = 0; first < params.num_sequences; first += Config::num_threads) {
    const int s = first + thread;
    const int own = s < params.num_sequences ? Growth(params, smem, s).needed : 0;
    const int rank = exclusive_prefix_sum(own, smem.sums, needed);
    if (s < params.num_sequences) params.sources[s] = rank;
  }

  int free = 0;
  for (int first = 0; first < words && free < needed; first += Config::num_threads) {
    const int word = first + thread;
    uint32_t bits = word < words ? ~smem.named[word] : 0;
    if (word == words - 1 && params.num_pages % 32 != 0) bits &= (1u << params.num_pages % 32) - 1;
    int rank = exclusive_prefix_sum(__popc(bits), smem.sums, free);
    for (; bits != 0 && rank < needed; ++rank, bits &= bits - 1) {
      params.taken[rank] = 32 * word + __ffs(bits) - 1;
    }
  }
  __syncthreads();  // the pages to take are known

  for (int s = thread; s < params.num_sequences; s += Config::num_threads) {
    const Growth own(params, smem, s);
    const int rank = params.sources[s];
    const int found = max(0, min(free - rank, own.needed));
    int32_t* const row = params.page_table + static_cast<int64_t>(s) * params.num_columns;
    const int32_t* const taken = params.taken + rank;
    const bool replaced = own.replaces && found > 0;
    if (replaced) row[own.start / params.page_size] = taken[0];
    for (int i = replaced; i < found; ++i) row[own.first_column + i - replaced] = taken[i];
    int end = own.end;
    if (found < own.needed) {
      end = own.replaces && !replaced ? own.start
                                      : (own.first_column + found - replaced) * params.page_size;
    }
    params.starts[s] = own.start;
    params.sources[s] = replaced && own.last_page >= 0 ? own.last_page : -1;
    params.lengths[s] = end;
    params.dropped[s] += static_cast<int32_t>(own.wanted - end);
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads)
    cuflash_cache_grow(const __grid_constant__ cuflash::CacheGrowParams params) {
  using namespace cuflash;
  grow_sequences(params, shared_memory<SharedMemory>());
}
