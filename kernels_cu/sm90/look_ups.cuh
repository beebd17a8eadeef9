// Mask or bias values of 64 rows and a block of keys, through shared memory. Warp 2 of
// forward_sm90.cu copies them for the first consumer, warp 3 for the second
// (sm90/look_up_loader.cuh).
//
//   barrier      arrivals a phase   what the end of a phase means
//   full         32 (lanes)         copies of a block have arrived
//   empty        4 (warps)          every warp of the consumer has read the block: copy the next
#pragma once

#include "schedule/pipeline.cuh"
#include "sm90/barrier.cuh"
#include "sm90/look_up_tile.cuh"

namespace cuflash {

constexpr int look_up_stages = loads_mask   ? Config::mask_stages
                               : loads_bias ? Config::bias_stages
                                            : 1;
static_assert(!looks_up || Config::block_m == 128, "two consumers, each with one copying warp");
using RowLookUpTile = LookUpTile<64>;

template <bool enabled>
struct LookUps {
  RowLookUpTile block[2][look_up_stages];  // buffers of each consumer
  uint64_t full[2][look_up_stages], empty[2][look_up_stages];

  CUFLASH_DEVICE void init_barriers() {
    for (int w = 0; w < 2; ++w) {
      for (int i = 0; i < look_up_stages; ++i) {
        init(full[w][i], 32);
        init(empty[w][i], 4 * reader_arrivals);
      }
    }
  }
};
template <>
struct LookUps<false> {
  CUFLASH_DEVICE void init_barriers() {}
};

// Sets a lane's raw products to -inf for pairs that a mask hides.
template <int tiles>
CUFLASH_DEVICE void hide(float (&s_acc)[1][tiles][4], const RowLookUpTile& mask) {
  const int thread = ptx::thread_index(), lane = thread % 32;
  const int row = 16 * (thread / 32 % 4) + lane / 4;
  const uint32_t at =
      ptx::shared_address(mask.rows) + RowLookUpTile::chunk_offset(row, 0) + lane % 4 * 2;
  unrolled<tiles, 2>([&](int t, int half) {
    const uint32_t from = (at ^ (t / 2 % 8 << 4)) + t / 16 * 128 + t % 2 * 8;
    const uint32_t pair = ptx::load_shared_16(from + half * 8 * RowLookUpTile::row_bytes);
    float (&s)[4] = s_acc[0][t];
    s[2 * half] = pair & 0xff ? s[2 * half] : -infinity();
    s[2 * half + 1] = pair & 0xff00 ? s[2 * half + 1] : -infinity();
  });
}

// Turns a lane's raw products into logits with a bias.
template <int tiles>
CUFLASH_DEVICE void add_bias(float (&s_acc)[1][tiles][4], const RowLookUpTile& bias,
                             const Score& score) {
  constexpr bool halves = sizeof(RowLookUpTile::Value) == 2;
  const int thread = ptx::thread_index(), lane = thread % 32;
  const int slice = 16 * (thread / 32 % 4);
  const uint32_t first = ptx::shared_address(bias.rows);
  const auto join = [&](float& product, float value) { product = score.with_bias(product, value); };
  if constexpr (halves) {  // four 8x8 matrices are two tiles of an accumulator
    const uint32_t at = first + RowLookUpTile::chunk_offset(slice + lane % 16, lane / 16);
    unrolled<tiles / 2>([&](int j) {
      uint32_t pairs[4];
      ptx::ldmatrix_x4(pairs, (at ^ (2 * j % 8 << 4)) + 2 * j / 8 * 128);
      unrolled<4>([&](int m) {
        float (&s)[4] = s_acc[0][2 * j + m / 2];
        join(s[m % 2 * 2], Score::real_bias(static_cast<uint16_t>(pairs[m])));
        join(s[m % 2 * 2 + 1], Score::real_bias(static_cast<uint16_t>(pairs[m] >> 16)));
      });
    });
  } else {
    const int row = slice + lane / 4;
    const uint32_t at = first + RowLookUpTile::chunk_offset(row, lane % 4 / 2) + lane % 2 * 8;
    unrolled<tiles, 2>([&](int t, int half) {
      const uint32_t from = (at ^ (2 * t % 8 << 4)) + 2 * t / 8 * 128;
      const float2 pair = ptx::load_shared_pair(from + half * 8 * RowLookUpTile::row_bytes);
      join(s_acc[0][t][2 * half], pair.x);
      join(s_acc[0][t][2 * half + 1], pair.y);
    });
  }
}

// Applies the values of a consumer's next block: a mask hides products, a bias makes them logits.
template <typename Memory, int tiles>
CUFLASH_DEVICE void apply_look_up(float (&s_acc)[1][tiles][4], Memory& memory, int warpgroup,
                                  Ring<look_up_stages>& ring, const Score& score) {
  const int stage = ring.stage();
  wait(memory.full[warpgroup][stage], ring.full_parity());
  if constexpr (loads_mask) {
    hide(s_acc, memory.block[warpgroup][stage]);
  } else {
    add_bias(s_acc, memory.block[warpgroup][stage], score);
  }
  arrive_as_readers(memory.empty[warpgroup][stage], true);
  ring.advance();
}

}  // namespace cuflash
