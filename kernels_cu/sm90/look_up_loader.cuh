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
      if constexpr (loads_mask) {
        bring_bits(smem, score, rows);
      } else if constexpr (loads_bias) {
        bring_values(smem, score, rows);
      }
    }
  }

 private:
  // Lanes that are neighbours have chunks of 16 bytes that are.
  template <typename Memory>
  CUFLASH_DEVICE void bring_values(Memory& smem, const Score& score, const ConsumerRows& rows) {
    constexpr int chunks = BiasValues::row_bytes / 16, lanes = chunks < 32 ? chunks : 32;
    constexpr int step = 32 / lanes;  // rows that a warp copies at once
    const int lane = lane_index(), chunk = lane % lanes, own_row = lane / lanes;
    const int64_t row_stride = params.score.bias_layout.row;
    const int first_row = rows.first_row + own_row, num_rows = score.seqlen.q - first_row;
    const auto* first = score.first_bias() + first_row * row_stride + chunk * BiasValues::per_chunk;
#pragma unroll 1
    for (int block = rows.own.end - 1; block >= rows.own.begin; --block, ring.advance()) {
      const int stage = ring.stage();
      const int key = block * Config::block_n + chunk * BiasValues::per_chunk;
      const int existing = key < score.seqlen.k ? num_rows : 0;
      const uint32_t to = ptx::shared_address(smem.look_ups.block[warpgroup][stage].rows);
      const auto* from = first + block * Config::block_n;
      wait(smem.look_ups.empty[warpgroup][stage], ring.empty_parity());
#pragma unroll 4
      for (int row = 0; row < 64; row += step, from += step * row_stride) {
        ptx::cp_async<16>(to + BiasValues::place(own_row + row, chunk), from, row < existing);
      }
      ptx::mbarrier_arrive_after_copies(ptx::shared_address(&smem.look_ups.full[warpgroup][stage]));
      __syncwarp();  // no lane may be left two phases behind in a wait
    }
  }

  // Bytes come so many parts ahead of the one that becomes bits.
  template <typename Memory>
  CUFLASH_DEVICE void bring_bits(Memory& smem, const Score& score, const ConsumerRows& rows) {
    const int num_parts = (rows.own.end - rows.own.begin) * MaskBytes::parts;
#pragma unroll 1
    for (int part = 0; part < num_parts + MaskBytes::ahead; ++part) {
      if (part < num_parts) copy_part(smem, score, rows, part);
      ptx::cp_async_commit();
      if (part < MaskBytes::ahead) continue;
      ptx::cp_async_wait<MaskBytes::ahead>();
      __syncwarp();  // what every lane copied is there
      pack_part(smem, part - MaskBytes::ahead);
      __syncwarp();  // all have read it
    }
  }

  template <typename Memory>
  CUFLASH_DEVICE void copy_part(Memory& smem, const Score& score, const ConsumerRows& rows,
                                int part) const {
    constexpr int chunks = MaskBytes::row_chunks;
    const int lane = lane_index(), chunk = lane % chunks;
    const int own_part = part % MaskBytes::parts;
    const int key = (rows.own.end - 1 - part / MaskBytes::parts) * Config::block_n + 16 * chunk;
    const int existing = min(max(score.seqlen.k - key, 0), 16);
    const int first_row = rows.first_row + own_part * MaskBytes::rows;
#pragma unroll
    for (int row = lane / chunks; row < MaskBytes::rows; row += 32 / chunks) {
      const int q_idx = min(first_row + row, score.seqlen.q - 1);
      ptx::cp_async_some(
          ptx::shared_address(&smem.mask_bytes[warpgroup].of_part[own_part][row][chunk]),
          params.score.mask + score.mask_offset + q_idx * params.score.mask_layout.row + key,
          existing);
    }
  }

  // A quad has a row, each of its lanes 32 columns of it.
  template <typename Memory>
  CUFLASH_DEVICE void pack_part(Memory& smem, int part) {
    const int lane = lane_index(), stage = ring.stage(), own_part = part % MaskBytes::parts;
    if (own_part == 0) wait(smem.look_ups.empty[warpgroup][stage], ring.empty_parity());
    constexpr int words = MaskBytes::row_chunks / 2;
    auto& bits = smem.look_ups.block[warpgroup][stage].of_lane;
#pragma unroll
    for (int row = lane / 4; row < MaskBytes::rows; row += 8) {
      uint32_t word = 0;
      if (words == 4 || lane % 4 < words) {
        const uint4* from = smem.mask_bytes[warpgroup].of_part[own_part][row] + 2 * (lane % 4);
        word = nonzero_bytes(from[0]) | nonzero_bytes(from[1]) << 16;
      }
      bits[own_part * MaskBytes::rows + row][lane % 4] = columns_of_lane<words>(word);
    }
    if (own_part == MaskBytes::parts - 1) {
      arrive_as_warp(smem.look_ups.full[warpgroup][stage]);
      ring.advance();
    }
  }
};

}  // namespace cuflash
