// Which weights dropout keeps: the bits that cuflash/_philox.py describes, one counter for eight
// scores that one lane holds of two neighbouring tiles of an accumulator.
//
//   queries q and q + 8,   keys k, k + 1, k + 8 and k + 9,      q mod 16 < 8, k mod 16 in 0 2 4 6
//
// Weights are dropped after the softmax and multiplied by kept_scale at the end of their sums.
#pragma once

#include "philox.cuh"
#include "ptx/special.cuh"
#include "score.cuh"
#include "tile/fragment.cuh"

namespace cuflash {

// What a sum of weights is multiplied by: 1, divided by the share of weights that are kept.
__device__ __forceinline__ Real kept_scale(const ScoreParams& params) {
  return Config::dropout ? params.kept_scale : 1;
}

// The bits of 16 queries from 16 * q_block on and of 16 keys from 16 * k_block on, for the query
// q_low in 0..7 and the keys 2 * k_pair and 2 * k_pair + 1: half `k` of word 2 * (q >= 8) + (k >=
// 8).
__device__ __forceinline__ RandomWords drawn(const Score& score, int q_block, int q_low,
                                             int k_block, int k_pair) {
  return philox(4 * k_block + k_pair, 8 * q_block + q_low, score.entry_number,
                score.params.dropout_seed);
}

__device__ __forceinline__ bool keeps(const Score& score, uint32_t word, int half) {
  return (word >> (16 * half) & 0xffff) >= score.params.dropout_threshold;
}

// Whether one pair is kept, for the exact paths.
__device__ __forceinline__ bool keeps_pair(const Score& score, int q_idx, int kv_idx) {
  if constexpr (!Config::dropout) return true;
  const int k_in_block = kv_idx % 16;
  const RandomWords words = drawn(score, q_idx / 16, q_idx % 8, kv_idx / 16, k_in_block % 8 / 2);
  const uint32_t low = q_idx % 16 < 8 ? words.word[k_in_block / 8] : words.word[2 + k_in_block / 8];
  return keeps(score, low, kv_idx % 2);
}

// Calls step(slice, tile, register, kept) for every register of a warp's accumulator whose rows are
// queries from `first_row` on, and columns keys from `first_key` on.
template <int slices, int tiles, typename Step>
__device__ __forceinline__ void for_each_kept(const Score& score, int first_row, int first_key,
                                              const Step& step) {
  const int lane = ptx::thread_index() % 32;
#pragma unroll
  for (int s = 0; s < slices; ++s) {
#pragma unroll
    for (int t = 0; t < tiles; t += 2) {
      const RandomWords words =
          drawn(score, first_row / 16 + s, lane / 4, first_key / 16 + t / 2, lane % 4);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int q_half = i / 4, k_half = i / 2 % 2, k = i % 2;
        step(s, t + k_half, 2 * q_half + k, keeps(score, words.word[2 * q_half + k_half], k));
      }
    }
  }
}

// The same for an accumulator whose rows are keys and columns queries. A lane holds one key and two
// queries of what a counter is for, its neighbour by four lanes the other key: each draws for one
// of the queries, and they exchange halves.
template <int slices, int tiles, typename Step>
__device__ __forceinline__ void for_each_kept_transposed(const Score& score, int first_row,
                                                         int first_key, const Step& step) {
  const int lane = ptx::thread_index() % 32;
  const int odd = lane / 4 % 2;
#pragma unroll
  for (int s = 0; s < slices; ++s) {
#pragma unroll
    for (int t = 0; t < tiles; t += 2) {
      const RandomWords words =
          drawn(score, first_row / 16 + t / 2, 2 * (lane % 4) + odd, first_key / 16 + s, lane / 8);
#pragma unroll
      for (int q_half = 0; q_half < 2; ++q_half) {
        const uint32_t low = words.word[2 * q_half], high = words.word[2 * q_half + 1];
        const uint32_t even_keys = __byte_perm(low, high, 0x5410);
        const uint32_t odd_keys = __byte_perm(low, high, 0x7632);
        const uint32_t own = odd ? odd_keys : even_keys;
        const uint32_t received = __shfl_xor_sync(0xffffffff, odd ? even_keys : odd_keys, 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int k_half = i / 2, q = i % 2;
          step(s, t + q_half, 2 * k_half + q, keeps(score, q == odd ? own : received, k_half));
        }
      }
    }
  }
}

