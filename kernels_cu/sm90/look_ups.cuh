// What a mask or a bias holds for 64 rows and a block of keys, on its way through shared memory:
// warp 2 of forward_sm90.cu brings it for the first warpgroup that computes, warp 3 for the second
// (sm90/look_up_loader.cuh). Of a mask they bring a bit for each pair, in the order in which lanes
// hold scores; of a bias its values.
//
//   barrier      arrivals a phase   what the end of a phase says
//   full         1 or 32 (lanes)    bits of a block, or values, are there
//   empty        4 (warps)          every warp of the warpgroup has read them: bring the next
#pragma once

#include "schedule/pipeline.cuh"
#include "score/score.cuh"
#include "sm90/barrier.cuh"

namespace cuflash {

constexpr bool loads_mask = Config::mask_stages > 0, loads_bias = Config::bias_stages > 0;
constexpr bool looks_up = loads_mask || loads_bias;
constexpr int look_up_stages = loads_mask   ? Config::mask_stages
                               : loads_bias ? Config::bias_stages
                                            : 1;
static_assert(!looks_up || Config::block_m == 128, "a warp for each of two warpgroups");
static_assert(!(loads_mask && loads_bias), "one of the two");

// Bytes of a mask as copies bring them, 16 rows at a time.
struct MaskBytes {
  static constexpr int rows = 16, parts = 64 / rows, ahead = parts - 1;
  static constexpr int row_chunks = Config::block_n / 16;

  uint4 of_part[parts][rows][row_chunks];
};

struct NoMaskBytes {};

struct MaskBits {
  uint32_t of_lane[64][4];  // of a row, for each lane of the quad that holds it
};

// Chunks of 16 bytes are turned within 128 bytes, so that those which the lanes of a warp read at
// once lie in different banks: of 16 bits one chunk of eight rows, of float32 two of four rows.
struct BiasValues {
  using Value = Score::BiasValue;
  static constexpr int per_chunk = 16 / sizeof(Value);
  static constexpr int row_bytes = Config::block_n * sizeof(Value);
  static_assert(!loads_bias || (row_bytes % 128 == 0 && sizeof(Value) <= 4), "whole 128 bytes");

  alignas(128) unsigned char rows[64][row_bytes];

  CUFLASH_DEVICE static int turn(int row) { return sizeof(Value) == 2 ? row % 8 : row % 4 * 2; }
  CUFLASH_DEVICE static int place(int row, int chunk) {
    return row * row_bytes + ((chunk ^ turn(row)) << 4);
  }
};

template <bool are_there>
struct LookUps {
  using Block = If<loads_mask, MaskBits, BiasValues>;

  Block block[2][look_up_stages];  // of each warpgroup
  uint64_t full[2][look_up_stages], empty[2][look_up_stages];

  CUFLASH_DEVICE void init_barriers() {
    for (int w = 0; w < 2; ++w) {
      for (int i = 0; i < look_up_stages; ++i) {
        init(full[w][i], loads_mask ? 1 : 32);
        init(empty[w][i], 4 * reader_arrivals);
      }
    }
  }
};
template <>
struct LookUps<false> {
  CUFLASH_DEVICE void init_barriers() {}
};

// Which pairs of a lane a mask shows.
CUFLASH_DEVICE void read_bits(ColumnBits (&shown)[2], const MaskBits& bits) {
  const int lane = ptx::thread_index() % 32;
  const int row = 16 * (ptx::thread_index() / 32 % 4) + lane / 4;
  shown[0].bits = bits.of_lane[row][lane % 4];
  shown[1].bits = bits.of_lane[row + 8][lane % 4];
}

// Raw products of a lane become logits with a bias.
template <int tiles>
CUFLASH_DEVICE void add_bias(float (&s_acc)[1][tiles][4], const BiasValues& bias,
                             const Score& score) {
  constexpr bool halves = sizeof(BiasValues::Value) == 2;
  const int thread = ptx::thread_index(), lane = thread % 32;
  const int slice = 16 * (thread / 32 % 4);
  const uint32_t first = ptx::shared_address(bias.rows);
  const auto join = [&](float& product, float value) { product = score.with_bias(product, value); };
  if constexpr (halves) {  // four 8x8 matrices are two tiles of an accumulator
    const uint32_t at = first + BiasValues::place(slice + lane % 16, lane / 16);
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
    const uint32_t at = first + BiasValues::place(row, lane % 4 / 2) + lane % 2 * 8;
    unrolled<tiles, 2>([&](int t, int half) {
      const uint32_t from = (at ^ (2 * t % 8 << 4)) + 2 * t / 8 * 128;
      const float2 pair = ptx::load_shared_pair(from + half * 8 * BiasValues::row_bytes);
      join(s_acc[0][t][2 * half], pair.x);
      join(s_acc[0][t][2 * half + 1], pair.y);
    });
  }
}

// What comes for the next block of a warpgroup: which pairs it shows, or logits.
template <typename Memory, int tiles>
CUFLASH_DEVICE void apply_look_up(float (&s_acc)[1][tiles][4], ColumnBits (&shown)[2],
                                  Memory& memory, int warpgroup, Ring<look_up_stages>& ring,
                                  const Score& score) {
  const int stage = ring.stage();
  wait(memory.full[warpgroup][stage], ring.full_parity());
  if constexpr (loads_mask) {
    read_bits(shown, memory.block[warpgroup][stage]);
  } else {
    add_bias(s_acc, memory.block[warpgroup][stage], score);
  }
  arrive_as_readers(memory.empty[warpgroup][stage], true);
  ring.advance();
}

}  // namespace cuflash
