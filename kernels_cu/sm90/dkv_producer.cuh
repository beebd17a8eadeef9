// Shared memory, the order of blocks and the loading warp of the Hopper kernels in which a thread
// block owns keys and streams queries: backward_dkv_sm90.cu, backward_sm90.cu,
// backward_pair_sm90.cu.
//
//   barrier      arrivals a phase   what the end of a phase means
//   keys_full    32 + bytes         k and v of the tile have arrived
//   full         32 + bytes         q, dout, lse and delta of a block have arrived
//   raw          1 + bytes          a tile has arrived, and some of its rows must be cleared
//   empty        4 consumers        every warp has used the block: load the next
#pragma once

#include "simt/recompute_rows.cuh"
#include "schedule/pipeline.cuh"
#include "schedule/tiles.cuh"
#include "schedule/segments.cuh"
#include "sm90/roles.cuh"
#include "sm90/load.cuh"

namespace cuflash {

constexpr int consumers = Config::block_n / 64;  // warpgroups, of 64 keys each
static_assert(Config::block_n % 64 == 0, "each warpgroup computes 64 keys");

struct DkvSharedMemory {
  using KTile = PanelTile<Config::block_n, Config::head_dim>;
  // A pass for dv alone does not need v: the tile then has only eight rows, the minimum.
  using VTile = PanelTile<Config::grad_k ? Config::block_n : 8, Config::head_dim_v>;
  using QTile = PanelTile<Config::block_m, Config::head_dim>;
  using DoutTile = PanelTile<Config::block_m, Config::head_dim_v>;

  QTile q[Config::num_stages];
  DoutTile dout[Config::num_stages];
  KTile k;
  VTile v;
  alignas(16) float lse[Config::num_stages][Config::block_m];
  alignas(16) float delta[Config::num_stages][Config::block_m];
  uint64_t full[Config::num_stages], empty[Config::num_stages];
  uint64_t keys_full, raw;
};

CUFLASH_DEVICE void init_rings(DkvSharedMemory& smem) {
  for (int i = 0; i < Config::num_stages; ++i) {
    init(smem.full[i], 32);  // the lanes of the producer
    init(smem.empty[i], 4 * consumers * reader_arrivals);
  }
  init(smem.keys_full, 32);
  init(smem.raw, 1);
}

// The order in which the blocks of queries that see a tile are visited.
struct FirstRowsFirst : VisitedBlocks<Walk::queries> {
  static constexpr bool sums_over_keys = false;  // do kernels with this order sum over keys?

  using VisitedBlocks::VisitedBlocks;
  CUFLASH_DEVICE int first() { return first_from(ranges.begin); }
  CUFLASH_DEVICE int next(int block) { return next_after(block); }
  CUFLASH_DEVICE bool in_range(int block) const { return block < ranges.end; }
};

template <int tile_keys>
struct LastRowsFirstOf : VisitedBlocks<Walk::queries, tile_keys> {
  using Base = VisitedBlocks<Walk::queries, tile_keys>;
  static constexpr bool sums_over_keys = true;

  using Base::Base, Base::last_from, Base::next_before, Base::ranges;
  CUFLASH_DEVICE int first() { return last_from(ranges.end - 1); }
  CUFLASH_DEVICE int next(int block) { return next_before(block); }
  CUFLASH_DEVICE bool in_range(int block) const { return block >= ranges.begin; }
};
using LastRowsFirst = LastRowsFirstOf<Config::block_n>;

// Statistics of the rows of a block, distributed over the lanes of a warp.
struct LaneStatistics {
  static constexpr int count = (Config::block_m + 31) / 32;

  RowStatistics row[count];

  CUFLASH_DEVICE LaneStatistics(const RowStatistics* from, int first_row, const Seqlen& seqlen) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      row[i] = seqlen.statistics(from, first_row + 32 * i + lane_index());
    }
  }

  CUFLASH_DEVICE void store(DkvSharedMemory& smem, int stage) const {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int at = 32 * i + lane_index();
      if (Config::block_m % 32 != 0 && at >= Config::block_m) break;
      smem.lse[stage][at] = row[i].lse;
      smem.delta[stage][at] = row[i].delta;
    }
  }

  // Bit mask of the lanes whose row sees no key.
  CUFLASH_DEVICE uint32_t hidden(int i) const {
    return __ballot_sync(0xffffffff, row[i].lse == infinity());
  }
};

template <typename Producer>
CUFLASH_DEVICE void clear_fully_masked_rows(Producer& producer, int stage,
                                            const LaneStatistics& statistics) {
  producer.wait_for_raw(stage);
#pragma unroll
  for (int i = 0; i < LaneStatistics::count; ++i) {
    for_each_bit(statistics.hidden(i), [&](int bit) {
      const int row = 32 * i + bit;
      if (row >= Config::block_m) return;
      clear_row(producer.smem.q[stage], row);
      clear_row(producer.smem.dout[stage], row);
    });
  }
  ptx::fence_async_proxy();
}

