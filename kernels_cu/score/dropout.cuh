// Which weights dropout keeps, by the random bits that cuflash/_problem/philox.py describes (D7).
// One counter decides eight scores, which one lane holds in two neighbouring tiles:
//
//   queries q and q + 8,   keys k, k + 1, k + 8 and k + 9,      q mod 16 < 8, k mod 16 in 0 2 4 6
//
// Weights are dropped after the softmax. Their sums are multiplied by kept_scale at the end.
#pragma once

#include "score/philox.cuh"
#include "score/score.cuh"

namespace cuflash {

// The factor of sums of weights: 1 divided by the share of weights that are kept.
CUFLASH_DEVICE Real kept_scale(const ScoreParams& params) {
  return Config::dropout ? params.kept_scale : 1;
}

// Random words for the 16 queries from 16 * q_block on and the 16 keys from 16 * k_block on. Within
// these they are for queries q_low and q_low + 8 and keys 2 * k_pair, 2 * k_pair + 1 and both plus
// 8. A pair (q, k) of the 16 x 16 has half k % 2 of word 2 * (q >= 8) + (k >= 8).
CUFLASH_DEVICE RandomWords draw_words(const Score& score, int q_block, int q_low, int k_block,
                                      int k_pair) {
  // 16 queries take 8 counters, 16 keys take 4. Parts of a call begin at multiples of 16.
  const uint32_t before_q = static_cast<uint32_t>(score.params.first_query) >> 1;
  const uint32_t before_k = static_cast<uint32_t>(score.params.first_key) >> 2;
  return philox(4 * k_block + k_pair + before_k, 8 * q_block + q_low + before_q, score.entry_number,
                score.params.dropout_seed);
}

CUFLASH_DEVICE bool keeps(const Score& score, uint32_t word, int half) {
  return (word >> (16 * half) & 0xffff) >= score.params.dropout_threshold;
}

// Is one pair kept? For code that computes rows pair by pair.
CUFLASH_DEVICE bool keeps_pair(const Score& score, int q_idx, int kv_idx) {
  if constexpr (!Config::dropout) return true;
  const int k_in_block = kv_idx % 16;
  const RandomWords words =
      draw_words(score, q_idx / 16, q_idx % 8, kv_idx / 16, k_in_block % 8 / 2);
  const uint32_t low = q_idx % 16 < 8 ? words.word[k_in_block / 8] : words.word[2 + k_in_block / 8];
  return keeps(score, low, kv_idx % 2);
}

// Calls step(slice, tile, register, kept) for every register of a warp's accumulator. Its rows are
// queries from `first_row` on, its columns keys from `first_key` on.
template <int slices, int tiles, typename Step>
CUFLASH_DEVICE void for_each_kept(const Score& score, int first_row, int first_key,
                                  const Step& step) {
  const int lane = ptx::thread_index() % 32;
#pragma unroll
  for (int s = 0; s < slices; ++s) {
#pragma unroll
    for (int t = 0; t < tiles; t += 2) {
      const RandomWords words =
          draw_words(score, first_row / 16 + s, lane / 4, first_key / 16 + t / 2, lane % 4);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int q_half = i / 4, k_half = i / 2 % 2, k = i % 2;
        step(s, t + k_half, 2 * q_half + k, keeps(score, words.word[2 * q_half + k_half], k));
      }
    }
  }
}

