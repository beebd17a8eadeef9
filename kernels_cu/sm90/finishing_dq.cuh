// The warpgroup of dq where the tile that adds last to a block of queries stores its dq
// (Config::finishes_dq): backward_convert.cu need not read the sums again.
//
// For the last addition to a block, a writer loads the sums of the tiles before to the memory where
// this tile would stage its own part. The warpgroup adds its part, scales and rounds the result,
// writes it to the same memory, and stores it by TMA. It requests sums before it needs them: of
// part 1 of a block when part 0 is multiplied, of part 0 of the next block when part 1 is. Blocks
// are visited from the last to the first, so the blocks to which a tile adds last come last.
#pragma once

#include "ptx/load_global.cuh"
#include "ptx/stmatrix.cuh"
#include "sm90/dq_warpgroup.cuh"

namespace cuflash {

struct FinishingDqWarpgroup : DqWarpgroup<FinishingDqWarpgroup> {
  static constexpr int barrier = 3;  // named barrier, after those of the consumers

  // A batch entry of a tile, and the blocks to which the tile adds last.
  struct Entry {
    const KeyTile& work;
    const int index;
    const int begin, end;

    CUFLASH_DEVICE Entry(const Score& score, Range keys, const BlockRanges& blocks,
                         const KeyTile& work, int index)
        : work(work),
          index(index),
          begin(blocks.begin),
          end(min(end_of_last_additions(score, keys), blocks.end)) {}
  };

  template <typename AdditionTo>
  CUFLASH_DEVICE void multiply_block(const Entry& own, int block,
                                     const AdditionTo& addition_to) const {
    const bool finishes = block < own.end;
    if (block + 1 >= own.end) {  // else it was described during the block before
      describe(own, addition_to(block), ring.stage());
      if (finishes) request_sums(0, ring.stage());
    }
    wait(smem.ds_full[ring.stage()], ring.full_parity());
    static_assert(DqAccum::parts == 2, "both parts are multiplied below");
    const auto multiply = [&](int part, auto& acc) {
      const bool continues = finishes && part == 1 && block > own.begin;
      if (continues) describe(own, addition_to(block - 1), ring.stage() ^ 1);
      add_or_finish(acc, part, finishes, continues);
    };
    float acc[1][DqAccum::tiles(0)][4];
    if constexpr (DqAccum::tiles(0) == DqAccum::tiles(1)) {
#pragma unroll 1
      for (int part = 0; part < 2; ++part) multiply(part, acc);  // unrolled, registers would spill
    } else {
      multiply(0, acc);
      float last_acc[1][DqAccum::tiles(1)][4];
      multiply(1, last_acc);
    }
  }

  CUFLASH_DEVICE void end_entry() const {
    wait_for_stores();
    __syncwarp();
  }

  // Waits until all warps have read the last addition, which may then be overwritten.
  CUFLASH_DEVICE void end() const { ptx::named_barrier_sync(barrier, 128); }

 private:
  // Overwrites the addition of two blocks before. The writer has read it, and so have all warps of
  // this warpgroup: a product of the block before is done, which they start after that. Nothing of
  // the addition is kept in registers.
  CUFLASH_DEVICE void describe(const Entry& own, const Addition& addition, int stage) const {
    Finish finish{addition.block < own.end};
    if (finish.wanted) {
      const BatchIndex entry = own.work.entry(params, ptx::opaque_value(own.index));
      map_coordinates(finish.batch, entry, params.dq_layout);
    }
    if (!leads_warpgroup()) return;
    smem.addition[stage] = addition;
    smem.finish[stage] = finish;
  }

  CUFLASH_DEVICE void request_sums(int part, int stage) const {
    wait_for_staging(part);
    let_load(part, stage);
  }
  CUFLASH_DEVICE void let_load(int part, int stage) const {
    wait_for_stores();
    arrive_as_warp(smem.dq_full[stage][part]);
  }

  // Waits until TMA has read what this warp wrote for it.
  CUFLASH_DEVICE void wait_for_stores() const {
    if (ptx::thread_index() % 32 == 0) ptx::tma_store_wait_read();
  }

  template <int tiles>
  CUFLASH_DEVICE void add_or_finish(float (&acc)[1][tiles][4], int part, bool finishes,
                                    bool continues) const {
    // Hidden from the compiler, which would keep descriptors of both parts in registers.
    const int stage = ptx::opaque_value(ring.stage());
    multiply_part(acc, part, stage);
    if (finishes) {
      if (part == 0) request_sums(1, ring.stage());
      if (continues) let_load(0, ring.stage() ^ 1);
      finish_part(acc[0], part);
    } else {
      wait_for_staging(part);
      stage_part(acc, part, stage);
    }
  }

  // Adds the sums of the tiles before to this warp's slice, and stores it as dq. Rows that are not
  // finite are noted in place of the sums.
  template <int tiles>
  CUFLASH_DEVICE void finish_part(float (&acc)[tiles][4], int part) const {
    const int thread = ptx::thread_index() % 128, slice = thread / 32, lane = thread % 32;
    auto& staged = reinterpret_cast<DqSlice<tiles>*>(smem.dq + DqAccum::begin(part))[slice];
    wait(smem.dq_empty[ring.stage()][part], ring.full_parity());
    const Addition& own = smem.addition[ring.stage()];
    if (own.turn > 0) staged.add_staged_to(acc, lane);
    unrolled<tiles, 4>([&](int t, int i) { acc[t][i] += 0.0f; });  // no key contributes: +0
    const uint32_t non_finite = non_finite_rows(acc);
    __syncwarp();  // all lanes have read the sums
    write_rows(&staged, acc);
    ptx::fence_async_proxy();
    __syncwarp();
    const int first_row = own.block * Config::block_m + part % DqAccum::row_parts * 64 + slice * 16;
    if (lane == 0) {
      ptx::tma_store(params.dq_map, ptx::shared_address(&staged), part / DqAccum::row_parts * 64,
                     first_row, smem.finish[ring.stage()].batch);
      ptx::tma_store_commit();
    }
    if (slice >= own.sums.slices(own.block, part)) return;
    auto& sums = own.sums.template slice<tiles>(own.block, part, slice);
    if (own.turn > 0) sums.discard(lane);
    const int num_rows = min(own.sums.num_rows - first_row, 16);
    if (lane == 0) sums.non_finite_rows() = non_finite & ((1u << num_rows) - 1);
  }

  // Writes a slice as TMA stores it: scaled and rounded, 128 bytes a row, with L2 swizzle.
  template <int tiles>
  CUFLASH_DEVICE void write_rows(void* to, const float (&acc)[tiles][4]) const {
    const uint32_t lane = ptx::thread_index() % 32, row = lane % 16;
    const uint32_t lane_address =
        ptx::shared_address(to) + row * 128 + (((lane / 16) ^ (row & 7)) << 4);
    const auto packed = [&](int t, int half) {
      return pack<Config::dtype>(acc[t][2 * half] * params.score.scale,
                                 acc[t][2 * half + 1] * params.score.scale);
    };
#pragma unroll
    for (int t = 0; t < tiles; t += 2) {
      ptx::stmatrix_x4(lane_address ^ (t << 4), packed(t, 0), packed(t, 1), packed(t + 1, 0),
                       packed(t + 1, 1));
    }
  }
};

}  // namespace cuflash
