// The compile-time configuration: the only reader of CUFLASH_* macros. cuflash/_kernels/config.py
// defines one macro per field; the defaults here let a .cu file compile by itself (forward_sm90.cu
// with a NUM_WARPS of its own).
#pragma once

#ifndef CUFLASH_DTYPE
#define CUFLASH_DTYPE bfloat16
#endif
#ifndef CUFLASH_PRECISION
#define CUFLASH_PRECISION ieee
#endif
#ifndef CUFLASH_WIDE_FLOAT64
#define CUFLASH_WIDE_FLOAT64 false
#endif
#ifndef CUFLASH_CUDA_CORES
#define CUFLASH_CUDA_CORES false
#endif
#ifndef CUFLASH_OUT_DTYPE
#define CUFLASH_OUT_DTYPE bfloat16
#endif
#ifndef CUFLASH_HEAD_DIM
#define CUFLASH_HEAD_DIM 64
#endif
#ifndef CUFLASH_HEAD_DIM_V
#define CUFLASH_HEAD_DIM_V 64
#endif
#ifndef CUFLASH_WIDTH
#define CUFLASH_WIDTH 16
#endif
#ifndef CUFLASH_WIDTH_V
#define CUFLASH_WIDTH_V 16
#endif
#ifndef CUFLASH_BLOCK_M
#define CUFLASH_BLOCK_M 64
#endif
#ifndef CUFLASH_BLOCK_N
#define CUFLASH_BLOCK_N 64
#endif
#ifndef CUFLASH_NUM_WARPS
#define CUFLASH_NUM_WARPS 4
#endif
#ifndef CUFLASH_BLOCKS_PER_SM
#define CUFLASH_BLOCKS_PER_SM 1
#endif
#ifndef CUFLASH_COLUMN_PARTS
#define CUFLASH_COLUMN_PARTS 1
#endif
#ifndef CUFLASH_PARTNERS
#define CUFLASH_PARTNERS 1
#endif
#ifndef CUFLASH_SMEM_BYTES
#define CUFLASH_SMEM_BYTES 0
#endif
#ifndef CUFLASH_COPY_BYTES
#define CUFLASH_COPY_BYTES 16
#endif
#ifndef CUFLASH_NUM_STAGES
#define CUFLASH_NUM_STAGES 2
#endif
#ifndef CUFLASH_NUM_Q_STAGES
#define CUFLASH_NUM_Q_STAGES 2
#endif
#ifndef CUFLASH_SPLIT_KEYS
#define CUFLASH_SPLIT_KEYS false
#endif
#ifndef CUFLASH_OVERLAP_QUARTERS
#define CUFLASH_OVERLAP_QUARTERS 2
#endif
#ifndef CUFLASH_SCORES_AHEAD
#define CUFLASH_SCORES_AHEAD false
#endif
#ifndef CUFLASH_KEYS_IN_REGISTERS
#define CUFLASH_KEYS_IN_REGISTERS false
#endif
#ifndef CUFLASH_ORDERED
#define CUFLASH_ORDERED true
#endif
#ifndef CUFLASH_WINDOW_LEFT
#define CUFLASH_WINDOW_LEFT false
#endif
#ifndef CUFLASH_WINDOW_RIGHT
#define CUFLASH_WINDOW_RIGHT false
#endif
#ifndef CUFLASH_SCALE_IN_EXPONENT
#define CUFLASH_SCALE_IN_EXPONENT true
#endif
#ifndef CUFLASH_SOFTCAP
#define CUFLASH_SOFTCAP false
#endif
#ifndef CUFLASH_BIAS
#define CUFLASH_BIAS none
#endif
#ifndef CUFLASH_KEY_BIAS
#define CUFLASH_KEY_BIAS false
#endif
#ifndef CUFLASH_ALIBI_SLOPES
#define CUFLASH_ALIBI_SLOPES none
#endif
#ifndef CUFLASH_MASK
#define CUFLASH_MASK false
#endif
#ifndef CUFLASH_SEGMENT_IDS
#define CUFLASH_SEGMENT_IDS none
#endif
#ifndef CUFLASH_OFFSET
#define CUFLASH_OFFSET value
#endif
#ifndef CUFLASH_Q_LENGTHS
#define CUFLASH_Q_LENGTHS none
#endif
#ifndef CUFLASH_KV_LENGTHS
#define CUFLASH_KV_LENGTHS none
#endif
#ifndef CUFLASH_CU_SEQLENS
#define CUFLASH_CU_SEQLENS none
#endif
#ifndef CUFLASH_SINK
#define CUFLASH_SINK none
#endif
#ifndef CUFLASH_SCORE_MOD
#define CUFLASH_SCORE_MOD false
#endif
#ifndef CUFLASH_MASK_MOD
#define CUFLASH_MASK_MOD false
#endif
#ifndef CUFLASH_DROPOUT
#define CUFLASH_DROPOUT false
#endif
#ifndef CUFLASH_SHARED_KEYS
#define CUFLASH_SHARED_KEYS true
#endif
#ifndef CUFLASH_GRAD_K
#define CUFLASH_GRAD_K true
#endif
#ifndef CUFLASH_GRAD_V
#define CUFLASH_GRAD_V true
#endif
#ifndef CUFLASH_GRAD_LSE
#define CUFLASH_GRAD_LSE false
#endif
#ifndef CUFLASH_SUMS_TO
#define CUFLASH_SUMS_TO pairs
#endif
#ifndef CUFLASH_UNDER_RACECHECK
#define CUFLASH_UNDER_RACECHECK false
#endif
#ifndef CUFLASH_GRAD_OF
#define CUFLASH_GRAD_OF bias
#endif

