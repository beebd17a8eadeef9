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
// come the consumers, which own keys. The last warpgroup multiplies dq, and where tiles are few
// also finishes it (sm90/finishing_dq.cuh). The next tile is loaded while dk and dv are stored.
// Barriers: sm90/one_pass.cuh. (D22)
//
// Ping-pong: named barriers pass the right to start products between the two consumers, so that one
// computes exponentials and ds while the products of the other run.
#include "ptx/stmatrix.cuh"
#include "sm90/dkv_parts.cuh"
#include "sm90/finishing_dq.cuh"
#include "sm90/one_pass.cuh"

namespace cuflash {

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
    cuflash_backward_sm90(const __grid_constant__ cuflash::BackwardOnePassParams params) {
  using namespace cuflash;
  SharedMemory& smem = shared_memory<SharedMemory>();
  if (threadIdx.x == 0) init_barriers(smem);
  wait_for_delta();
  if (sequences_overlap(params.score)) return;
  __syncthreads();  // all mbarriers are initialised
  // Registers of each thread. Summed over all warpgroups they equal what the block got at launch.
  constexpr int producer_registers = Config::finishes_dq ? 24 : 32;
  constexpr int consumer_registers = Config::finishes_dq && Config::head_dim <= 96 ? 200 : 208;
  constexpr int dq_registers = 512 - producer_registers - 2 * consumer_registers;
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
    If<Config::finishes_dq, FinishingDqWarpgroup, AddingDqWarpgroup>{{params, smem}}.run();
  }
}
