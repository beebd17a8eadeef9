// A consumer: which blocks of keys its 64 rows visit, in which order and with which mask.
#pragma once

#include "sm90/out_warpgroup.cuh"
#include "sm90/outward_blocks.cuh"

namespace cuflash {

struct Consumer : OutWarpgroup {
  // Computes all tiles of this thread block.
  CUFLASH_DEVICE void run() {
    if (uses_pingpong && warpgroup == consumers - 1) {
      ptx::named_barrier_arrive(first_pingpong_barrier, 256);
    }
#pragma unroll 1
    for (;; q_ring.advance()) {
      const Work work = receive_work(smem, Ring<2>{q_ring.uses});
      if (work.first_row < 0) return;
      const Score score(params.score, work.entry, KeyPart::of_thread_block(params).keys);
      const ConsumerRows rows(score, work, warpgroup);
      if constexpr (Score::has_segments) {
        attend_segments(score, rows, work);
      } else if constexpr (Score::goes_outwards) {
        attend_outwards(score, rows, work);
      } else {
        attend(score, rows, work.entry);
      }
      FinishedRows{params, smem, warpgroup, softmax, o_acc}.write(work, score, q_ring.stage());
    }
  }

 private:
  // Every warpgroup takes one ping-pong turn for each block of the tile, even if its rows do not
  // see the block.
  CUFLASH_DEVICE void attend(const Score& score, const ConsumerRows& rows,
                             const BatchIndex& entry) {
    const BlockRanges& own = rows.own;
    if constexpr (Score::multiplies_slopes) write_slopes(score);
    softmax = SplitSoftmax();
    clear(o_acc);
    wait(smem.q_full[q_ring.stage()], q_ring.full_parity());
    int block = rows.tile.end - 1;
#pragma unroll 1
    for (; block >= own.end; --block) skip_block();
    if (own.begin < own.end) {
      const bool masked = own.masked(block), is_last = block == own.begin;
      if (halves_last && rows.half_last) {
        constexpr Keys seen = halves_last ? Keys::lower_half : Keys::all;
        attend_first_block<seen>(score, rows, block, masked, is_last);
      } else {
        attend_first_block<Keys::all>(score, rows, block, masked, is_last);
      }
      --block;
      if constexpr (Score::masks_before_full) {
        if (!own.has_full()) {
#pragma unroll 1
          for (; block >= own.begin; --block) {
            attend_block<Edge::both>(score, rows, block, block == own.begin);
          }
        }
      }
      if constexpr (Score::masks_before_last) {
#pragma unroll 1
        for (; block >= own.full_end; --block) {
          attend_block<Edge::last>(score, rows, block, block == own.begin);
        }
      }
#pragma unroll 1
      for (; block >= own.full_begin; --block) {
        const int first_key = block * Config::block_n;
        const Range own_rows{rows.first_row, rows.first_row + 64};
        const Range keys{first_key, first_key + Config::block_n};
        const bool crosses_diagonal =
            score.crosses_diagonal(own_rows, keys) || score.is_steep(own_rows, keys);
        if (keeps_reference && !(may_cross_diagonal && warp_any(crosses_diagonal))) {
          attend_full_block(score, rows, entry, block, block == own.begin);
        } else if constexpr (!keeps_reference || may_cross_diagonal) {
          attend_block<Edge::none>(score, rows, block, block == own.begin);
        }
      }
      if constexpr (Score::masks_before_full) {
#pragma unroll 1
        for (; block >= own.begin + rows.half_first; --block) {
          attend_block<Edge::first>(score, rows, block, block == own.begin);
        }
      }
      if (halves_first && rows.half_first && block == own.begin) {
        constexpr Keys seen = halves_first ? Keys::upper_half : Keys::all;
        attend_block<Edge::first, seen>(score, rows, block--, true);
        multiply_last_pv<seen>();
      } else {
        multiply_last_pv<Keys::all>();
      }
    } else {
      release_unread_q();
    }
#pragma unroll 1
    for (; block >= rows.tile.begin; --block) skip_block();
  }

  // attend() with segments, which leave out blocks of the tile. All its rows visit the same blocks.
  CUFLASH_DEVICE void attend_segments(const Score& score, const ConsumerRows& rows,
                                      const Work& work) {
    const BlockRanges& blocks = rows.tile;
    VisitedBlocks<Walk::keys> visited(score, blocks,
                                      {work.first_row, work.first_row + Config::block_m});
    softmax = SplitSoftmax();
    clear(o_acc);
    wait(smem.q_full[q_ring.stage()], q_ring.full_parity());
    int block = visited.last_from(blocks.end - 1);
    if (warp_any(block < blocks.begin)) return release_unread_q();
    bool masked = visited.masked(block);
    int next = visited.next_before(block);
    attend_first_block<Keys::all>(score, rows, block, masked, next < blocks.begin);
#pragma unroll 1
    while (warp_any(next >= blocks.begin)) {
      block = next;
      masked = visited.masked(block);
      next = visited.next_before(block);
      if (warp_any(masked)) {
        attend_block<Edge::both>(score, rows, block, next < blocks.begin);
      } else {
        attend_block<Edge::none>(score, rows, block, next < blocks.begin);
      }
    }
    multiply_last_pv<Keys::all>();
  }

  // The same under slopes without bounds, where these rows see all blocks of the tile, or none.
  CUFLASH_DEVICE void attend_outwards(const Score& score, const ConsumerRows& rows,
                                      const Work& work) {
    const BlockRanges& blocks = rows.tile;
    const Range own_rows{rows.first_row, rows.first_row + 64};
    const OutwardBlocks visited(score, blocks, {work.first_row, work.first_row + Config::block_m});
    write_slopes(score);
    softmax = SplitSoftmax();
    clear(o_acc);
    wait(smem.q_full[q_ring.stage()], q_ring.full_parity());
    int block = visited.start;
    if (rows.own.begin >= rows.own.end) {
      release_unread_q();
#pragma unroll 1
      for (; block >= blocks.begin; block = visited.next_before(block)) skip_block();
      return;
    }
    int next = visited.next_before(block);
    attend_first_block<Keys::all>(score, rows, block, blocks.masked(block), next < blocks.begin);
#pragma unroll 1
    while (warp_any(next >= blocks.begin)) {
      block = next;
      next = visited.next_before(block);
      const bool is_last = next < blocks.begin;
      const Range keys{block * Config::block_n, (block + 1) * Config::block_n};
      if (warp_any(blocks.masked(block))) {
        attend_block<Edge::last>(score, rows, block, is_last);
      } else if (warp_any(score.crosses_diagonal(own_rows, keys) ||
                          score.is_steep(own_rows, keys))) {
        attend_block<Edge::none>(score, rows, block, is_last);
      } else {
        attend_full_block(score, rows, work.entry, block, is_last);
      }
    }
    multiply_last_pv<Keys::all>();
  }
};

}  // namespace cuflash
