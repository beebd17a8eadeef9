// dq, dk and dv on Hopper in one pass over the scores: five products for each pair of blocks.
//
//   for each tile of block_n keys, drawn from a counter:      one thread block
//     dk = 0, dv = 0                                          64 keys per warpgroup
//     for each batch entry that shares these keys:            heads of a group, broadcast axes
//       for each block of block_m queries that see some key:  last rows first
//         s^T = k q^T
//         p^T = exp(score(s^T) - lse)
//         dv += p^T dout;  dp^T = v dout^T
//         ds^T = p^T (dp^T - delta) score'(s^T)               also to shared memory
//         dk += ds^T q
//         sums of the block += ds k                           the last warpgroup and the writers
//     dk *= scale
//
// A tile adds to each element of the sums (sm90/dq_accum.cuh) once, in float32. Of the tiles that a
// block of queries sees, the one with the first keys stores and the others add. In a fixed order
// the turn of the block counts the tiles that have added, and each tile waits for its turn. Without
// an order the tiles wait only for the first one. A tile waits only for tiles of its owner with
// earlier keys, which were drawn before it: the first unfinished tile never waits, whatever else
// runs on the device. All tiles walk from the last rows to the first, so that they follow each
// other without waiting once each has started one block behind the previous one.
//
// In warpgroup 0, warp 0 draws tiles and loads, and warps 1 and 2 write sums. The two writers
// alternate between blocks: while one waits until its sums are visible to all, the other adds. Then
// come the consumers, which own keys. The last warpgroup multiplies dq. The next tile is loaded
// while dk and dv are stored. (D22)
//
//   barrier      arrivals a phase   what the end of a phase means
//   ds_full      4 consumers        ds of a block is complete
//   ds_empty     1 (4 warps)        dq was multiplied (and dbias stored): stage the next ds
//   dq_full      4 (warps)          a part of dq is staged: add it to the sums
//   dq_empty     1                  the part was read: stage it for the next block
//   keys_empty   4 consumers + 4    k and v of the tile were read: load the next tile
//   tile_full    1                  the next tile is drawn
//   tile_empty   tile_readers       all warps have read the tile: draw the one after the next
//   others                          see sm90/dkv_producer.cuh
//
// Ping-pong: named barriers pass the right to start products between the two consumers, so that one
// computes exponentials and ds while the products of the other run.
#include "ptx/stmatrix.cuh"
#include "sm90/bias_gradient.cuh"
#include "sm90/dq_accum.cuh"
#include "sm90/dkv_parts.cuh"
#include "sm90/dkv_warpgroup.cuh"
#include "sm90/dq_writer.cuh"
#include "sm90/key_look_ups.cuh"

namespace cuflash {

constexpr int tile_readers = 4 * consumers + 4 + looks_up;  // warps

// One addition of a tile to the sums of one block of queries.
struct Addition {
  DqAccum sums;
  DqSemaphore semaphore;
  int block;
  int turn;  // negative: the writer may end
};

struct SharedMemory : DkvSharedMemory {
  using DsTile = PanelTile<Config::block_n, Config::block_m>;

  DsTile ds[2];                                               // ds^T: rows are keys
  alignas(128) float dq[Config::block_m * Config::head_dim];  // staged part by part
  If<looks_up, KeyLookUps, NoLookUps> look_ups;
  uint64_t ds_full[2], ds_empty[2];
  uint64_t dq_full[writers][DqAccum::parts], dq_empty[writers][DqAccum::parts];
  Addition addition[writers];
  uint64_t keys_empty;
  uint64_t tile_full[2], tile_empty[2];
  int tile[2];         // negative: no tile is left
  int first_block[2];  // first block of queries of the tile's part
};

static_assert(consumers == 2, "two consumer warpgroups ping-pong");
static_assert(!loads_mask || Score::hides_after_exponentials,
              "the mask in shared memory zeroes probabilities");

// Called by one thread, before any other thread uses an mbarrier.
CUFLASH_DEVICE void init_barriers(SharedMemory& smem) {
  init_rings(smem);
  for (int i = 0; i < 2; ++i) {
    init(smem.ds_full[i], 4 * consumers);
    init(smem.ds_empty[i], Config::grad_bias ? 4 * reader_arrivals : 1);
  }
  for (int i = 0; i < writers; ++i) {
    for (int part = 0; part < DqAccum::parts; ++part) {
      init(smem.dq_full[i][part], 4);
      init(smem.dq_empty[i][part], 1);
    }
  }
  smem.look_ups.init_barriers();
  init(smem.keys_empty, 4 * consumers * reader_arrivals + 4);
  for (int i = 0; i < 2; ++i) {
    init(smem.tile_full[i], 1);
    init(smem.tile_empty[i], tile_readers);
  }
  ptx::fence_mbarrier_init();
}

using Tiles = DrawnTiles<SharedMemory>;

// ----------------------------------------------------------------------------- the loading warp
struct Producer {
  const BackwardSm90Params& params;
  SharedMemory& smem;

