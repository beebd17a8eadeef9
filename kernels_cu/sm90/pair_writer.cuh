// The warps of backward_pair_sm90.cu that wait for a tile's turn to add to dq, and until all can
// see the sums, so that the warpgroup that multiplies need not poll global memory.
#pragma once

#include "sm90/dq_writer.cuh"
#include "sm90/pair.cuh"

namespace cuflash {

// One addition of the tile to a block of queries of its owner's `index`-th entry.
struct Addition {
  DqAccum sums;
  DqSemaphore semaphore;
  int block;

  CUFLASH_DEVICE Addition(const BackwardSm90Params& params, const Work& work, int index, int block)
      : sums(params, work.keys.entry(params, index), work.sum(params)),
        semaphore(params, work.keys, index, work.sum(params), 2),
        block(block) {}

  CUFLASH_DEVICE int slices() const { return sums.slices(block, 0); }
  CUFLASH_DEVICE int place() const { return 2 * block + ptx::cluster_rank(); }  // index of its turn
};

// Adds staged columns to the sums. Of all blocks in turn, writer w adds block w and every second
// block after it.
struct Writer {
  const BackwardSm90Params& params;
  StagedDq& dq;
  const uint32_t writer;

  CUFLASH_DEVICE void run(const Work& work) const {
    Ring<writers> ring;
    walk_blocks(
        params, work,
        [&](const Score& score, int index, int block, bool) {
          if (ring.stage() == writer) {
            const int turn = work.turns(params, score).of(block);
            if (lane_index() == 0) write({params, work, index, block}, turn, ring.full_parity());
          }
          ring.advance();
        },
        [] {});
    // The thread block must not end before its stores are complete.
    if (lane_index() == 0) ptx::tma_store_wait();
  }

 private:
  CUFLASH_DEVICE void write(const Addition& own, int turn, uint32_t parity) const {
    wait(dq.full[writer], parity);
    add_in_turn(own.semaphore, own.place(), turn, [&] {
      const int slices = own.slices();
      const bool is_first = turn == 0;
#pragma unroll
      for (int i = 0; i < whole_panels; ++i) {
        start_adding(own.sums.part(own.block, first_whole_panel() + i), dq.whole(i, 0).value[0][0],
                     slices * DqSlice<8>::bytes, is_first);
      }
#pragma unroll 1
      for (int slice = 0; slice < (shares_middle ? slices : 0); ++slice) {
        auto& half =
            own.sums.slice<8>(own.block, whole_panels, slice).value[4 * ptx::cluster_rank()];
        start_adding(half[0], dq.middle(slice).value[0][0], DqSlice<4>::bytes, is_first);
      }
      ptx::tma_store_wait_read();
      arrive_if(dq.empty[writer], true);
    });
  }
};

// Tells the warpgroup that adds from registers when its turn has come, and passes the turn on.
struct SemaphoreWarp {
  const BackwardSm90Params& params;
  RegisterAddition& dq;

  CUFLASH_DEVICE void run(const Work& work) const {
    Ring<1> ring;
    walk_blocks(
        params, work,
        [&](const Score& score, int index, int block, bool) {
          const int turn = work.turns(params, score).of(block);
          if (lane_index() == 0) pass_turn({params, work, index, block}, turn, ring.full_parity());
          ring.advance();
        },
        [] {});
  }

 private:
  CUFLASH_DEVICE void pass_turn(const Addition& own, int turn, uint32_t parity) const {
    if (Config::deterministic || turn > 0) {
      own.semaphore.wait(own.place(), Config::deterministic ? turn : 1);
    }
    if constexpr (Score::has_segments) dq.is_first = turn == 0;
    arrive_if(dq.may_add, true);
    wait(dq.added, parity);
    if (Config::deterministic || turn == 0) own.semaphore.release(own.place(), turn);
  }
};

// Called by each warp of the first warpgroup that does not load, or by its first lane.
CUFLASH_DEVICE void run_dq_warps(const BackwardSm90Params& params, const Work& work, int warp,
                                 StagedDq& dq) {
  if (warp == 1 || warp == 2) Writer{params, dq, warp - 1u}.run(work);
}
CUFLASH_DEVICE void run_dq_warps(const BackwardSm90Params& params, const Work& work, int warp,
                                 RegisterAddition& dq) {
  if (warp == 1) SemaphoreWarp{params, dq}.run(work);
}

}  // namespace cuflash