// The same for an accumulator whose rows are keys and whose columns are queries. Of two keys that
// share a counter a lane holds one, and the lane 4 away holds the other. Both hold the same two
// neighbouring queries, which take two counters: each lane draws one, and they exchange halves.
template <int slices, int tiles, typename Step>
CUFLASH_DEVICE void for_each_kept_transposed(const Score& score, int first_row, int first_key,
                                             const Step& step) {
  const int lane = ptx::thread_index() % 32;
  const int odd = lane / 4 % 2;
#pragma unroll
  for (int s = 0; s < slices; ++s) {
#pragma unroll 2
    for (int t = 0; t < tiles; t += 2) {
      const RandomWords words = draw_words(score, first_row / 16 + t / 2, 2 * (lane % 4) + odd,
                                           first_key / 16 + s, lane / 8);
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

// Drops weights before they are multiplied by v.
template <int slices, int tiles>
CUFLASH_DEVICE void drop_weights(Real (&p_acc)[slices][tiles][4], const Score& score, int first_row,
                                 int first_key) {
  if constexpr (Config::dropout) {
    for_each_kept<slices, tiles>(score, first_row, first_key, [&](int s, int t, int i, bool kept) {
      if (!kept) p_acc[s][t][i] = 0;
    });
  }
}

// Which weights of an accumulator are dropped, as masks for the registers of its 16-bit operand.
// All bits in a half of a mask are the same, and stand for one of two neighbouring columns of a
// row. Masks do not depend on scores and are drawn before scores are ready.
//
// Both halves u of a random word are compared with the threshold t at once. r = min(u, t) is t
// where u is kept, and max(r - t, -1) is 0 there and -1 elsewhere. This holds while r - t fits into
// 16 bits, for t up to 2^15. For a larger t, r = min((u - t) mod 2^16, 2^16 - t) is 2^16 - t where
// u is dropped, so that the mask is inverted. (D4)
template <int slices, int tiles>
struct DroppedPairs {
  // Pairs of a slice in the order of its operand's registers. Where other options need registers, a
  // word holds 16 pairs: pair j in bits j and 16 + j.
  static constexpr int pairs = 2 * tiles;
  static constexpr int pairs_to_word = Score::leaves_registers_for_dropout ? 1 : 16;

  uint32_t masks[slices][(pairs + pairs_to_word - 1) / pairs_to_word] = {};
  uint32_t inverted;       // all bits if `masks` marks kept weights
  uint32_t any_draws = 0;  // combines some of the masks by or: depends on draws (D3)

  CUFLASH_DEVICE DroppedPairs(const Score& score, int first_row, int first_key) {
    if constexpr (Config::dropout) {
      const uint32_t threshold = score.params.dropout_threshold;
      const uint32_t own = __byte_perm(threshold, 0, 0x1010);
      const uint32_t rest = __byte_perm(0x10000 - threshold, 0, 0x1010);
      inverted = threshold > 0x8000 ? 0xffffffff : 0;
      const uint32_t added = inverted & rest;
      const uint32_t limit = inverted ? rest : own;
      const uint32_t minus_limit = inverted ? own : rest;
      const int lane = ptx::thread_index() % 32;
#pragma unroll
      for (int s = 0; s < slices; ++s) {
#pragma unroll
        for (int pair = 0; pair < pairs; pair += 4) {
          const RandomWords words =
              draw_words(score, first_row / 16 + s, lane / 4, first_key / 16 + pair / 4, lane % 4);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int k_half = i / 2, q_half = i % 2;
            const uint32_t word = words.word[2 * q_half + k_half];
            const uint32_t r = ptx::min_of_halves(ptx::sum_of_halves(word, added), limit);
            const uint32_t mask =
                ptx::signed_max_of_halves(ptx::sum_of_halves(r, minus_limit), 0xffffffff);
            if (i < 2) any_draws |= mask;
            const int j = (pair + i) % pairs_to_word;
            masks[s][(pair + i) / pairs_to_word] |=
                pairs_to_word == 1 ? mask : mask & 0x00010001u << j;
          }
        }
      }
    }
  }

  // Two neighbouring weights of a row, with 0 for dropped ones.
  CUFLASH_DEVICE uint32_t apply_to(uint32_t weights, int s, int t, int half) const {
    if constexpr (!Config::dropout) return weights;
    const int pair = t / 2 * 4 + t % 2 * 2 + half;
    uint32_t mask = masks[s][pair / pairs_to_word];
    if constexpr (pairs_to_word > 1) {
      mask = ptx::spread_high_bits(mask << (15 - pair % pairs_to_word));
    }
    return ptx::and_not_xor(weights, mask, inverted);
  }
};

// Drops gradients of weights, and scales those that are kept.
template <int slices, int tiles>
CUFLASH_DEVICE void drop_gradients(Real (&dp_acc)[slices][tiles][4], const Score& score,
                                   int first_row, int first_key) {
  if constexpr (Config::dropout) {
    for_each_kept<slices, tiles>(score, first_row, first_key, [&](int s, int t, int i, bool kept) {
      dp_acc[s][t][i] = kept ? dp_acc[s][t][i] * score.params.kept_scale : 0;
    });
  }
}

// Which weights of a transposed accumulator are kept: bits j and 16 + j stand for the pair in
// register j of its operand.
template <int slices, int tiles>
struct KeptBits {
  static_assert(!Config::dropout || tiles <= 8, "32 bits hold the pairs of a slice");
  uint32_t bits[slices];

  CUFLASH_DEVICE KeptBits(const Score& score, int first_row, int first_key) {
    if constexpr (Config::dropout) {
#pragma unroll
      for (int s = 0; s < slices; ++s) bits[s] = 0;
      for_each_kept_transposed<slices, tiles>(score, first_row, first_key,
                                              [&](int s, int t, int i, bool kept) {
                                                if (kept) bits[s] |= 1u << place(t, i);
                                              });
    }
  }

  CUFLASH_DEVICE static constexpr int place(int t, int i) { return 2 * t + i / 2 + i % 2 * 16; }

  CUFLASH_DEVICE bool contains(int s, int t, int i) const {
    return !Config::dropout || (bits[s] >> place(t, i) & 1);
  }

  // An operand register of two neighbouring weights, with 0 for dropped ones.
  CUFLASH_DEVICE uint32_t apply_to(uint32_t weights, int s, int t, int half) const {
    if constexpr (!Config::dropout) return weights;
    return weights & ptx::spread_high_bits(bits[s] << (15 - place(t, 2 * half)));
  }

  // Drops gradients of weights, and scales those that are kept.
  CUFLASH_DEVICE void drop_gradients(Real (&dp_acc)[slices][tiles][4],
                                     const ScoreParams& params) const {
    if constexpr (Config::dropout) {
      unrolled<slices, tiles>([&](int s, int t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          dp_acc[s][t][i] = contains(s, t, i) ? dp_acc[s][t][i] * params.kept_scale : 0;
        }
      });
    }
  }
};

}  // namespace cuflash
