// A warpgroup that computes: 64 rows of out, from scores to the sum over their keys.
#pragma once

#include "params.cuh"
#include "ptx/sync.cuh"
#include "sm90/shared_memory.cuh"
#include "sm90/softmax.cuh"
#include "sm90/store.cuh"

namespace cuflash {

struct Consumer {
  static constexpr int s_tiles = Config::block_n / 8;

  const ForwardSm90Params& params;
  SharedMemory& smem;
  const int warpgroup;                // of the consumers
  Ring<Config::num_stages> ring;      // of k and v; at the block whose p v is pending, or the next
  Ring<Config::num_q_stages> q_ring;  // counts tiles
  SplitSoftmax softmax;
  float o_acc[1][o_tiles][4];
  uint32_t p_frag[1][s_tiles / 2][4];

  // All tiles of this block of threads.
  __device__ __forceinline__ void run() {
    if (warpgroup == consumers - 1) ptx::named_barrier_arrive(first_turn, 256);
#pragma unroll 1
    for (;; q_ring.advance()) {
      const Work work = receive_work(smem, Ring<2>{q_ring.uses});
      if (work.first_row < 0) return;
      const Score score(params.score, work.entry);
      attend(work, score);
      finish(work, score);
    }
  }

 private:
  // Every warpgroup takes a turn for each block of the tile but the last, whether or not its own
  // rows see it.
  __device__ __forceinline__ void attend(const Work& work, const Score& score) {
    const BlockRanges tile = score.kv_blocks(work.first_row, work.first_row + Config::block_m);
    const int first_row = work.first_row + 64 * warpgroup;
    const BlockRanges own = score.kv_blocks(first_row, first_row + 64);
    softmax = SplitSoftmax();
    clear(o_acc);
    int block = tile.end - 1;
    wait(smem.q_full[q_ring.stage()], q_ring.full_parity());
#pragma unroll 1
    for (; block >= max(own.end, tile.begin); --block) skip_block(block > tile.begin);
    if (own.begin < own.end) {
      first_block(score, first_row, block, own.masked(block));
      --block;
      if constexpr (Score::masks_before_last) {
#pragma unroll 1
        for (; block >= own.full_end; --block) next_block<true>(score, first_row, block);
      }
#pragma unroll 1
      for (; block >= own.full_begin; --block) next_block<false>(score, first_row, block);
      if constexpr (Score::masks_before_full) {
#pragma unroll 1
        for (; block >= own.begin; --block) next_block<true>(score, first_row, block);
      }
      last_product();
    }
#pragma unroll 1
    for (; block >= tile.begin; --block) skip_block(true);
    if constexpr (!stages_out) arrive_as_warp(smem.q_empty[q_ring.stage()]);
  }

  // s of the last block that these rows see.
  __device__ __forceinline__ void first_block(const Score& score, int first_row, int block,
                                              bool masked) {
    float s_acc[1][s_tiles][4];
    wait(smem.k_full[ring.stage()], ring.full_parity());
    start_scores(s_acc);
    ptx::wgmma_wait<0>();
    ptx::pin(flat(s_acc));
    arrive_if(smem.k_empty[ring.stage()], leads());
    if (masked) {
      apply_score<true>(s_acc, score, first_row, block * Config::block_n);
    } else {
      apply_score<false>(s_acc, score, first_row, block * Config::block_n);
    }
    softmax.find_maximum(s_acc, score);
    softmax.exponentiate<0, s_tiles>(s_acc, score);
    softmax.add_block();
    to_operand(p_frag, s_acc);
  }

  // q k^T of this block, p v of the block before, softmax of this block under that p v.
  template <bool masked>
  __device__ __forceinline__ void next_block(const Score& score, int first_row, int block) {
    float s_acc[1][s_tiles][4];
    const Ring<Config::num_stages> before = ring;
    ring.advance();
    wait(smem.k_full[ring.stage()], ring.full_parity());
    take_turn();
    start_scores(s_acc);
    start_product_with(before);
    pass_turn();
    ptx::wgmma_wait<(Config::overlap_quarters > 0)>();
    ptx::pin(flat(s_acc));
    arrive_if(smem.k_empty[ring.stage()], leads());
    apply_score<masked>(s_acc, score, first_row, block * Config::block_n);
    softmax.find_maximum(s_acc, score);
    // Nothing ties exponentials to the wait for p v, and ptxas would move it above most of them. An
    // arrive that never happens, because no sum has these bits, needs the first of them done.
    constexpr int tied = s_tiles * Config::overlap_quarters / 4;
    softmax.exponentiate<0, tied>(s_acc, score);
    if constexpr (tied > 0) {
      const float sum = softmax.block_sum[0] + softmax.block_sum[1];
      arrive_if(smem.never, __float_as_uint(sum) == 0xffffffffu);
    }
    softmax.exponentiate<tied, s_tiles>(s_acc, score);
    softmax.add_block();
    ptx::wgmma_wait<0>();
    ptx::pin(flat(o_acc));
    arrive_if(smem.v_empty[before.stage()], leads());
    to_operand(p_frag, s_acc);
    softmax.rescale_rows(o_acc);
  }