// Loads rows of q and dout from row `first_row` of the arrays on, and their statistics. Rows that
// saw no key, or that belong to the next packed sequence, must not reach a product: 0 * NaN is NaN.
template <typename Producer>
CUFLASH_DEVICE void load_rows(Producer& producer, const BatchIndex& entry, int first_row,
                              const LaneStatistics& statistics) {
  const BackwardSm90Params& params = producer.params;
  auto& smem = producer.smem;
  const int stage = producer.ring.stage();
  const int loaded = params.score.seqlen_q - first_row;  // rows past the end arrive as zeros
  bool clears = false;
#pragma unroll
  for (int i = 0; i < LaneStatistics::count; ++i) {
    const bool exists = 32 * i + lane_index() < min(loaded, Config::block_m);
    clears |= __any_sync(0xffffffff, exists && statistics.row[i].lse == infinity());
  }
  wait(smem.empty[stage], producer.ring.empty_parity());
  statistics.store(smem, stage);
  if (lane_index() == 0) {
    uint64_t& full = clears ? producer.raw(stage) : smem.full[stage];
    ptx::mbarrier_arrive_expect(ptx::shared_address(&full),
                                DkvSharedMemory::QTile::bytes + DkvSharedMemory::DoutTile::bytes);
    producer.start_rows(smem.q[stage], params.q_map, params.q_layout, entry, first_row, full);
    producer.start_rows(smem.dout[stage], params.dout_map, params.dout_layout, entry, first_row,
                        full);
  }
  __syncwarp();  // all lanes are past their wait: see sm90/barrier.cuh
  if (clears) clear_fully_masked_rows(producer, stage, statistics);
  // Each lane arrives for what it wrote. If no row is cleared, lane 0 arrived with the bytes.
  arrive_if(smem.full[stage], clears || lane_index() != 0);
  producer.ring.advance();
}

// Loads the blocks of queries of one batch entry in the order of `walk`. The producer supplies what
// differs between kernels: start_rows() starts the load of a tile, raw() is the mbarrier of rows
// that must be cleared, and wait_for_raw() waits for these rows.
template <typename Producer, typename RowWalk>
CUFLASH_DEVICE void load_rows_of(Producer& producer, const BatchIndex& entry, const Seqlen& seqlen,
                                 RowWalk& walk) {
  const BackwardSm90Params& params = producer.params;
  const RowStatistics* rows = params.rows + entry * params.rows_layout.batch + seqlen.first_q;
  const auto rows_of = [&](int block) {
    return LaneStatistics(rows, block * Config::block_m, seqlen);
  };
  int block = walk.first();
  LaneStatistics statistics = rows_of(max(block, 0));
#pragma unroll 1
  while (walk.in_range(block)) {
    load_rows(producer, entry, seqlen.first_q + block * Config::block_m, statistics);
    block = walk.next(block);
    statistics = rows_of(max(block, 0));  // in flight during the wait for the next buffer
  }
}

// Loads the keys, and blocks of queries in the order of `RowWalk`.
template <typename RowWalk>
struct DkvProducer {
  const BackwardSm90Params& params;
  DkvSharedMemory& smem;
  Ring<Config::num_stages> ring;
  Ring<1> raw_ring;

  CUFLASH_DEVICE void run(const KeyTile& work) {
    load_keys(work);
#pragma unroll 1
    for (int index = 0; index < params.grid.entries_per_owner; ++index) {
      const BatchIndex entry = work.entry(params, index);
      const Score score(params.score, entry);
      const Range keys{work.first_key, work.first_key + Config::block_n};
      const BlockRanges blocks = work.own_blocks(score.q_blocks(keys.begin, keys.end), params);
      RowWalk walk(score, blocks, keys);
      load_rows_of(*this, entry, score.seqlen, walk);
    }
  }

  template <typename RowsTile>
  CUFLASH_DEVICE void start_rows(RowsTile& tile, const ptx::TensorMap& map, const Layout& layout,
                                 const BatchIndex& entry, int first_row, uint64_t& full) const {
    start_load(tile, map, layout, entry, first_row, full);
  }
  CUFLASH_DEVICE uint64_t& raw(int) const { return smem.raw; }
  CUFLASH_DEVICE void wait_for_raw(int) {
    wait(smem.raw, raw_ring.full_parity());
    raw_ring.advance();
  }

 private:
  // Keys may be loaded for any entry: an owner's entries differ only in axes along which keys are
  // broadcast.
  CUFLASH_DEVICE void load_keys(const KeyTile& work) {
    constexpr int bytes =
        DkvSharedMemory::KTile::bytes + (Config::grad_k ? DkvSharedMemory::VTile::bytes : 0);
    const BatchIndex entry = work.entry(params, 0);
    const int from = Seqlen(params.score, entry).first_k + work.first_key;
    const int loaded = min(Config::block_n, params.score.seqlen_k - from);
    const Range kept = RowWalk::sums_over_keys ? seen_keys(work) : Range{0, loaded};
    const bool clears = kept.begin > 0 || kept.end < loaded;
    if (lane_index() == 0) {
      uint64_t& full = clears ? smem.raw : smem.keys_full;
      ptx::mbarrier_arrive_expect(ptx::shared_address(&full), bytes);
      start_load(smem.k, params.k_map, params.k_layout, entry, from, full);
      if constexpr (Config::grad_k) {
        start_load(smem.v, params.v_map, params.v_layout, entry, from, full);
      }
    }
    __syncwarp();  // all lanes are past their wait: see sm90/barrier.cuh
    if (clears) {
      wait(smem.raw, raw_ring.full_parity());
      raw_ring.advance();
      clear_outside(smem.k, kept, loaded);
      clear_outside(smem.v, kept, loaded);
      ptx::fence_async_proxy();
    }
    arrive_if(smem.keys_full, clears || lane_index() != 0);
  }

  // Keys of the tile that a query of some entry may see, counted from the first key. No other key
  // may reach a product that sums over keys: 0 * NaN is NaN.
  CUFLASH_DEVICE Range seen_keys(const KeyTile& work) const {
    Range seen{Config::block_n, 0};
#pragma unroll 1
    for (int index = 0; index < params.grid.entries_per_owner; ++index) {
      const Score score(params.score, work.entry(params, index));
      const Range keys = score.kv_range(0, score.seqlen.rows_q).relative_to(work.first_key);
      if (keys.begin >= keys.end) continue;
      seen = {min(seen.begin, max(keys.begin, 0)), max(seen.end, keys.end)};
    }
    return seen;
  }
};

}  // namespace cuflash
