// Constants known at compile time. `Defaults` lists all fields. The fields of one kernel hide those
// defaults: cuflash/_kernels/config.py writes them in place of config.fields. The file itself has
// no fields, so that a .cu file compiles alone (forward_sm90.cu only with its own num_warps).
#pragma once

// Nearly every device function has these attributes.
#define CUFLASH_DEVICE __device__ __forceinline__

#ifndef CUFLASH_UNDER_RACECHECK
#define CUFLASH_UNDER_RACECHECK false
#endif

namespace cuflash {

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int32_t = int;
using int64_t = long long;

// The type A if the condition holds, else B.
template <bool condition, typename A, typename B>
struct Either {
  using type = A;
};
template <typename A, typename B>
struct Either<false, A, B> {
  using type = B;
};
template <bool condition, typename A, typename B>
using If = typename Either<condition, A, B>::type;

enum class Dtype {
  none,
  float8_e4m3fn,
  float8_e5m2,
  float16,
  bfloat16,
  float32,
  float64,
  int32,
  int64
};

// Precision of float32 products: full float32 (3xTF32 on tensor cores), or one product of TF32.
enum class Precision { ieee, tf32 };

// Source of the causal offset of a batch entry: one value for the launch, the difference of the
// entry's own lengths, or an array of int32 or int64.
enum class Offset { value, lengths, int32, int64 };

// Which features of a row form a rotated pair: none, i and i + half, or 2 i and 2 i + 1.
enum class Rotation { none, halves, neighbours };

// GradOf: the option whose gradient is summed. SumsTo: one element for each pair, a sum over the
// queries of each key, or a sum over the keys of each query.
enum class GradOf { bias, alibi_slopes, scale };
enum class SumsTo { pairs, keys, queries };

struct Defaults {
  static constexpr Dtype dtype = Dtype::bfloat16;  // of q, k, v and of operands of products
  static constexpr Precision precision = Precision::ieee;
  static constexpr bool wide_float64 = false;          // use the float64 mma of sm_90 and later?
  static constexpr bool simt = false;                  // multiply on CUDA cores?
  static constexpr Dtype out_dtype = Dtype::bfloat16;  // dtype of out, or of the gradients
  static constexpr Dtype kv_dtype = Dtype::none;       // of k and v in memory; none: dtype
  // Padded widths of tiles. The true widths are run-time parameters.
  static constexpr int head_dim = 64;
  static constexpr int head_dim_v = 64;
  // The true widths, for kernels that are compiled for them.
  static constexpr int width = 16;
  static constexpr int width_v = 16;
  static constexpr int block_m = 64;
  static constexpr int block_n = 64;
  static constexpr int num_warps = 4;
  static constexpr int rows = 1;           // rows of a thread block that combines parts
  static constexpr int blocks_per_sm = 1;  // thread blocks that the register budget allows
  // Thread blocks that share a tile of rows. Each computes its own columns of the result.
  static constexpr int split_columns = 1;
  // Warps of a thread block that share rows. Each computes its own columns of the result.
  static constexpr int partners = 1;
  static constexpr int smem_bytes = 0;   // 0: compiled without Python, not checked
  static constexpr int copy_bytes = 16;  // widest copy that is legal for all operands

  static constexpr int num_stages = 2;    // buffers of k and of v
  static constexpr int num_q_stages = 2;  // buffers of q
  // Are the keys of a tile split over several thread blocks (split-KV), and combined afterwards?
  static constexpr bool split_keys = false;
  // Do these thread blocks form a cluster, which combines its own results?
  static constexpr bool clusters = false;
  // Does the combining kernel start while this one runs, and wait for its end inside the kernel?
  static constexpr bool overlaps = false;
  // Is the result joined with an earlier one over other keys (so_far and lse)?
  static constexpr bool joins = false;
  // Do keys and values lie in pages that a page table orders?
  static constexpr bool paged = false;
  // Are the queries that see a tile of keys split over several thread blocks, and added up later?
  static constexpr bool split_queries = false;
  static constexpr bool split_rows = false;  // are even the queries of one batch entry split?
  // Quarters of the exponentials computed before the wait for p v of the previous block. 0: none.
  static constexpr int overlap_quarters = 2;
  // Are the scores of the next block multiplied while ds of this block is computed?
  static constexpr bool scores_ahead = false;
  // Are k and v of a tile kept in registers, as operands?
  static constexpr bool keys_in_registers = false;
  // Buffers in shared memory for blocks of a bias or a mask. 0: read from global memory.
  static constexpr int bias_stages = 0;
  static constexpr int mask_stages = 0;
  // Do tiles add to dq one after another, in a fixed order?
  static constexpr bool deterministic = true;