  CUFLASH_DEVICE void run() {
    DkvProducer<LastRowsFirst> rows{params, smem};
#pragma unroll 1
    for (Ring<2> ring;; ring.advance()) {
      const int tile = draw(ring);
      if (tile < 0) break;
      wait(smem.keys_empty, (ring.uses & 1) ^ 1);
      rows.run(KeyTile::at(params, tile));
    }
  }

 private:
  // Tiles are drawn, so that a tile starts only after all tiles before it have started.
  CUFLASH_DEVICE int draw(const Ring<2>& ring) const {
    wait(smem.tile_empty[ring.stage()], ring.empty_parity());
    int tile = lane_index() == 0 ? atomicAdd(params.turns, 1) : 0;
    tile = __shfl_sync(0xffffffff, tile, 0);
    if (tile >= params.grid.num_blocks * params.grid.num_owners) tile = -1;
    if (lane_index() == 0) {
      smem.tile[ring.stage()] = tile;
      if constexpr (Config::split_rows) {
        smem.first_block[ring.stage()] = KeyTile::at(params, tile).first_block(params);
      }
    }
    arrive_as_warp(smem.tile_full[ring.stage()]);
    return tile;
  }
};

// ----------------------------------------------------------------------------- the writing warps
// Of all blocks of queries in turn, writer w adds block w and every second block after it.
struct Writer {
  SharedMemory& smem;
  const uint32_t writer;

  CUFLASH_DEVICE void run() const {
    if (lane_index() != 0) return;
#pragma unroll 1
    for (Ring<1> ring;; ring.advance()) {
      wait(smem.dq_full[writer][0], ring.full_parity());
      const Addition addition = smem.addition[writer];
      if (addition.turn < 0) break;
      write(addition, ring.full_parity());
    }
    ptx::tma_store_wait();  // the thread block must not end before its stores are complete
  }

 private:
  CUFLASH_DEVICE void write(const Addition& own, uint32_t parity) const {
    add_in_turn(own.semaphore, own.block, own.turn, [&] {
      static_assert(DqAccum::parts == 2, "at most one part is read while another one is added");
      start(own, 0, parity);
      start(own, 1, parity);
      ptx::tma_store_wait_read<1>();
      arrive_if(smem.dq_empty[writer][0], true);
      ptx::tma_store_wait_read();
      arrive_if(smem.dq_empty[writer][1], true);
    });
  }

  CUFLASH_DEVICE void start(const Addition& own, int part, uint32_t parity) const {
    wait(smem.dq_full[writer][part], parity);
    const int bytes = 512 * DqAccum::tiles(part) * own.sums.slices(own.block, part);
    start_adding(own.sums.part(own.block, part), &smem.dq[DqAccum::begin(part)], bytes,
                 own.turn == 0);
  }
};

// ---------------------------------------------------------------------------- the warpgroup of dq
struct DqWarpgroup {
  const BackwardSm90Params& params;
  SharedMemory& smem;
  Ring<2> ring;

  CUFLASH_DEVICE void run() {
    Tiles tiles{smem};
#pragma unroll 1
    for (;; tiles.release()) {
      const int tile = tiles.receive();
      if (tile < 0) break;
      wait(smem.keys_full, tiles.keys_parity());
      multiply_tile(KeyTile::at(params, tile));
      arrive_as_warp(smem.keys_empty);  // every warp: a tile may have no product that joins them
    }
    wait_for_staging(0);  // once only: a writer that is told to end arrives no more
    wait_for_staging(1);
#pragma unroll 1
    for (int i = 0; i < writers; ++i, ring.advance()) {
      if (leads_warpgroup()) smem.addition[ring.stage()].turn = -1;
      arrive_as_warp(smem.dq_full[ring.stage()][0]);
    }
  }

