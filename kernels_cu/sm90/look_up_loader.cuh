// The warps that bring what a mask or a bias holds for the rows of one warpgroup:
// sm90/look_ups.cuh.
#pragma once

#include "ptx/cp_async.cuh"
#include "sm90/consumer_schedule.cuh"

namespace cuflash {

struct LookUpLoader {
  const ForwardSm90Params& params;
  const int warpgroup;
  Ring<look_up_stages> ring;

  // All tiles of this thread block, and of each the blocks that the warpgroup walks.
  template <typename Memory>
  CUFLASH_DEVICE void run(Memory& smem) {
#pragma unroll 1
    for (Ring<2> work_ring;; work_ring.advance()) {
      const Work work = receive_work(smem, work_ring);
      if (work.first_row < 0) break;
      const Score score(params.score, work.entry);
      const ConsumerRows rows(score, work, warpgroup);
      const ScoreParams& own = params.score;
      if constexpr (loads_mask) {
        copy_rows(smem, score, rows, own.mask + score.mask_offset, own.mask_layout.row);
      } else if constexpr (loads_bias) {
        copy_rows(smem, score, rows, score.first_bias(), own.bias_layout.row);
      }
    }
  }

 private:
  // Of a bias whole chunks are copied, of a mask the bytes that exist. Lanes that are neighbours
  // have chunks that are.
  template <typename Memory, typename Value>
  CUFLASH_DEVICE void copy_rows(Memory& smem, const Score& score, const ConsumerRows& rows,
                                const Value* first, int64_t row_stride) {
    constexpr int chunks = LookedUp::row_bytes / 16, lanes = chunks < 32 ? chunks : 32;
    constexpr int step = 32 / lanes;  // rows that a warp copies at once
    const int lane = lane_index(), chunk = lane % lanes, own_row = lane / lanes;
    const int first_row = rows.first_row + own_row, num_rows = score.seqlen.q - first_row;
    first += first_row * row_stride + chunk * LookedUp::per_chunk;
#pragma unroll 1
    for (int block = rows.own.end - 1; block >= rows.own.begin; --block, ring.advance()) {
      const int stage = ring.stage();
      const int key = block * Config::block_n + chunk * LookedUp::per_chunk;
      const int keys = min(max(score.seqlen.k - key, 0), LookedUp::per_chunk);
      const int existing = loads_mask || keys == 0 ? keys : 16;  // bytes
      const uint32_t to = ptx::shared_address(smem.look_ups.block[warpgroup][stage].rows);
      const Value* from = first + block * Config::block_n;
      wait(smem.look_ups.empty[warpgroup][stage], ring.empty_parity());
#pragma unroll 4
      for (int row = 0; row < 64; row += step, from += step * row_stride) {
        ptx::cp_async_some(to + LookedUp::place(own_row + row, chunk), from,
                           row < num_rows ? existing : 0);
      }
      ptx::mbarrier_arrive_after_copies(ptx::shared_address(&smem.look_ups.full[warpgroup][stage]));
      __syncwarp();  // no lane may be left two phases behind in a wait
    }
  }
};

}  // namespace cuflash