  // p v of the first block that these rows see.
  __device__ __forceinline__ void last_product() {
    start_product_with(ring);
    ptx::wgmma_wait<0>();
    ptx::pin(flat(o_acc));
    arrive_if(smem.v_empty[ring.stage()], leads());
    ring.advance();
  }

  // A block that none of these 64 rows sees: keeps step with the other warpgroups.
  __device__ __forceinline__ void skip_block(bool with_turn) {
    wait(smem.k_full[ring.stage()], ring.full_parity());
    wait(smem.v_full[ring.stage()], ring.full_parity());
    // All threads are past these waits before one of them lets the phases pass.
    ptx::named_barrier_sync(first_together + warpgroup, 128);
    arrive_if(smem.k_empty[ring.stage()], leads());
    arrive_if(smem.v_empty[ring.stage()], leads());
    ring.advance();
    if (!with_turn) return;
    take_turn();
    pass_turn();
  }

  __device__ __forceinline__ void start_scores(float (&s_acc)[1][s_tiles][4]) {
    start_transposed_product<SharedMemory::QTile, SharedMemory::KTile>(
        s_acc, smem.q[q_ring.stage()].summed_over_columns(64 * warpgroup),
        smem.k[ring.stage()].summed_over_columns());
  }

  __device__ __forceinline__ void start_product_with(const Ring<Config::num_stages>& at) {
    wait(smem.v_full[at.stage()], at.full_parity());
    start_product<SharedMemory::VTile>(o_acc, p_frag, smem.v[at.stage()].summed_over_rows());
  }

  // A product is done only when all four warps have issued it, so that this thread's arrival after
  // it speaks for the warpgroup.
  __device__ __forceinline__ bool leads() const { return threadIdx.x % 128 == 0; }

  __device__ __forceinline__ void take_turn() const {
    ptx::named_barrier_sync(first_turn + warpgroup, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    const int next = warpgroup + 1 == consumers ? 0 : warpgroup + 1;
    ptx::named_barrier_arrive(first_turn + next, 256);
  }

  // Raw products become logits, what is invisible -inf.
  template <bool masked>
  __device__ __forceinline__ void apply_score(float (&s_acc)[1][s_tiles][4], const Score& score,
                                              int first_row, int first_key) const {
    if constexpr (masked || !Config::scale_in_exponent) {
      const int thread = ptx::thread_index(), lane = thread % 32;
      const int lane_row = first_row + 16 * (thread / 32 % 4) + fragment_row(0, 0, lane);
      const int lane_key = first_key + fragment_column(0, 0, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int q_idx = lane_row + 8 * half;
        const Range keys = score.kv_range_from(lane_key, q_idx);
#pragma unroll
        for (int t = 0; t < s_tiles; ++t) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& value = s_acc[0][t][2 * half + i];
            const int kv_idx = lane_key + 8 * t + i;
            const bool visible =
                !masked || (keys.contains(8 * t + i) && score.unmasked(q_idx, kv_idx));
            value = visible ? score.apply(value, q_idx, kv_idx) : -infinity();
          }
        }
      }
    }
  }

  // out and lse of these 64 rows; rows that saw nothing become +0 and -inf.
  __device__ __forceinline__ void finish(const Work& work, const Score& score) {
    const int thread = ptx::thread_index(), lane = thread % 32;
    const int tile_row = 64 * warpgroup + 16 * (thread / 32 % 4);
    const int warp_row = work.first_row + tile_row;
    const int num_rows = min(max(score.seqlen.q - warp_row, 0), 16);
    const uint32_t broken = non_finite_rows(o_acc[0]) & ((1u << num_rows) - 1);
    softmax.finish();
    bool hidden[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.row_sum[0][half];
      hidden[half] = fragment_row(0, 2 * half, lane) >= num_rows || sum == 0.0f;
      const float inverse_sum = __fdividef(1.0f, sum);  // the sum is at least 1
#pragma unroll
      for (int t = 0; t < o_tiles; ++t) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          o_acc[0][t][i] = hidden[half] ? 0.0f : o_acc[0][t][i] * inverse_sum;
        }
      }
    }
    if constexpr (stages_out) {
      // These rows of q were read by this warpgroup alone, which is done with them.
      const int stage = q_ring.stage();
      stage_rows(params, work, smem.q[stage], tile_row, o_acc, broken);
      arrive_as_warp(smem.o_full[stage][warpgroup]);
    } else {
      store_rows(params, work, warp_row, o_acc, broken);
    }
    if (params.lse == nullptr || lane % 4 != 0) return;
    float* lse = params.lse + work.entry * params.lse_layout.batch;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int q_idx = warp_row + fragment_row(0, 2 * half, lane);
      if (q_idx >= params.score.seqlen_q) continue;
      lse[q_idx * params.lse_layout.row] = hidden[half] ? -infinity() : softmax.lse(0, half, score);
    }
  }
};

}  // namespace cuflash
