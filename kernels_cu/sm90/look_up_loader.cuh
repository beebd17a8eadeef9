// The warps that copy mask or bias values for the rows of one consumer: see sm90/look_ups.cuh.
#pragma once

#include "sm90/consumer_schedule.cuh"

namespace cuflash {

struct LookUpLoader {
  const ForwardSm90Params& params;
  const int warpgroup;
  Ring<look_up_stages> ring;

  // Copies the blocks that the consumer visits, for all tiles of this thread block.
  template <typename Memory>
  CUFLASH_DEVICE void run(Memory& smem) {
#pragma unroll 1
    for (Ring<2> work_ring;; work_ring.advance()) {
      const Work work = receive_work(smem, work_ring);
      if (work.first_row < 0) break;
      const Score score(params.score, work.entry);
      const ConsumerRows rows(score, work, warpgroup);
      if constexpr (looks_up) copy_rows(smem, score, rows);
    }
  }

 private:
  template <typename Memory>
  CUFLASH_DEVICE void copy_rows(Memory& smem, const Score& score, const ConsumerRows& rows) {
    using Copy = LookUpCopy<64>;
    const int first_row = rows.first_row + Copy::own_row();
    const int64_t row_stride = look_up_row_stride(score.params);
    const auto* first = look_up_values(score) + first_row * row_stride + Copy::own_key();
#pragma unroll 1
    for (int block = rows.own.end - 1; block >= rows.own.begin; --block, ring.advance()) {
      const int stage = ring.stage(), first_key = block * Config::block_n;
      wait(smem.look_ups.empty[warpgroup][stage], ring.empty_parity());
      Copy::start(smem.look_ups.block[warpgroup][stage], first + first_key, row_stride,
                  score.seqlen.q - first_row, score.seqlen.k - first_key - Copy::own_key(),
                  smem.look_ups.full[warpgroup][stage]);
    }
  }
};

}  // namespace cuflash