  static constexpr bool window_left = false;  // is the window bounded on this side?
  static constexpr bool window_right = false;
  static constexpr bool heads_in_rows = false;  // is a row one head of one query (PackGQA)?
  static constexpr bool scale_in_exponent = true;
  static constexpr bool softcap = false;
  static constexpr Dtype bias = Dtype::none;
  static constexpr bool key_bias = false;  // one bias for all queries of a key, kept with the key?
  static constexpr Dtype alibi_slopes = Dtype::none;
  static constexpr bool mask = false;
  static constexpr Dtype segment_ids = Dtype::none;
  static constexpr Offset offset = Offset::value;
  static constexpr Dtype q_lengths = Dtype::none;
  static constexpr Dtype kv_lengths = Dtype::none;
  static constexpr Dtype cu_seqlens = Dtype::none;  // none: sequences are not packed
  static constexpr Dtype sink = Dtype::none;
  static constexpr bool score_mod = false;
  static constexpr bool mask_mod = false;
  static constexpr bool dropout = false;
  static constexpr Dtype q_scale = Dtype::none;  // one scale for each batch entry
  static constexpr Dtype k_scale = Dtype::none;
  static constexpr Dtype v_scale = Dtype::none;

  static constexpr bool shared_keys = true;  // do all batch entries of an owner share keys?
  static constexpr bool grad_k = true;
  static constexpr bool grad_v = true;
  static constexpr bool grad_lse = false;
  static constexpr bool grad_bias = false;    // also write dbias, with one element for each pair?
  static constexpr bool finishes_dq = false;  // does the tile that adds last to dq store it?
  static constexpr bool rotates = false;      // is x multiplied by a random rotation?
  static constexpr bool writes = false;       // false: first pass, finds scales. true: quantises
  static constexpr SumsTo sums_to = SumsTo::pairs;
  static constexpr GradOf grad_of = GradOf::bias;
  static constexpr bool holds_bias = false;         // does each lane hold the bias of its pairs?
  static constexpr Dtype sums_dtype = Dtype::none;  // dtype of stored sums; none: dtype of lse

  static constexpr Rotation rotation = Rotation::none;
  static constexpr Dtype pages_dtype = Dtype::none;  // of pages that round; none: dtype
  static constexpr Dtype positions = Dtype::none;
  static constexpr int page_words = 1;  // words of 32 bits, with one bit for each page of a cache

  static constexpr bool under_racecheck = CUFLASH_UNDER_RACECHECK;  // tools/sanitize.py
};

struct Config : Defaults {
#include "config.fields"

  static constexpr int num_threads = 32 * num_warps;

  static_assert(head_dim % 16 == 0 && head_dim_v % 16 == 0, "one mma consumes 16 columns");
  static_assert(block_m % 16 == 0 && block_n % 16 == 0, "one mma produces 16 rows");
  static_assert(!scale_in_exponent ||
                    (!softcap && bias == Dtype::none && alibi_slopes == Dtype::none && !score_mod),
                "a capped or biased score is not a multiple of q.k");
};

// The dynamic shared memory of a thread block, as the struct that its kernel declares.
template <typename SharedMemory>
CUFLASH_DEVICE SharedMemory& shared_memory() {
  static_assert(Config::smem_bytes == 0 || sizeof(SharedMemory) == Config::smem_bytes,
                "smem_bytes of the kernel in cuflash/_kernels counts this struct");
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  return *reinterpret_cast<SharedMemory*>(smem_bytes);
}

}  // namespace cuflash
