// Transposition of e4m3 v. 8-bit products sum only contiguous elements, and p v sums over keys.
#pragma once

#include "ptx/mma_sync.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/sync.cuh"
#include "schedule/segments.cuh"
#include "sm90/shared_memory.cuh"

namespace cuflash {

// Transposes 16 columns of a tile of v. Every 16 keys are stored in the order 0 1 8 9, 2 3 10 11,
// 4 5 12 13, 6 7 14 15. A lane holds the scores of four such keys in two accumulator tiles, which
// are thus its part of the other operand without an exchange. (D172)
struct Transposer {
  uint32_t from, to;  // offsets at which this lane reads and writes; the chunk is added by xor
  uint32_t first_selector, second_selector;

  CUFLASH_DEVICE Transposer() {
    const int lane = lane_index(), pair = lane % 8, kind = lane / 8 % 2;
    from = 128 * lane + 16 * (lane % 8);
    // One kind is the even columns of the first four pairs and the odd columns of the other four,
    // the other kind the rest. The eight rows of either kind then fall on all banks.
    const int column = 2 * pair + (kind ^ (pair >= 4));
    to = 128 * column + 16 * (column % 8 ^ lane / 16);
    first_selector = lane < 16 ? 0x6420 : 0x7531;  // even and odd bytes of two pairs
    second_selector = lane < 16 ? 0x7531 : 0x6420;
  }

  template <typename Rows, typename Columns>
  CUFLASH_DEVICE void run(const Rows& rows, Columns& columns, int part) const {
    const uint32_t read =
        ptx::shared_address(rows.data) + part / 8 * Rows::panel_bytes + (from ^ 16 * (part % 8));
    const uint32_t written = ptx::shared_address(columns.data) + 2048 * part;
#pragma unroll
    for (int i = 0; i < Rows::rows / 32; ++i) {
      uint32_t pairs[4];  // two columns by two keys, of every 8 keys
      ptx::ldmatrix_x4_trans(pairs, read + 4096 * i);
      ptx::stmatrix_x4(written + (to ^ 32 * i), __byte_perm(pairs[0], pairs[1], first_selector),
                       __byte_perm(pairs[0], pairs[1], second_selector),
                       __byte_perm(pairs[2], pairs[3], first_selector),
                       __byte_perm(pairs[2], pairs[3], second_selector));
    }
  }
};

// Transposes v of every visited block. Called by `transposers` warps, with `warp` from 0 on.
CUFLASH_DEVICE void transpose_values(const ForwardSm90Params& params, SharedMemory& smem,
                                     int warp) {
  Ring<Config::num_stages> ring;
  const Transposer transposer;
#pragma unroll 1
  for (uint32_t tiles = 0;; ++tiles) {
    const Work work = receive_work(smem, Ring<2>{tiles});
    if (work.first_row < 0) return;
    const Score score(params.score, work.entry);
    const Range rows{work.first_row, work.first_row + Config::block_m};
    const BlockRanges blocks = score.kv_blocks(rows.begin, rows.end);
    VisitedBlocks<Walk::keys> visited(score, blocks, rows);
    int block = visited.last_from(blocks.end - 1);
#pragma unroll 1
    for (; warp_any(block >= blocks.begin); block = visited.next_before(block)) {
      const int stage = ring.stage();
      wait(smem.untransposed.v_full[stage], ring.full_parity());
      wait(smem.v_empty[stage], ring.empty_parity());
      __syncwarp();
#pragma unroll 1
      for (int part = warp; part < Config::head_dim_v / 16; part += transposers) {
        transposer.run(smem.untransposed.v[stage], smem.v[stage], part);
      }
      ptx::fence_async_proxy();  // products will read what these lanes wrote
      arrive_as_warp(smem.v_full[stage]);
      arrive_as_warp(smem.untransposed.v_empty[stage]);
      ring.advance();
    }
  }
}

}  // namespace cuflash