 private:
  CUFLASH_DEVICE void multiply_tile(const KeyTile& work) {
#pragma unroll 1
    for (int index = 0; index < KeyTile::entries(params); ++index) {
      const BatchIndex entry = work.entry(params, index);
      const Score score(params.score, entry);
      const Range keys{work.first_key, work.first_key + Config::block_n};
      const int tile = keys.begin / Config::block_n, sum = tile % params.dq_sums;
      const DqSemaphore semaphore(params, work, index, sum);
      const DqAccum sums(params, entry, sum);
      const BlockRanges blocks = work.own_blocks(score.q_blocks(keys.begin, keys.end), params);
      const Turns<> turns(score, tile, params.dq_sums);
      LastRowsFirst walk(score, blocks, keys);
#pragma unroll 1
      for (int block = walk.first(); walk.in_range(block); block = walk.next(block)) {
        multiply_block({sums, semaphore, block, turns.of(block)});
        if constexpr (Config::grad_bias) {
          gradient(work, index).store(smem.ds[ring.stage()], block, work.first_key);
          arrive_as_readers(smem.ds_empty[ring.stage()], true);
        }
        ring.advance();
      }
      if constexpr (Config::grad_bias) gradient(work, index).clear_unseen(work, blocks);
    }
  }

  // Computed anew for each block, so that its address occupies no registers.
  CUFLASH_DEVICE BiasGradient gradient(const KeyTile& work, int index) const {
    return {params, work.entry(params, index)};
  }

  CUFLASH_DEVICE void multiply_block(const Addition& addition) const {
    wait(smem.ds_full[ring.stage()], ring.full_parity());
    multiply_part<0>(addition);
    multiply_part<1>(addition);
    static_assert(DqAccum::parts == 2, "both parts are multiplied above");
  }

  template <int part>
  CUFLASH_DEVICE void multiply_part(const Addition& addition) const {
    constexpr int tiles = DqAccum::tiles(part);
    const int stage = ring.stage();
    float acc[1][tiles][4];
    start_panel_product<SharedMemory::DsTile, SharedMemory::KTile>(
        acc, smem.ds[stage].mn_major(0, part % DqAccum::row_parts),
        smem.k.mn_major(0, part / DqAccum::row_parts));
    ptx::wgmma_wait<0>();
    ptx::pin(flat(acc));
    if (!Config::grad_bias && part == DqAccum::parts - 1) {
      arrive_if(smem.ds_empty[stage], leads_warpgroup());
    }
    wait_for_staging(part);
    if (part == 0 && leads_warpgroup()) smem.addition[stage] = addition;
    const uint32_t thread = ptx::thread_index() % 128;
    auto* const staged = reinterpret_cast<DqSlice<tiles>*>(smem.dq + DqAccum::begin(part));
    staged[thread / 32].write(acc[0], thread % 32);
    ptx::fence_async_proxy();
    arrive_as_warp(smem.dq_full[stage][part]);
  }

  // Waits until the writer has read a part of the previous block.
  CUFLASH_DEVICE void wait_for_staging(int part) const {
    const Ring<writers> before{ring.uses - 1};
    wait(smem.dq_empty[before.stage()][part], before.full_parity());
  }
};

// --------------------------------------------------------------------------------- the consumers
struct Consumer : DkvWarpgroup<64> {
  // Are there registers for dp beside p and the operand p of dv?
  static constexpr bool dp_beside_p = Config::head_dim + Config::head_dim_v <= 192;
  // Are there registers to hold a tile's owner from one entry to the next? Not with lengths, unless
  // dropout or packed sequences change the register allocation.
  static constexpr bool holds_owner = Config::head_dim <= 96 || !(Score::has_lengths || looks_up) ||
                                      Config::dropout || Config::cu_seqlens != Dtype::none;
  // Are lse and delta read while products run, and is ds announced only after the scores of the
  // next block have started? This takes registers, and head size 32 was slower.
  static constexpr bool overlaps_more = Config::head_dim >= 64 && Score::hides_after_exponentials &&
                                        !looks_up && !Config::dropout && !Config::split_queries &&
                                        Config::cu_seqlens == Dtype::none;
  // Tiles of delta that are read before dp is done, or all after it.
  static constexpr int ahead = dp_beside_p || !overlaps_more ? tiles : 3;
  static constexpr int first_pingpong_barrier = 1;  // first named barrier: one for each consumer
  Ring<KeyLookUps::stages> look_up_ring;
  bool ds_is_staged = false;  // is ds of the previous block staged, but not announced?

