// Values of a mask or of a 16-bit bias, through shared memory to the consumers of backward_sm90.cu.
// A warp copies rows of queries by the keys of a tile. Lanes read the values of the pairs that they
// hold in a transposed accumulator, whose rows are keys.
//
//   barrier      arrivals a phase   what the end of a phase means
//   full         32 (lanes)         copies of 32 rows have arrived
//   empty        4 consumers        every warp has read the rows: copy the next
#pragma once

#include "sm90/drawn_tiles.cuh"
#include "sm90/look_up_tile.cuh"

namespace cuflash {

struct KeyLookUps {
  static constexpr int stages = loads_mask   ? Config::mask_stages
                                : loads_bias ? Config::bias_stages
                                             : 2;
  static constexpr int rows = 32;
  static_assert(!loads_bias || sizeof(Score::BiasValue) == 2,
                "ldmatrix.trans transposes 16-bit values");
  static_assert(64 / rows <= stages, "a warpgroup may be 64 rows ahead of the other");

  LookUpTile<rows> tile[stages];
  uint64_t full[stages], empty[stages];

  CUFLASH_DEVICE void init_barriers() {
    for (int i = 0; i < stages; ++i) {
      init(full[i], 32);
      init(empty[i], 4 * consumers * reader_arrivals);
    }
  }
};

struct NoLookUps {
  CUFLASH_DEVICE void init_barriers() {}
};

// The warp that copies these values, for every block of queries of every tile of keys.
template <typename SharedMemory>
struct KeyLookUpLoader {
  using Copy = LookUpCopy<KeyLookUps::rows>;

  const BackwardSm90Params& params;
  SharedMemory& smem;
  Ring<KeyLookUps::stages> ring;

  CUFLASH_DEVICE void run(NoLookUps&) {}
  CUFLASH_DEVICE void run(KeyLookUps& look_ups) {
    DrawnTiles<SharedMemory> tiles{smem};
#pragma unroll 1
    for (;; tiles.release()) {
      const int tile = tiles.receive();
      if (tile < 0) break;
      const KeyTile work = KeyTile::at(params, tile);
      const Range keys{work.first_key, work.first_key + Config::block_n};
#pragma unroll 1
      for (int index = 0; index < KeyTile::entries(params); ++index) {
        const Score score(params.score, work.entry(params, index));
        const BlockRanges blocks = work.own_blocks(score.q_blocks(keys.begin, keys.end), params);
        LastRowsFirst walk(score, blocks, keys);
        const auto* from = look_up_values(score) +
                           Copy::own_row() * look_up_row_stride(params.score) +
                           (keys.begin + Copy::own_key());
        const int num_keys = score.seqlen.k - (keys.begin + Copy::own_key());
#pragma unroll 1
        for (int block = walk.first(); walk.in_range(block); block = walk.next(block)) {
          copy_block(look_ups, from, block * Config::block_m, score.seqlen.q, num_keys);
        }
      }
    }
  }

 private:
  template <typename Value>
  CUFLASH_DEVICE void copy_block(KeyLookUps& look_ups, const Value* from, int first_row,
                                 int num_rows, int num_keys) {
    const int64_t row_stride = look_up_row_stride(params.score);
    const int end = first_row + Config::block_m;
#pragma unroll 1
    for (; first_row < end; first_row += KeyLookUps::rows, ring.advance()) {
      const int stage = ring.stage();
      wait(look_ups.empty[stage], ring.empty_parity());
      Copy::start(look_ups.tile[stage], from + first_row * row_stride, row_stride,
                  num_rows - first_row - Copy::own_row(), num_keys, look_ups.full[stage]);
    }
  }
};

// Reads the values of a lane's pairs, in the order of t, then half, then i. A value is the bias of
// the pair, or whether the mask shows the pair.
struct KeyLookUpReader {
  using Tile = LookUpTile<KeyLookUps::rows>;
  static constexpr int tiles = KeyLookUps::rows / 8;

  KeyLookUps& look_ups;
  Ring<KeyLookUps::stages>& ring;
  uint32_t at;        // address in the rows that are read
  uint32_t pairs[4];  // bias values of two accumulator tiles

  CUFLASH_DEVICE KeyLookUpReader(KeyLookUps& look_ups, Ring<KeyLookUps::stages>& ring)
      : look_ups(look_ups), ring(ring) {}

  using Value = If<loads_mask, uint32_t, float>;
  CUFLASH_DEVICE Value operator()(int t, int half, int i) {
    if (t % tiles == 0 && half == 0 && i == 0) {
      wait(look_ups.full[ring.stage()], ring.full_parity());
      at = ptx::shared_address(look_ups.tile[ring.stage()].rows) + first_offset();
    }
    const uint32_t rows_on = t % tiles * 8 * Tile::row_bytes;
    Value value;
    if constexpr (loads_mask) {
      value = ptx::load_shared_8((at ^ (i << 4)) + rows_on + i * Tile::row_bytes + 8 * half);
    } else {
      if (t % 2 == 0 && half == 0 && i == 0) ptx::ldmatrix_x4_trans(pairs, at + rows_on);
      const uint32_t pair = pairs[t % 2 * 2 + half];
      value = Score::real_bias(static_cast<uint16_t>(i == 0 ? pair : pair >> 16));
    }
    if (t % tiles == tiles - 1 && half == 1 && i == 1) {
      arrive_as_readers(look_ups.empty[ring.stage()], true);
      ring.advance();
    }
    return value;
  }

 private:
  // Offset of the lane's first row and key in a mask, or of the matrix row in a bias whose address
  // the lane gives to ldmatrix.
  CUFLASH_DEVICE static int first_offset() {
    const int thread = ptx::thread_index() - 128, lane = thread % 32, key = thread / 32 * 16;
    if constexpr (loads_mask) {
      return Tile::chunk_offset(fragment_column(0, 0, lane), key / Tile::values_per_chunk) +
             lane / 4;
    } else {
      return Tile::chunk_offset(lane % 8 + lane / 16 * 8,
                                key / Tile::values_per_chunk + lane / 8 % 2);
    }
  }
};

}  // namespace cuflash