// PTX's name of the 16-bit dtype, for texts of instructions in ptx/.
#define CUFLASH_PTX_DTYPE_float16 "f16"
#define CUFLASH_PTX_DTYPE_bfloat16 "bf16"
#define CUFLASH_PTX_DTYPE_NAMED(dtype) CUFLASH_PTX_DTYPE_##dtype
#define CUFLASH_PTX_DTYPE_OF(dtype) CUFLASH_PTX_DTYPE_NAMED(dtype)
#define CUFLASH_PTX_DTYPE CUFLASH_PTX_DTYPE_OF(CUFLASH_DTYPE)

// What nearly every function here is.
#define CUFLASH_DEVICE __device__ __forceinline__

namespace cuflash {

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int32_t = int;
using int64_t = long long;

enum class Dtype { none, float16, bfloat16, float32, float64, int32, int64 };

// Of float32 products: that of float32, or that of TF32.
enum class Precision { ieee, tf32 };

// Where the causal offset of a batch entry comes from: one value of the launch, the difference of
// the entry's own lengths, or an array.
enum class Offset { value, lengths, int32, int64 };

// Of what a gradient of scores is summed, and over what: nothing, the queries of a key, or the keys
// of a query.
enum class GradOf { bias, alibi_slopes, scale };
enum class SumsTo { pairs, keys, queries };

struct Config {
  static constexpr Dtype dtype = Dtype::CUFLASH_DTYPE;  // of q, k, v and the products
  static constexpr Precision precision = Precision::CUFLASH_PRECISION;
  static constexpr bool wide_float64 = CUFLASH_WIDE_FLOAT64;    // products of sm_90 and later?
  static constexpr bool cuda_cores = CUFLASH_CUDA_CORES;        // do they multiply?
  static constexpr Dtype out_dtype = Dtype::CUFLASH_OUT_DTYPE;  // of out, or of the gradients
  static constexpr int head_dim = CUFLASH_HEAD_DIM;             // padded tile widths; the true
  static constexpr int head_dim_v = CUFLASH_HEAD_DIM_V;         // widths are run-time parameters
  static constexpr int width = CUFLASH_WIDTH;                   // these, where a kernel is
  static constexpr int width_v = CUFLASH_WIDTH_V;               // compiled for them
  static constexpr int block_m = CUFLASH_BLOCK_M;
  static constexpr int block_n = CUFLASH_BLOCK_N;
  static constexpr int num_warps = CUFLASH_NUM_WARPS;
  static constexpr int num_threads = 32 * num_warps;
  static constexpr int blocks_per_sm = CUFLASH_BLOCKS_PER_SM;  // what the register budget allows
  // Thread blocks that share a tile of rows, each with its own columns of the result.
  static constexpr int column_parts = CUFLASH_COLUMN_PARTS;
  // Warps of a block that share rows, each with its own columns of the result.
  static constexpr int partners = CUFLASH_PARTNERS;
  static constexpr int smem_bytes = CUFLASH_SMEM_BYTES;  // 0: compiled without Python
  static constexpr int copy_bytes = CUFLASH_COPY_BYTES;  // widest legal copy of every operand