  CUFLASH_DEVICE void run() {
    Tiles tiles{shared()};
#pragma unroll 1
    for (;; tiles.release()) {
      const int tile = tiles.receive();
      if (tile < 0) break;
      clear(dk_acc);
      clear(dv_acc);
      wait_for_keys(tiles.keys_parity());
      add_tile(KeyTile::at(params, tile), tiles);
      arrive_as_readers(shared().keys_empty, true);
      if constexpr (Config::split_queries) {
        store_part(KeyTile::at(params, tiles.index()));
      } else {
        store(KeyTile::at(params, tiles.index()));
      }
    }
  }

 private:
  CUFLASH_DEVICE SharedMemory& shared() const { return static_cast<SharedMemory&>(smem); }

  // Stores partial sums, which backward_combine.cu adds up.
  CUFLASH_DEVICE void store_part(const KeyTile& work) const {
    DkvSlice* slice = own_slice(params, work, work.first_key + 16 * (warp_index() - 4));
    if (slice == nullptr) return;
    slice->dk.write(dk_acc[0], lane_index());
    slice->dv.write(dv_acc[0], lane_index());
  }

  CUFLASH_DEVICE void add_tile(const KeyTile& of_all, const Tiles& tiles) {
    if (warpgroup == 1) pingpong_wait();  // warpgroup 0 begins (D82)
#pragma unroll 1
    for (int index = 0; index < KeyTile::entries(params); ++index) {
      const KeyTile work = holds_owner ? of_all : KeyTile::at(params, tiles.index());
      const Score score(params.score, work.entry(params, index));
      const Range tile{work.first_key, work.first_key + Config::block_n};
      BlockRanges blocks = score.q_blocks(tile.begin, tile.end);
      if constexpr (Config::split_rows) {
        blocks.end = min(blocks.end, work.first_block(params) + params.part_blocks);
      }
      LastRowsFirst walk(score, blocks, tile);
#pragma unroll 1
      for (int block = walk.first(); walk.in_range(block) && tiles.has_block(block);
           block = walk.next(block)) {
        const int first_row = block * Config::block_m;
        add_block(score, first_row, work.first_key, walk.masked(block));
      }
    }
    if (warpgroup == 0) pingpong_signal();
    if (ds_is_staged) announce_ds();
    ptx::wgmma_wait<0>();
    ptx::pin(flat(dk_acc));
    ptx::pin(flat(dv_acc));
  }

  // A reader of mask or bias values in shared memory, or of a bias in global memory.
  CUFLASH_DEVICE KeyLookUpReader look_up_reader(KeyLookUps& look_ups, const Score&, int, int, int) {
    return {look_ups, look_up_ring};
  }
  CUFLASH_DEVICE GlobalBias look_up_reader(NoLookUps&, const Score& score, int first_row,
                                           int first_key, int first) const {
    return {score, {first_row + first, first_key}};
  }

  // Products start in two ping-pong turns for each part: dk of the previous part with the scores of
  // this one, then dv with dp.
  CUFLASH_DEVICE void add_block(const Score& score, int first_row, int first_key, bool masked) {
    const Ring<2> ds_ring{ring.uses};
#pragma unroll
    for (int part = 0; part < Config::block_m / 64; ++part) {
      float s_acc[1][tiles][4], dp_acc[1][tiles][4];
      float2 lse[tiles], delta[ahead];
      const int first = 64 * part;
      start_scores(s_acc, ring, first);
      pingpong_signal();
      if (part == 0 && ds_is_staged) announce_ds();
      if constexpr (overlaps_more) read(lse, smem.lse, first);
      ptx::wgmma_wait<0>();
      ptx::pin(flat(s_acc));  // dk of the previous part has also read frag
      const KeptBits<1, tiles> kept = kept_pairs(score, first_row + first, first_key);
      if (part == 0) release_previous_block();
      auto look_up = look_up_reader(shared().look_ups, score, first_row, first_key, first);
      if constexpr (Score::hides_after_exponentials) {
        if constexpr (loads_bias) {
          compute_biased_p(s_acc, score, look_up, first_row, first_key, first);
        } else {
          if constexpr (!overlaps_more) read(lse, smem.lse, first);
          compute_p(s_acc, s_acc, lse, score, first_row, first_key, first);
        }
        hide_pairs(s_acc, score, first_row, first_key, masked, first);
        if constexpr (loads_mask) hide_masked(s_acc, look_up);
        to_kept_operand(s_acc, kept);
      } else if (Score::hides_pairs || loads_bias || warp_any(masked)) {
        // With a bias in shared memory, two copies of this code would take too many registers.
        compute_p_and_weights<true>(s_acc, kept, score, look_up, first_row, first_key, first);
      } else {
        compute_p_and_weights<false>(s_acc, kept, score, look_up, first_row, first_key, first);
      }
      pingpong_wait();
      start_dv(first);
      if (!dp_beside_p) {  // wait for dv, so that dp may take the registers of frag
        ptx::wgmma_wait<0>();
        ptx::pin(reinterpret_cast<uint32_t (&)[2 * tiles]>(frag));
      }
      start_dp(dp_acc, first);
      pingpong_signal();
      if constexpr (overlaps_more) {
        if (part == 0) wait(shared().ds_empty[ds_ring.stage()], ds_ring.empty_parity());
        read(delta, smem.delta, first);
      }
      ptx::wgmma_wait<0>();
      ptx::pin(flat(dp_acc));
      kept.drop_gradients(dp_acc, params.score);
      if constexpr (!overlaps_more) read(delta, smem.delta, first);
      compute_ds(s_acc, dp_acc, delta, first);
      to_operand(frag, s_acc);
      if (!overlaps_more && part == 0) {
        wait(shared().ds_empty[ds_ring.stage()], ds_ring.empty_parity());
      }
      stage_ds(part);
      pingpong_wait();
      start_dk(first);
    }
    ring.advance();
    if constexpr (overlaps_more) {
      ds_is_staged = true;
    } else {
      announce_ds();
    }
  }

