// What a lane reads of bias and mask for its pairs of a block: for one row or key at a time, when
// its scores are computed, or for all ahead of the products, which then hide the time of memory and
// do not need their registers yet.
#pragma once

#include "score/score.cuh"

namespace cuflash {

template <int tiles>
using BiasOfPairs = Score::HeldBias<tiles>;  // empty unless the kernel holds a bias

// The bias of rows.
template <int tiles>
struct RowsWhenNeeded {
  const Score& score;
  const int first_row, first_key;  // of the lane

  CUFLASH_DEVICE RowsWhenNeeded(const Score& score, int first_row, int first_key)
      : score(score),
        first_row(first_row + fragment_row(0, 0, ptx::thread_index() % 32)),
        first_key(first_key + fragment_column(0, 0, ptx::thread_index() % 32)) {}

  CUFLASH_DEVICE BiasOfPairs<tiles> bias(int slice, int half) const {
    if constexpr (Config::holds_bias) {
      return score.bias_of_row<tiles>(first_row + 16 * slice + 8 * half, first_key);
    } else {
      return {};
    }
  }
};

template <int slices, int tiles>
struct RowsAhead {
  BiasOfPairs<tiles> held[slices][2];

  CUFLASH_DEVICE RowsAhead(const Score& score, int first_row, int first_key) {
    const RowsWhenNeeded<tiles> rows(score, first_row, first_key);
    unrolled<slices, 2>([&](int s, int half) { held[s][half] = rows.bias(s, half); });
  }
  CUFLASH_DEVICE const BiasOfPairs<tiles>& bias(int s, int half) const { return held[s][half]; }
};

// The bias of keys, and to which queries the mask shows them.
template <int tiles>
struct KeysWhenNeeded {
  const Score& score;
  const int first_row, first_key;  // of the lane

  CUFLASH_DEVICE KeysWhenNeeded(const Score& score, int first_row, int first_key)
      : score(score),
        first_row(first_row + fragment_column(0, 0, ptx::thread_index() % 32)),
        first_key(first_key + fragment_row(0, 0, ptx::thread_index() % 32)) {}

  CUFLASH_DEVICE BiasOfPairs<tiles> bias(int slice, int half) const {
    if constexpr (Config::holds_bias) {
      return score.bias_of_key<tiles>(first_key + 16 * slice + 8 * half, first_row);
    } else {
      return {};
    }
  }
  CUFLASH_DEVICE void unmasked(ColumnBits (&seen)[2], int slice) const {
    score.unmasked_of_keys<tiles>(seen, first_key + 16 * slice, first_row);
  }
};

template <int slices, int tiles>
struct KeysAhead {
  static_assert(tiles <= 8, "16 bits hold the columns of a key");
  BiasOfPairs<tiles> held[slices][2];
  uint32_t seen[slices];  // 16 bits for each half

  CUFLASH_DEVICE KeysAhead(const Score& score, int first_row, int first_key) {
    const KeysWhenNeeded<tiles> keys(score, first_row, first_key);
    unrolled<slices>([&](int s) {
      ColumnBits bits[2];
      keys.unmasked(bits, s);
      seen[s] = (bits[0].bits & 0xffff) | bits[1].bits << 16;
    });
    unrolled<slices, 2>([&](int s, int half) { held[s][half] = keys.bias(s, half); });
  }
  CUFLASH_DEVICE const BiasOfPairs<tiles>& bias(int s, int half) const { return held[s][half]; }
  CUFLASH_DEVICE void unmasked(ColumnBits (&to)[2], int slice) const {
    unrolled<2>([&](int half) { to[half] = {seen[slice] >> 16 * half}; });
  }
};

}  // namespace cuflash