  static constexpr int num_stages = CUFLASH_NUM_STAGES;      // buffers of k and of v
  static constexpr int num_q_stages = CUFLASH_NUM_Q_STAGES;  // buffers of q
  // Are the keys of a tile dealt out to several thread blocks, to be combined after them?
  static constexpr bool split_keys = CUFLASH_SPLIT_KEYS;
  // Quarters of the exponentials that run before p v of the block before has to be done; 0: none.
  static constexpr int overlap_quarters = CUFLASH_OVERLAP_QUARTERS;
  // Are scores of the next block multiplied while ds of this one is computed?
  static constexpr bool scores_ahead = CUFLASH_SCORES_AHEAD;
  // Are k and v of a tile kept as operands in registers?
  static constexpr bool keys_in_registers = CUFLASH_KEYS_IN_REGISTERS;
  // Do tiles add to dq one after the other, in a fixed order?
  static constexpr bool ordered = CUFLASH_ORDERED;

  static constexpr bool window_left = CUFLASH_WINDOW_LEFT;  // is that side bounded?
  static constexpr bool window_right = CUFLASH_WINDOW_RIGHT;
  static constexpr bool scale_in_exponent = CUFLASH_SCALE_IN_EXPONENT;
  static constexpr bool softcap = CUFLASH_SOFTCAP;
  static constexpr Dtype bias = Dtype::CUFLASH_BIAS;
  static constexpr bool key_bias = CUFLASH_KEY_BIAS;  // does a kernel keep a bias with its keys?
  static constexpr Dtype alibi_slopes = Dtype::CUFLASH_ALIBI_SLOPES;
  static constexpr bool mask = CUFLASH_MASK;
  static constexpr Dtype segment_ids = Dtype::CUFLASH_SEGMENT_IDS;
  static constexpr Offset offset = Offset::CUFLASH_OFFSET;
  static constexpr Dtype q_lengths = Dtype::CUFLASH_Q_LENGTHS;
  static constexpr Dtype kv_lengths = Dtype::CUFLASH_KV_LENGTHS;
  static constexpr Dtype cu_seqlens = Dtype::CUFLASH_CU_SEQLENS;  // none: sequences are not packed
  static constexpr Dtype sink = Dtype::CUFLASH_SINK;
  static constexpr bool score_mod = CUFLASH_SCORE_MOD;
  static constexpr bool mask_mod = CUFLASH_MASK_MOD;
  static constexpr bool dropout = CUFLASH_DROPOUT;

  static constexpr bool shared_keys = CUFLASH_SHARED_KEYS;  // of all batch entries of an owner?
  static constexpr bool grad_k = CUFLASH_GRAD_K;
  static constexpr bool grad_v = CUFLASH_GRAD_V;
  static constexpr bool grad_lse = CUFLASH_GRAD_LSE;
  static constexpr SumsTo sums_to = SumsTo::CUFLASH_SUMS_TO;
  static constexpr GradOf grad_of = GradOf::CUFLASH_GRAD_OF;

  static constexpr bool under_racecheck = CUFLASH_UNDER_RACECHECK;  // tools/sanitize.py

  static_assert(head_dim % 16 == 0 && head_dim_v % 16 == 0, "one mma consumes 16 columns");
  static_assert(block_m % 16 == 0 && block_n % 16 == 0, "one mma produces 16 rows");
  static_assert(!scale_in_exponent ||
                    (!softcap && bias == Dtype::none && alibi_slopes == Dtype::none && !score_mod),
                "a capped or biased score is not a multiple of q.k");
};

}  // namespace cuflash