  // Lets dq of the previous block be multiplied. The fence takes as long as a product of scores, so
  // it comes after their start, or when no block is left.
  CUFLASH_DEVICE void announce_ds() {
    ptx::fence_async_proxy();
    arrive_as_warp(shared().ds_full[(ring.uses - 1) % 2]);
    ds_is_staged = false;
  }

  // Sets the probabilities of pairs to 0 that the mask in shared memory hides.
  template <typename Shows>
  CUFLASH_DEVICE static void hide_masked(float (&p)[1][tiles][4], Shows& shows) {
    unrolled<tiles, 4>([&](int t, int i) {
      if (!shows(t, i / 2, i % 2)) p[0][t][i] = 0.0f;
    });
  }

  CUFLASH_DEVICE void pingpong_wait() const {
    ptx::named_barrier_sync(first_pingpong_barrier + warpgroup, 256);
  }
  CUFLASH_DEVICE void pingpong_signal() const {
    ptx::named_barrier_arrive(first_pingpong_barrier + 1 - warpgroup, 256);
  }

  // Stages this warpgroup's rows of ds^T (64 columns of the part) for the warpgroup of dq.
  CUFLASH_DEVICE void stage_ds(int part) const {
    const uint32_t thread = ptx::thread_index() - 128, lane = thread % 32;
    const uint32_t row = thread / 32 * 16 + lane % 16;
    const uint32_t lane_address = ptx::shared_address(shared().ds[ring.uses % 2].data[part]) +
                                  row * 128 + (((lane / 16) ^ (row & 7)) << 4);
#pragma unroll
    for (int i = 0; i < tiles / 2; ++i) {
      ptx::stmatrix_x4(lane_address ^ (i << 5), frag[0][i][0], frag[0][i][1], frag[0][i][2],
                       frag[0][i][3]);
    }
  }
};

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads, 1)
    cuflash_backward_sm90(const __grid_constant__ cuflash::BackwardSm90Params params) {
  using namespace cuflash;
  SharedMemory& smem = shared_memory<SharedMemory>();
  if (threadIdx.x == 0) init_barriers(smem);
  wait_for_delta();
  if (sequences_overlap(params.score)) return;
  __syncthreads();  // all mbarriers are initialised
  // Registers of each thread. Summed over all warpgroups they equal what the block got at launch.
  constexpr int producer_registers = 32, consumer_registers = 208, dq_registers = 64;
  const int warp = __shfl_sync(0xffffffff, warp_index(), 0);
  if (warp < 4) {
    ptx::setmaxnreg_dec<producer_registers>();
    if (warp == 0) Producer{params, smem}.run();
    if (warp == 1 || warp == 2) Writer{smem, warp - 1u}.run();
    if (looks_up && warp == 3) KeyLookUpLoader<SharedMemory>{params, smem}.run(smem.look_ups);
  } else if (warp < 4 + 4 * consumers) {
    ptx::setmaxnreg_inc<consumer_registers>();
    Consumer{{params, smem, warp / 4 - 1}}.run();
  } else {
    ptx::setmaxnreg_dec<dq_registers>();
    DqWarpgroup{params, smem}.run();
  }
}
