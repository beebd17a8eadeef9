// Tiles of mask or bias values in shared memory, for rows of queries and a block of keys. Rows are
// copied unchanged in chunks of 16 bytes.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "score/score.cuh"

namespace cuflash {

constexpr bool loads_mask = Config::mask_stages > 0, loads_bias = Config::bias_stages > 0;
constexpr bool looks_up = loads_mask || loads_bias;
static_assert(!(loads_mask && loads_bias), "a mask or a bias, not both");

// One tile. A mask has one byte for each pair. Chunks of 16 bytes are swizzled within 128 bytes, so
// that the chunks that a warp reads at once lie in different banks: one chunk of each of eight rows
// for masks and 16-bit biases, two chunks of each of four rows for float32.
template <int num_rows>
struct LookUpTile {
  using Value = If<loads_mask, uint8_t, Score::BiasValue>;
  static constexpr int values_per_chunk = 16 / sizeof(Value);
  static constexpr int row_bytes = Config::block_n * sizeof(Value);
  static_assert(!looks_up || (row_bytes % 128 == 0 && sizeof(Value) <= 4),
                "rows are multiples of the 128-byte swizzle");

  alignas(128) unsigned char rows[num_rows][row_bytes];

  CUFLASH_DEVICE static int swizzle(int row) { return sizeof(Value) < 4 ? row % 8 : row % 4 * 2; }
  CUFLASH_DEVICE static int chunk_offset(int row, int chunk) {
    return row * row_bytes + ((chunk ^ swizzle(row)) << 4);
  }
};

// The mask or bias values of a batch entry, and the stride of their rows.
CUFLASH_DEVICE auto look_up_values(const Score& score) {
  if constexpr (loads_mask) {
    return score.params.mask + score.mask_offset;
  } else {
    return score.first_bias();
  }
}
CUFLASH_DEVICE int64_t look_up_row_stride(const ScoreParams& params) {
  return loads_mask ? params.mask_layout.row : params.bias_layout.row;
}

// The copy of such a tile by a warp. Neighbouring lanes copy neighbouring chunks.
template <int num_rows>
struct LookUpCopy {
  using Tile = LookUpTile<num_rows>;
  static constexpr int chunks = Tile::row_bytes / 16, lanes = chunks < 32 ? chunks : 32;
  static constexpr int step = 32 / lanes;                     // rows that are copied at once
  static constexpr int unroll = Score::holds_bounds ? 2 : 4;  // each copy needs an address

  CUFLASH_DEVICE static int own_row() { return ptx::thread_index() % 32 / lanes; }
  CUFLASH_DEVICE static int own_key() { return chunk() * Tile::values_per_chunk; }

  // `from` is the lane's first value. `rows` and `keys` count what exists from the lane's first row
  // and key on. A chunk of a bias is copied whole if some key of it exists. Of a mask the existing
  // bytes are copied. All other bytes become zeros.
  template <typename Value>
  CUFLASH_DEVICE static void start(Tile& tile, const Value* from, int64_t row_stride, int rows,
                                   int keys, uint64_t& full) {
    keys = min(max(keys, 0), Tile::values_per_chunk);
    const int existing = loads_mask || keys == 0 ? keys : 16;  // bytes
    const uint32_t to = ptx::shared_address(tile.rows);
    const int first_row = own_row(), own_chunk = chunk();  // read once: a read takes long
#pragma unroll unroll
    for (int row = 0; row < num_rows; row += step, from += step * row_stride) {
      ptx::cp_async_some(to + Tile::chunk_offset(first_row + row, own_chunk), from,
                         row < rows ? existing : 0);
    }
    ptx::mbarrier_arrive_after_copies(ptx::shared_address(&full));
    __syncwarp();  // all lanes are past their wait: see sm90/barrier.cuh
  }

 private:
  CUFLASH_DEVICE static int chunk() { return ptx::thread_index() % lanes; }
};

}  // namespace cuflash
