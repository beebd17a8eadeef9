// dk and dv (or one of them) on Hopper: TMA and warp-specialised wgmma, without atomics. Every sum
// has a fixed order.
//
//   for each tile of block_n keys:                            one thread block
//     dk = 0, dv = 0                                          64 keys per warpgroup
//     for each batch entry that shares these keys:            heads of a group, broadcast axes
//       for each block of block_m queries that see some key:  masked blocks first
//         s^T = k q^T;  dp^T = v dout^T
//         p^T = exp(score(s^T) - lse)                         while dp^T is multiplied
//         dv += p^T dout
//         ds^T = p^T (dp^T - delta) score'(s^T)               while dv is multiplied
//         dk += ds^T q                                        until s^T of the next block is done
//     dk *= scale
//
// The registers that hold p^T and ds^T are operands of the next products: rows of a warpgroup are
// keys, and both results are sums over columns. Warpgroup 0 is the producer: its first warp loads.
// The other warpgroups are consumers.
//
// The mbarriers are listed in sm90/dkv_producer.cuh.
#include "sm90/dkv_warpgroup.cuh"

namespace cuflash {

using SharedMemory = DkvSharedMemory;

// Called by one thread, before any other thread uses an mbarrier.
CUFLASH_DEVICE void init_barriers(SharedMemory& smem) {
  init_rings(smem);
  ptx::fence_mbarrier_init();
}

struct Producer : DkvProducer<FirstRowsFirst> {
  CUFLASH_DEVICE void run() { DkvProducer::run(KeyTile::at(params, ptx::block_index())); }
};

struct Consumer : DkvWarpgroup<Config::block_m> {
  static constexpr bool is_plain = Score::is_product && !Config::dropout;
  static constexpr bool ahead =
      Config::scores_ahead && is_plain && Config::grad_k && Config::grad_v;

  CUFLASH_DEVICE void run() {
    const KeyTile work = KeyTile::at(params, ptx::block_index());
    clear(dk_acc);
    clear(dv_acc);
    wait_for_keys();
#pragma unroll 1
    for (int index = 0; index < params.grid.entries_per_owner; ++index) {
      const Score score(params.score, work.entry(params, index));
      const Range tile{work.first_key, work.first_key + Config::block_n};
      const BlockRanges blocks = score.q_blocks(tile.begin, tile.end);
      FirstRowsFirst walk(score, blocks, tile);
      float s_acc[1][tiles][4];
      if constexpr (ahead) {
        if (warp_any(blocks.begin < blocks.end)) start_scores(s_acc, ring);
        ptx::wgmma_wait<0>();
        ptx::pin(flat(s_acc));
      }
#pragma unroll 1
      for (int block = walk.first(); walk.in_range(block); block = walk.next(block)) {
        const int first_row = block * Config::block_m;
        const bool masked = walk.masked(block);
        if constexpr (ahead) {
          const bool is_last = warp_any(block + 1 == blocks.end);
          add_block_ahead(s_acc, score, first_row, work.first_key, masked, is_last);
        } else {
          add_block(score, first_row, work.first_key, masked);
        }
      }
      ptx::wgmma_wait<0>();
      ptx::pin(flat(dk_acc));
      ptx::pin(flat(dv_acc));
    }
    store(work);
  }

 private:
  // The last product of a block is waited for only after the scores of the next block are done.
  CUFLASH_DEVICE void add_block(const Score& score, int first_row, int first_key, bool masked) {
    float s_acc[1][tiles][4], dp_acc[1][tiles][4];
    start_scores(s_acc, ring);
    if constexpr (Config::grad_k) start_dp(dp_acc);
    const KeptBits<1, tiles> kept = kept_pairs(score, first_row, first_key);
    ptx::wgmma_wait<Config::grad_k && is_plain>();
    ptx::pin(flat(s_acc));
    release_previous_block();
    if constexpr (is_plain) {
      float2 lse[tiles];
      read(lse, smem.lse);
      compute_p(s_acc, s_acc, lse, score, first_row, first_key);
      hide_pairs(s_acc, score, first_row, first_key, masked);
      to_operand(frag, s_acc);
    } else {
      compute_biased_weights(s_acc, kept, score, first_row, first_key, masked);
    }
    if constexpr (Config::grad_v) start_dv();
    if constexpr (Config::grad_k) {
      ptx::wgmma_wait<Config::grad_v>();
      ptx::pin(flat(dp_acc));
      kept.drop_gradients(dp_acc, params.score);
      float2 delta[tiles];
      read(delta, smem.delta);
      compute_ds(s_acc, dp_acc, delta);
      ptx::wgmma_wait<0>();  // dv has read frag
      to_operand(frag, s_acc);
      start_dk();
    }
    ring.advance();
  }

  // On entry s_acc holds the scores of this block. The product of the next block's scores starts as
  // soon as they are read. After the last block it repeats this block's scores, which are not used.
  CUFLASH_DEVICE void add_block_ahead(float (&s_acc)[1][tiles][4], const Score& score,
                                      int first_row, int first_key, bool masked, bool is_last) {
    float p[1][tiles][4], dp_acc[1][tiles][4];
    float2 lse[tiles], delta[tiles];
    start_dp(dp_acc);
    read(lse, smem.lse);
    compute_p(p, s_acc, lse, score, first_row, first_key);
    hide_pairs(p, score, first_row, first_key, masked);
    ptx::wgmma_wait<1>();  // dk of the previous block has read frag
    release_previous_block();
    to_operand(frag, p);
    start_dv();
    start_scores(s_acc, Ring<Config::num_stages>{ring.uses + !is_last});
    ptx::wgmma_wait<2>();
    ptx::pin(flat(dp_acc));
    read(delta, smem.delta);
    compute_ds(p, dp_acc, delta);
    ptx::wgmma_wait<1>();  // dv has read frag
    to_operand(frag, p);
    start_dk();
    ptx::wgmma_wait<1>();
    ptx::pin(flat(s_acc));
    ring.advance();
  }
};

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads, 1)
    cuflash_backward_dkv_sm90(const __grid_constant__ cuflash::BackwardSm90Params params) {
  using namespace cuflash;
  run_roles<Producer, Consumer>(params, shared_memory<SharedMemory>());
}
