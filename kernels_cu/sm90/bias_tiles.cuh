// A bias of 16 bits on its way to the warpgroups of backward_sm90.cu: a warp brings blocks of rows
// of queries by a tile's keys to shared memory, and a lane reads the pairs that it holds.
//
//   barrier      arrivals a phase   what the end of a phase says
//   full         32 + bytes         a block is there
//   empty        4 consumers        every warp has read it: load the next
#pragma once

#include "sm90/drawn_tiles.cuh"

namespace cuflash {

constexpr bool loads_bias = Config::bias_stages > 0;

struct BiasTiles {
  using Value = Score::BiasValue;
  static constexpr int stages = loads_bias ? Config::bias_stages : 4;
  static constexpr int rows = 32;  // a lane brings one
  static_assert(!loads_bias || sizeof(Value) == 2, "rows are turned for values of 16 bits");
  static_assert(64 / rows <= stages, "a warpgroup may be 64 rows ahead of the other");

  alignas(128) Value value[stages][rows][Config::block_n];
  uint64_t full[stages], empty[stages];

  CUFLASH_DEVICE void init_barriers() {
    for (int i = 0; i < stages; ++i) {
      init(full[i], 32);
      init(empty[i], 4 * consumers * reader_arrivals);
    }
  }

  // Where the value of a key lies in its row. Rows are turned, so that those that the lanes of a
  // warp read at once lie in different banks.
  CUFLASH_DEVICE static int column(int row, int key) {
    return (key + (row >> 1 & 3) * 8) % Config::block_n;
  }
};

struct NoBiasTiles {
  CUFLASH_DEVICE void init_barriers() {}
};

struct BiasLoader {
  using Value = BiasTiles::Value;

  BiasTiles& smem;
  Ring<BiasTiles::stages> ring;
  const Value* from;  // the lane's first value in rows from 0 on
  int count;          // values of a row that exist, up to a multiple of 8

  // The keys of a tile and an entry.
  CUFLASH_DEVICE void start(const Score& score, int first_key) {
    from = score.first_bias() + row() * score.params.bias_layout.row + first_key;
    count = min(max((score.seqlen.k - first_key + 7) / 8 * 8, 0), Config::block_n);
  }

  // The values of a block of queries; past the last row or key none is read.
  CUFLASH_DEVICE void load_block(int64_t row_stride, int first_row, int num_rows) {
#pragma unroll 1
    for (int end = first_row + Config::block_m; first_row < end; first_row += BiasTiles::rows) {
      wait(smem.empty[ring.stage()], ring.empty_parity());
      load_row(from + first_row * row_stride, first_row + row() < num_rows ? count : 0);
      ring.advance();
    }
  }

 private:
  CUFLASH_DEVICE static int row() { return ptx::thread_index() % 32; }

  CUFLASH_DEVICE void load_row(const Value* values, int existing) const {
    const int place = BiasTiles::column(row(), 0);
    const uint32_t to = ptx::shared_address(smem.value[ring.stage()][row()]);
    const uint32_t full = ptx::shared_address(&smem.full[ring.stage()]);
    ptx::mbarrier_arrive_expect(full, existing * sizeof(Value));
    const int before_end = min(existing, Config::block_n - place);
    if (existing > 0) {
      ptx::bulk_load(to + place * sizeof(Value), values, before_end * sizeof(Value), full);
    }
    if (existing > before_end) {
      ptx::bulk_load(to, values + before_end, (existing - before_end) * sizeof(Value), full);
    }
    __syncwarp();  // no lane may be left two phases behind in a wait
  }
};

// The warp that brings the bias of every block of queries of every tile.
template <typename SharedMemory>
struct BiasProducer {
  const BackwardSm90Params& params;
  SharedMemory& smem;

  CUFLASH_DEVICE void run(NoBiasTiles&) {}
  CUFLASH_DEVICE void run(BiasTiles& tiles_of_bias) {
    BiasLoader bias{tiles_of_bias};
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
        const BlockRanges blocks = work.own(score.q_blocks(keys.begin, keys.end), params);
        LastRowsFirst walk(score, blocks, keys);
        bias.start(score, keys.begin);
#pragma unroll 1
        for (int block = walk.first(); walk.is_left(block); block = walk.next(block)) {
          bias.load_block(params.score.bias_layout.row, block * Config::block_m, score.seqlen.q);
        }
      }
    }
  }
};

// The values at the pairs that a lane holds of a transposed accumulator, block by block.
struct BiasReader {
  static constexpr int tiles = BiasTiles::rows / 8;

  BiasTiles& smem;
  Ring<BiasTiles::stages>& ring;
  int place[2];  // of two keys in the lane's first row

  CUFLASH_DEVICE BiasReader(BiasTiles& smem, Ring<BiasTiles::stages>& ring, int own_key)
      : smem(smem), ring(ring) {
    const int row = fragment_column(0, 0, ptx::thread_index() % 32);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      place[half] = row * Config::block_n + BiasTiles::column(row, own_key + 8 * half);
    }
  }

  // Asked for in the order of t, then half, then i.
  CUFLASH_DEVICE float operator()(int t, int half, int i) {
    if (t % tiles == 0 && half == 0 && i == 0) wait(smem.full[ring.stage()], ring.full_parity());
    const int row = t % tiles * 8 + i;  // turned as the first
    const float value =
        Score::real_bias(smem.value[ring.stage()][0][place[half] + row * Config::block_n]);
    if (t % tiles == tiles - 1 && half == 1 && i == 1) {
      arrive_as_readers(smem.empty[ring.stage()], true);
      ring.advance();
    }
    return value;
  }
};

}  // namespace cuflash
