// The warpgroup of backward_sm90.cu that multiplies dq, and the warps that add it to the sums.
#pragma once

#include "sm90/bias_gradient.cuh"
#include "sm90/one_pass.cuh"

namespace cuflash {

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

}  // namespace cuflash
