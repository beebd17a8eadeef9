// Philox4x32-7 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): four random
// words from a counter of four words and a key of two.
#pragma once

#include "config.cuh"

namespace cuflash {

struct RandomWords {
  uint32_t word[4];
};

CUFLASH_DEVICE RandomWords philox(uint32_t c0, uint32_t c1, uint64_t high, uint64_t key) {
  constexpr int rounds = 7;
  constexpr uint32_t multiplier0 = 0xD2511F53, multiplier1 = 0xCD9E8D57;
  constexpr uint32_t key_step0 = 0x9E3779B9, key_step1 = 0xBB67AE85;
  uint32_t c2 = static_cast<uint32_t>(high), c3 = static_cast<uint32_t>(high >> 32);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma unroll
  for (int round = 0; round < rounds; ++round) {
    // The two halves of a product are computed separately: the compiler then makes one instruction
    // of both. A 64-bit product would become three. (D5)
    const uint32_t low0 = c0 * multiplier0, high0 = __umulhi(c0, multiplier0);
    const uint32_t low1 = c2 * multiplier1, high1 = __umulhi(c2, multiplier1);
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += key_step0;
    k1 += key_step1;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace cuflash