// Drops weights before they are multiplied with values.
template <int slices, int tiles>
__device__ __forceinline__ void drop_weights(Real (&p_acc)[slices][tiles][4], const Score& score,
                                             int first_row, int first_key) {
  if constexpr (Config::dropout) {
    for_each_kept<slices, tiles>(score, first_row, first_key, [&](int s, int t, int i, bool kept) {
      if (!kept) p_acc[s][t][i] = 0;
    });
  }
}

// Which weights of an accumulator are kept, as its operand of 16 bits asks for them: bits j and
// 16 + j say it of two neighbouring columns of a row. They do not depend on scores, and are there
// before these are.
template <int slices, int tiles>
struct KeptPairs {
  static constexpr int pairs = 2 * tiles;  // of a slice, in the order of its operand's registers
  static constexpr int words = (pairs + 15) / 16;

  uint32_t bits[slices][words];

  __device__ __forceinline__ KeptPairs(const Score& score, int first_row, int first_key) {
    if constexpr (Config::dropout) {
      const uint32_t threshold = score.params.dropout_threshold;
      const int lane = ptx::thread_index() % 32;
#pragma unroll
      for (int s = 0; s < slices; ++s) {
#pragma unroll
        for (int w = 0; w < words; ++w) bits[s][w] = 0;
#pragma unroll
        for (int pair = 0; pair < pairs; pair += 4) {
          const RandomWords drawn_words =
              drawn(score, first_row / 16 + s, lane / 4, first_key / 16 + pair / 4, lane % 4);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int j = (pair + i) % 16, k_half = i / 2, q_half = i % 2;
            const uint32_t kept = reach(drawn_words.word[2 * q_half + k_half], threshold);
            bits[s][pair / 16] |= kept >> (15 - j) & 0x00010001u << j;
          }
        }
#pragma unroll
        for (int w = 0; w < words; ++w) bits[s][w] = threshold > 0xffff ? 0 : bits[s][w];
      }
    }
  }

  // All bits of the 16-bit weights that are kept, of both columns that a lane holds of a tile.
  __device__ __forceinline__ uint32_t mask(int s, int t, int half) const {
    if constexpr (!Config::dropout) return 0xffffffff;
    const int pair = t / 2 * 4 + t % 2 * 2 + half;
    return ptx::spread_high_bits(bits[s][pair / 16] << (15 - pair % 16));
  }

 private:
  // In the high bit of each half: is this half of `word` at least `threshold`, below 2^16?
  __device__ __forceinline__ static uint32_t reach(uint32_t word, uint32_t threshold) {
    constexpr uint32_t high_bits = 0x80008000u;
    const uint32_t rest = (word | high_bits) - (threshold & 0x7fff) * 0x00010001u;
    const uint32_t high = threshold & 0x8000 ? 0xffffffffu : 0;
    return (word & rest) | (~high & (word | rest));
  }
};

// Drops gradients of weights.
template <int slices, int tiles>
__device__ __forceinline__ void drop_gradients(Real (&dp_acc)[slices][tiles][4], const Score& score,
                                               int first_row, int first_key) {
  if constexpr (Config::dropout) {
    for_each_kept<slices, tiles>(score, first_row, first_key, [&](int s, int t, int i, bool kept) {
      dp_acc[s][t][i] = kept ? dp_acc[s][t][i] * score.params.kept_scale : 0;
    });
  }
}

// Which weights of a transposed accumulator are kept, a bit for each register.
template <int slices, int tiles>
struct KeptBits {
  static_assert(tiles <= 8, "32 registers to a slice");
  uint32_t bits[slices];

  __device__ __forceinline__ KeptBits(const Score& score, int first_row, int first_key) {
    if constexpr (Config::dropout) {
#pragma unroll
      for (int s = 0; s < slices; ++s) bits[s] = 0;
      for_each_kept_transposed<slices, tiles>(score, first_row, first_key,
                                              [&](int s, int t, int i, bool kept) {
                                                if (kept) bits[s] |= 1u << (4 * t + i);
                                              });
    }
  }

  __device__ __forceinline__ bool contains(int s, int t, int i) const {
    return !Config::dropout || (bits[s] >> (4 * t + i) & 1);
  }
};

}  // namespace cuflash
