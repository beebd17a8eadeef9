// The warpgroup of backward_sm90.cu that multiplies dq, and the warps that add it to the sums.
// sm90/finishing_dq.cuh has another form of the warpgroup.
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
    if (Config::finishes_dq && smem.finish[writer].wanted) return load_sums(own, parity);
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
    start_adding(own.sums.part(own.block, part), &smem.dq[DqAccum::begin(part)],
                 own.sums.part_bytes(own.block, part), own.turn == 0);
  }

  // Loads the sums of the tiles before, which the warpgroup of dq has requested.
  CUFLASH_DEVICE void load_sums(const Addition& own, uint32_t parity) const {
    if (own.turn > 0) {
      own.semaphore.wait(own.block, own.turn);
      ptx::fence_async_proxy_global();
    }
#pragma unroll
    for (int part = 0; part < DqAccum::parts; ++part) {
      wait(smem.dq_full[writer][part], parity);
      const uint32_t barrier = ptx::shared_address(&smem.dq_empty[writer][part]);
      const int bytes = own.turn > 0 ? own.sums.part_bytes(own.block, part) : 0;
      ptx::mbarrier_arrive_expect(barrier, bytes);
      if (bytes == 0) continue;
      ptx::bulk_load(ptx::shared_address(&smem.dq[DqAccum::begin(part)]),
                     own.sums.part(own.block, part), bytes, barrier);
    }
  }
};

// ---------------------------------------------------------------------------- the warpgroup of dq
// What both forms share. `Own` is AddingDqWarpgroup, or FinishingDqWarpgroup.
template <typename Own>
struct DqWarpgroup {
  const BackwardOnePassParams& params;
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
    static_cast<Own*>(this)->end();
#pragma unroll 1
    for (int i = 0; i < writers; ++i, ring.advance()) {
      if (leads_warpgroup()) smem.addition[ring.stage()].turn = -1;
      arrive_as_warp(smem.dq_full[ring.stage()][0]);
    }
  }

 protected:
  // Computed anew for each block, so that its address occupies no registers.
  CUFLASH_DEVICE BiasGradient gradient(const KeyTile& work, int index) const {
    return {params, work.entry(params, index)};
  }

  template <int tiles>
  CUFLASH_DEVICE void multiply_part(float (&acc)[1][tiles][4], int part, int stage) const {
    start_panel_product<SharedMemory::DsTile, SharedMemory::KTile>(
        acc, smem.ds[stage].mn_major(0, part % DqAccum::row_parts),
        smem.k.mn_major(0, part / DqAccum::row_parts));
    ptx::wgmma_wait<0>();
    ptx::pin(flat(acc));
    // Only parts that finish dq are a loop. Others are unrolled, and is_last is then a constant.
    const bool is_last = part == DqAccum::parts - 1;
    if (!Config::grad_bias && (Config::finishes_dq || is_last)) {
      arrive_if(smem.ds_empty[stage], leads_warpgroup() && is_last);
    }
  }

  // Stages a part, which the writer then adds to the sums.
  template <int tiles>
  CUFLASH_DEVICE void stage_part(const float (&acc)[1][tiles][4], int part, int stage) const {
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
      const typename Own::Entry own(score, keys, blocks, work, index);
      LastRowsFirst walk(score, blocks, keys);
#pragma unroll 1
      for (int block = walk.first(); walk.in_range(block); block = walk.next(block)) {
        static_cast<Own*>(this)->multiply_block(
            own, block, [&](int of) { return Addition{sums, semaphore, of, turns.of(of)}; });
        if constexpr (Config::grad_bias) {
          gradient(work, index).store(smem.ds[ring.stage()], block, work.first_key);
          arrive_as_readers(smem.ds_empty[ring.stage()], true);
        }
        ring.advance();
      }
      static_cast<Own*>(this)->end_entry();
      if constexpr (Config::grad_bias) gradient(work, index).clear_unseen(work, blocks);
    }
  }
};

// Adds every block to the sums.
struct AddingDqWarpgroup : DqWarpgroup<AddingDqWarpgroup> {
  struct Entry {
    CUFLASH_DEVICE Entry(const Score&, Range, const BlockRanges&, const KeyTile&, int) {}
  };

  template <typename AdditionTo>
  CUFLASH_DEVICE void multiply_block(const Entry&, int block, const AdditionTo& addition_to) const {
    const Addition addition = addition_to(block);
    wait(smem.ds_full[ring.stage()], ring.full_parity());
    static_assert(DqAccum::parts == 2, "both parts are multiplied below");
    add_part<DqAccum::tiles(0)>(0, addition);
    add_part<DqAccum::tiles(1)>(1, addition);
  }
  CUFLASH_DEVICE void end_entry() const {}
  CUFLASH_DEVICE void end() const {}

 private:
  template <int tiles>
  CUFLASH_DEVICE void add_part(int part, const Addition& addition) const {
    float acc[1][tiles][4];
    const int stage = ring.stage();
    multiply_part(acc, part, stage);
    wait_for_staging(part);
    if (part == 0 && leads_warpgroup()) smem.addition[stage] = addition;
    stage_part(acc, part, stage);
  }
};

}  // namespace cuflash
