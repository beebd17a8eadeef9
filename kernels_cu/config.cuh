// What is known at compile time. `Defaults` lists all fields. A kernel's own fields hide them:
// cuflash/_kernels/config.py writes these in place of config.fields, which has none, so that a .cu
// file compiles by itself (forward_sm90.cu with a num_warps of its own).
#pragma once

// What nearly every function here is.
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

// A or, where the condition does not hold, B.
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

// Of float32 products: that of float32, or that of TF32.
enum class Precision { ieee, tf32 };

// Where the causal offset of a batch entry comes from: one value of the launch, the difference of
// the entry's own lengths, or an array.
enum class Offset { value, lengths, int32, int64 };

// Which features of a row turn together: none, i and i + half, or 2 i and 2 i + 1.
enum class Rotation { none, halves, neighbours };

// Of what a gradient of scores is summed, and over what: nothing, the queries of a key, or the keys
// of a query.
enum class GradOf { bias, alibi_slopes, scale };
enum class SumsTo { pairs, keys, queries };

struct Defaults {
  static constexpr Dtype dtype = Dtype::bfloat16;  // of q, k, v and the products
  static constexpr Precision precision = Precision::ieee;
  static constexpr bool wide_float64 = false;          // products of sm_90 and later?
  static constexpr bool simt = false;                  // do they multiply?
  static constexpr Dtype out_dtype = Dtype::bfloat16;  // of out, or of the gradients
  // Padded tile widths; the true widths are run-time parameters.
  static constexpr int head_dim = 64;
  static constexpr int head_dim_v = 64;
  // The true widths, where a kernel is compiled for them.
  static constexpr int width = 16;
  static constexpr int width_v = 16;
  static constexpr int block_m = 64;
  static constexpr int block_n = 64;
  static constexpr int num_warps = 4;
  static constexpr int blocks_per_sm = 1;  // what the register budget allows
  // Thread blocks that share a tile of rows, each with its own columns of the result.
  static constexpr int split_columns = 1;
  // Warps of a block that share rows, each with its own columns of the result.
  static constexpr int partners = 1;
  static constexpr int smem_bytes = 0;   // 0: compiled without Python
  static constexpr int copy_bytes = 16;  // widest legal copy of every operand

  static constexpr int num_stages = 2;    // buffers of k and of v
  static constexpr int num_q_stages = 2;  // buffers of q
  // Are the keys of a tile dealt out to several thread blocks, to be combined after them?
  static constexpr bool split_keys = false;
  // Are these thread blocks a cluster, which combines their results by itself?
  static constexpr bool clusters = false;
  // Does the kernel that combines start while this one runs, and wait for it by itself?
  static constexpr bool overlaps = false;
  // Are keys and values read about once, so that they may leave the L2 cache first?
  static constexpr bool reads_once = false;
  // Is there a result over other keys, so_far and lse, which this one joins?
  static constexpr bool joins = false;
  // Do keys and values lie in pages, which a table puts in order?
  static constexpr bool paged = false;
  // Are the queries that see a tile of keys dealt out to several thread blocks, to be added up?
  static constexpr bool split_queries = false;
  static constexpr bool split_rows = false;  // even those of one batch entry?
  // Quarters of the exponentials that run before p v of the block before has to be done; 0: none.
  static constexpr int overlap_quarters = 2;
  // Are scores of the next block multiplied while ds of this one is computed?
  static constexpr bool scores_ahead = false;
  // Are k and v of a tile kept as operands in registers?
  static constexpr bool keys_in_registers = false;
  // Blocks of a bias, or of bits of a mask, in shared memory; 0: it is read where it lies.
  static constexpr int bias_stages = 0;
  static constexpr int mask_stages = 0;
  // Do tiles add to dq one after the other, in a fixed order?
  static constexpr bool deterministic = true;

  static constexpr bool window_left = false;  // is that side bounded?
  static constexpr bool window_right = false;
  static constexpr bool heads_in_rows = false;  // does a row stand for a head and a query?
  static constexpr bool scale_in_exponent = true;
  static constexpr bool softcap = false;
  static constexpr Dtype bias = Dtype::none;
  static constexpr bool key_bias = false;  // does a kernel keep a bias with its keys?
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
  static constexpr Dtype q_scale = Dtype::none;  // of an entry
  static constexpr Dtype k_scale = Dtype::none;
  static constexpr Dtype v_scale = Dtype::none;

  static constexpr bool shared_keys = true;  // of all batch entries of an owner?
  static constexpr bool grad_k = true;
  static constexpr bool grad_v = true;
  static constexpr bool grad_lse = false;
  static constexpr bool grad_bias = false;  // is it that of one pair each, written with the others?
  static constexpr bool rotates = false;    // is x multiplied by a random rotation?
  static constexpr bool writes = false;  // does this pass quantise, after the first found scales?
  static constexpr SumsTo sums_to = SumsTo::pairs;
  static constexpr GradOf grad_of = GradOf::bias;
  static constexpr bool holds_bias = false;         // does each lane keep the bias of its pairs?
  static constexpr Dtype sums_dtype = Dtype::none;  // in which they are stored; none: that of lse

  static constexpr Rotation rotation = Rotation::none;
  static constexpr Dtype positions = Dtype::none;
  static constexpr int page_words = 1;  // of 32 bits, one for each page of a cache

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

// The dynamic shared memory of a thread block, as the struct that its kernel makes of it.
template <typename SharedMemory>
CUFLASH_DEVICE SharedMemory& shared_memory() {
  static_assert(Config::smem_bytes == 0 || sizeof(SharedMemory) == Config::smem_bytes,
                "smem_bytes of the kernel in cuflash/_kernels counts this struct");
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  return *reinterpret_cast<SharedMemory*>(smem_bytes);
}

}  // namespace cuflash
