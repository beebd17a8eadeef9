// What a mask or a bias holds for rows of queries and a block of keys, in shared memory: its rows
// as they lie, 16 bytes by 16.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "score/score.cuh"

namespace cuflash {

constexpr bool loads_mask = Config::mask_stages > 0, loads_bias = Config::bias_stages > 0;
constexpr bool looks_up = loads_mask || loads_bias;
static_assert(!(loads_mask && loads_bias), "one of the two");

// Of a mask a byte for each pair. Chunks of 16 bytes are turned within 128 bytes, so that those
// which the lanes of a warp read at once lie in different banks: of a mask and of 16 bits one chunk
// of eight rows, of float32 two of four rows.
template <int num_rows>
struct LookedUp {
  using Value = If<loads_mask, uint8_t, Score::BiasValue>;
  static constexpr int per_chunk = 16 / sizeof(Value);
  static constexpr int row_bytes = Config::block_n * sizeof(Value);
  static_assert(!looks_up || (row_bytes % 128 == 0 && sizeof(Value) <= 4), "whole 128 bytes");

  alignas(128) unsigned char rows[num_rows][row_bytes];

  CUFLASH_DEVICE static int turn(int row) { return sizeof(Value) < 4 ? row % 8 : row % 4 * 2; }
  CUFLASH_DEVICE static int place(int row, int chunk) {
    return row * row_bytes + ((chunk ^ turn(row)) << 4);
  }
};

// The first value of an entry, and the distance of its rows.
CUFLASH_DEVICE auto looked_up(const Score& score) {
  if constexpr (loads_mask) {
    return score.params.mask + score.mask_offset;
  } else {
    return score.first_bias();
  }
}
CUFLASH_DEVICE int64_t looked_up_row(const ScoreParams& params) {
  return loads_mask ? params.mask_layout.row : params.bias_layout.row;
}

// A warp that copies such tiles: lanes that are neighbours have chunks that are.
template <int num_rows>
struct LookUpCopy {
  using Tile = LookedUp<num_rows>;
  static constexpr int chunks = Tile::row_bytes / 16, lanes = chunks < 32 ? chunks : 32;
  static constexpr int step = 32 / lanes;                     // rows that are copied at once
  static constexpr int unroll = Score::holds_bounds ? 2 : 4;  // copies: each has an address

  CUFLASH_DEVICE static int own_row() { return ptx::thread_index() % 32 / lanes; }
  CUFLASH_DEVICE static int own_key() { return chunk() * Tile::per_chunk; }

  // `from` is the lane's first value; so many rows from its own on, and keys from its own on,
  // exist. Of a bias whole chunks are copied, of a mask the bytes that exist, and zeros for all
  // others.
  template <typename Value>
  CUFLASH_DEVICE static void start(Tile& tile, const Value* from, int64_t row_stride, int rows,
                                   int keys, uint64_t& full) {
    keys = min(max(keys, 0), Tile::per_chunk);
    const int existing = loads_mask || keys == 0 ? keys : 16;  // bytes
    const uint32_t to = ptx::shared_address(tile.rows);
    const int first_row = own_row(), own_chunk = chunk();  // read once: a read takes long
#pragma unroll unroll
    for (int row = 0; row < num_rows; row += step, from += step * row_stride) {
      ptx::cp_async_some(to + Tile::place(first_row + row, own_chunk), from,
                         row < rows ? existing : 0);
    }
    ptx::mbarrier_arrive_after_copies(ptx::shared_address(&full));
    __syncwarp();  // no lane may be left two phases behind in a wait
  }

 private:
  CUFLASH_DEVICE static int chunk() { return ptx::thread_index() % lanes; }
};

}  // namespace cuflash
