// dq, dk and dv on Hopper in one pass, for head sizes of which one SM holds no more than 64 keys.
// The two thread blocks of a cluster compute with 64 keys each, and share what they load. (D23)
//
//   for one tile of 2 x 64 keys, drawn from a counter:        a cluster of two thread blocks
//     dk = 0, dv = 0                                          each for its 64 keys
//     for each batch entry that shares these keys:            heads of a group, broadcast axes
//       for each block of 64 queries that see some key:       last rows first
//         s^T = k q^T                                         the second warpgroup
//         p^T = exp(score(s^T) - lse)
//         dp^T = v dout^T;  dv += p^T dout
//         ds^T = p^T (dp^T - delta) score'(s^T)               to the shared memory of both
//         dk += ds^T q                                        the third warpgroup
//         sums of the block += ds k                           the fourth: all 128 keys, half of
//                                                             the columns
//     dk *= scale
//
// Each thread block loads half of the columns of q and dout for both. Tiles add to the sums
// (sm90/dq_accum.cuh) in the same order as in backward_sm90.cu, and each half of the columns has
// its own turns (sm90/pair_writer.cuh). Without a fixed order the tile of the first keys still
// stores, and the others add in any order after it: sums need not be zeroed before.
//
//   barrier      arrivals a phase   what the end of a phase means
//   keys_full    32 + bytes         k, v and our half of the other thread block's k have arrived
//   full         32 + bytes         q, dout, lse and delta of a block have arrived
//   raw          1 + bytes          k and v have arrived, and some of their rows must be cleared
//   rows_raw     1 + bytes          q and dout have arrived, and some rows must be cleared
//   empty        4 + 1 + 2          both thread blocks have used q and dout: load the next block
//   ds_full      4 (warps)          ds of our keys is staged
//   other_full   1 + bytes          ds of the other thread block's keys has arrived
//   ds_empty     3                  all products with ds of our keys are done: stage the next
//   dq.full      4 (warps)          the sums of a block are staged: a writer may add them
//   dq.empty     1                  the writer has read them: stage the next
//   dq.may_add   1                  registers add (nothing is staged): it is this tile's turn
//   dq.added     4 (warps)          the tile has added: pass the turn on
#include "ptx/stmatrix.cuh"
#include "sm90/pair_producer.cuh"
#include "sm90/pair_writer.cuh"

namespace cuflash {

// ------------------------------------------------------------------------------- the warpgroups
// Stores a warp's 16 rows of dk or dv. Returns a bit mask of the non-finite rows.
template <int tiles>
CUFLASH_DEVICE uint32_t store_keys(const BackwardParams& params, const Work& work, void* array,
                                   const Layout& layout, int columns, float factor,
                                   const float (&acc)[tiles][4]) {
  const int first_key = work.keys.first_key + 16 * (warp_index() % 4);
  const BatchIndex entry = work.keys.entry(params, 0);
  const Seqlen seqlen(params.score, entry);
  const int num_keys = min(max(seqlen.rows_k - first_key, 0), 16);
  store_slice_wide(RowTarget(array, layout, entry, seqlen.first_k, columns, 8 * tiles), first_key,
                   num_keys, factor, acc);
  return non_finite_rows(acc) & ((1u << num_keys) - 1);
}

// The partial sums of this warp's keys, which backward_combine.cu adds up.
CUFLASH_DEVICE DkvSlice* partial_sums_of(const BackwardParams& params, const Work& work) {
  return own_slice(params, work.keys, work.keys.first_key + 16 * (warp_index() % 4));
}

constexpr int dk_stored = 1;  // a named barrier

// The warpgroup that computes scores, ds and dv.
struct ScoreWarpgroup : DkvWarpgroup<64> {
  CUFLASH_DEVICE void run(const Work& work) {
    clear(dv_acc);
    wait_for_keys();
    walk_blocks(
        params, work,
        [&](const Score& score, int, int block, bool masked) {
          add_block(score, block * Config::block_m, work.keys.first_key, masked);
        },
        [&] {
          ptx::wgmma_wait<0>();
          ptx::pin(flat(dv_acc));
        });
    store(work);
  }

 private:
  CUFLASH_DEVICE SharedMemory& shared() const { return static_cast<SharedMemory&>(smem); }

  // Are there registers for dp beside scores, lse and the operand p? Then dp is multiplied while
  // exponentials are computed.
  static constexpr bool dp_beside_p = Config::head_dim_v < 256;

  // The last product of a block is waited for only after the scores of the next block are done.
  CUFLASH_DEVICE void add_block(const Score& score, int first_row, int first_key, bool masked) {
    float s_acc[1][tiles][4], dp_acc[1][tiles][4];
    start_scores(s_acc, ring);
    if (dp_beside_p) start_dp(dp_acc);
    ptx::wgmma_wait<dp_beside_p ? 1 : 0>();
    ptx::pin(flat(s_acc));
    release_previous_block_in_both();
    const KeptBits<1, tiles> kept = kept_pairs(score, first_row, first_key);
    if constexpr (Score::hides_after_exponentials) {
      float2 lse[tiles];
      read(lse, smem.lse);
      compute_p(s_acc, s_acc, lse, score, first_row, first_key);
      hide_pairs(s_acc, score, first_row, first_key, masked);
      to_kept_operand(s_acc, kept);
    } else {
      compute_biased_weights(s_acc, kept, score, first_row, first_key, masked);
    }
    if (!dp_beside_p) start_dp(dp_acc);
    start_dv();
    ptx::wgmma_wait<1>();
    ptx::pin(flat(dp_acc));
    kept.drop_gradients(dp_acc, params.score);
    float2 delta[tiles];
    read(delta, smem.delta);
    compute_ds(s_acc, dp_acc, delta);
    wait(shared().ds_empty, Ring<1>{ring.uses}.empty_parity());
    stage_ds(s_acc);
    ring.advance();
  }

  CUFLASH_DEVICE void release_previous_block_in_both() {
    uint64_t& empty = smem.empty[Ring<Config::num_stages>{ring.uses - 1}.stage()];
    arrive_as_readers(empty, ring.uses > 0);
    arrive_at_other_if(empty, leads_warpgroup() && ring.uses > 0);
  }

  // Each warp writes ds of its 16 keys to the shared memory of both thread blocks.
  CUFLASH_DEVICE void stage_ds(const float (&ds)[1][tiles][4]) const {
    const uint32_t thread = ptx::thread_index() % 128, lane = thread % 32;
    const uint32_t rows = ptx::shared_address(shared().ds.data[0][thread / 32 * 16]);
    const uint32_t lane_address = rows + lane % 16 * 128 + (((lane / 16) ^ (lane & 7)) << 4);
#pragma unroll
    for (int i = 0; i < tiles / 2; ++i) {
      const float (&left)[4] = ds[0][2 * i], (&right)[4] = ds[0][2 * i + 1];
      ptx::stmatrix_x4(lane_address ^ (i << 5), pack<Config::dtype>(left[0], left[1]),
                       pack<Config::dtype>(left[2], left[3]),
                       pack<Config::dtype>(right[0], right[1]),
                       pack<Config::dtype>(right[2], right[3]));
    }
    ptx::fence_async_proxy();
    arrive_as_warp(shared().ds_full);
    if (lane == 0) {
      const uint32_t to =
          rows + (ptx::shared_address(&shared().other_ds) - ptx::shared_address(&shared().ds));
      ptx::bulk_copy_in_cluster(
          ptx::shared_address_of(other_rank(), to), rows, 16 * 128,
          ptx::shared_address_of(other_rank(), ptx::shared_address(&shared().other_full)));
    }
    __syncwarp();
  }

  CUFLASH_DEVICE void store(const Work& work) const {
    if constexpr (Config::split_queries) {
      DkvSlice* slice = partial_sums_of(params, work);
      if (slice != nullptr) slice->dv.write(dv_acc[0], lane_index());
      return;
    }
    uint32_t rows_to_recompute = store_keys(params, work, params.dv, params.dv_layout,
                                            params.head_dim_v, kept_scale(params.score), dv_acc[0]);
    ptx::named_barrier_sync(dk_stored, 256);
    const int warp = warp_index() % 4;
    rows_to_recompute |= shared().rows_to_recompute[warp];
    for_each_bit(rows_to_recompute, [&](int row) {
      recompute_dkv(params, work.keys.owner, work.keys.sequence,
                    work.keys.first_key + 16 * warp + row);
    });
  }
};

// The warpgroup that computes dk.
struct DkWarpgroup {
  static constexpr int tiles = Config::head_dim / 8;

  const BackwardSm90Params& params;
  SharedMemory& smem;
  Ring<Config::num_stages> ring;
  float dk_acc[1][tiles][4];

  CUFLASH_DEVICE void run(const Work& work) {
    clear(dk_acc);
    add_tile(work);
    store(work);
  }

 private:
  CUFLASH_DEVICE void add_tile(const Work& work) {
    walk_blocks(
        params, work,
        [&](const Score&, int, int, bool) {
          add_block();
          ring.advance();
        },
        [] {});
  }

  CUFLASH_DEVICE void add_block() {
    const int stage = ring.stage();
    wait(smem.full[stage], ring.full_parity());
    wait(smem.ds_full, Ring<1>{ring.uses}.full_parity());
    start_shared_product<SharedMemory::DsTile, SharedMemory::QTile>(dk_acc, smem.ds.k_major(),
                                                                    smem.q[stage].mn_major());
    ptx::wgmma_wait<0>();
    ptx::pin(flat(dk_acc));
    arrive_if(smem.ds_empty, leads_warpgroup());
    arrive_if(smem.empty[stage], leads_warpgroup());
    arrive_at_other_if(smem.empty[stage], leads_warpgroup());
  }

  CUFLASH_DEVICE void store(const Work& work) const {
    if constexpr (Config::split_queries) {
      DkvSlice* slice = partial_sums_of(params, work);
      if (slice != nullptr) slice->dk.write(dk_acc[0], lane_index());
      return;
    }
    const uint32_t rows_to_recompute = store_keys(params, work, params.dk, params.dk_layout,
                                                  params.head_dim, params.score.scale, dk_acc[0]);
    if (lane_index() == 0) smem.rows_to_recompute[warp_index() % 4] = rows_to_recompute;
    ptx::named_barrier_arrive(dk_stored, 256);
  }
};

// The warpgroup that multiplies dq and passes it on.
struct DqWarpgroup {
  // In nanoseconds. One SM adds twice as fast as the L2 cache takes additions from all SMs, and
  // loads wait behind them. In order, a pause also delays the tiles that wait for their turn:
  // docs/backward-sm90.md. (D24)
  static constexpr int pause_between_additions = Config::deterministic ? 30 : 60;

  const BackwardSm90Params& params;
  SharedMemory& smem;
  Ring<1> ring;
  float whole_acc[1][8 * whole_panels][4];
  float middle_acc[1][4][4];  // half of the middle panel

  CUFLASH_DEVICE void run(const Work& work) {
    wait(smem.keys_full, 0);
    add_tile(work);
  }

 private:
  CUFLASH_DEVICE void add_tile(const Work& work) {
    walk_blocks(
        params, work,
        [&](const Score& score, int index, int block, bool) {
          multiply();
          // The turns of segments are counted by the warp of the semaphores.
          bool is_first = false;
          if constexpr (!Score::has_segments) is_first = work.turns(params, score).is_first(block);
          stage_or_add(smem.dq, {params, work, index, block}, is_first);
          ring.advance();
        },
        [] {});
  }

  CUFLASH_DEVICE void multiply() {
    ptx::mbarrier_arrive_expect_if(ptx::shared_address(&smem.other_full),
                                   SharedMemory::DsTile::bytes, leads_warpgroup());
    wait(smem.ds_full, ring.full_parity());
    start_dq(smem.ds, smem.k, first_whole_panel(), false);
    wait(smem.other_full, ring.full_parity());
    start_dq(smem.other_ds, smem.other_k, 0, true);
    ptx::wgmma_wait<0>();
    ptx::pin(flat(whole_acc));
    if constexpr (shares_middle) ptx::pin(flat(middle_acc));
    arrive_if(smem.ds_empty, leads_warpgroup());
    arrive_at_other_if(smem.ds_empty, leads_warpgroup());
  }

  // Starts the product with 64 keys, of which our whole panels begin at panel `first`. The middle
  // panel is at the same index in both tiles of keys.
  template <typename KeysTile>
  CUFLASH_DEVICE void start_dq(const SharedMemory::DsTile& ds, const KeysTile& keys, int first,
                               bool accumulates) {
    start_panel_product<SharedMemory::DsTile, KeysTile>(whole_acc, ds.mn_major(),
                                                        keys.mn_major(0, first), accumulates);
    if constexpr (shares_middle) {
      const uint64_t half = 4 * ptx::cluster_rank();  // 32 columns are 64 bytes
      start_panel_product<SharedMemory::DsTile, KeysTile>(
          middle_acc, ds.mn_major(), keys.mn_major(0, whole_panels) + half, accumulates);
    }
  }

  CUFLASH_DEVICE const auto& whole_panel(int i) const {
    return reinterpret_cast<const float (&)[8][4]>(whole_acc[0][8 * i]);
  }

  // Stages our columns of dq for a writer.
  CUFLASH_DEVICE void stage_or_add(StagedDq& dq, const Addition&, bool) const {
    const Ring<writers> writer{ring.uses}, before{ring.uses - 1};
    wait(dq.empty[before.stage()], before.full_parity());
    const int slice = warp_index() % 4;
#pragma unroll
    for (int i = 0; i < whole_panels; ++i) {
      dq.whole(i, slice).write(whole_panel(i), lane_index());
    }
    if constexpr (shares_middle) dq.middle(slice).write(middle_acc[0], lane_index());
    ptx::fence_async_proxy();
    arrive_as_warp(dq.full[writer.stage()]);
  }

  // Adds our columns of dq to the sums from registers.
  CUFLASH_DEVICE void stage_or_add(RegisterAddition& dq, const Addition& own, bool is_first) const {
    wait(dq.may_add, ring.full_parity());
    if constexpr (Score::has_segments) is_first = dq.is_first;
    const int slice = warp_index() % 4;
    if (warp_any(slice < own.slices())) {
#pragma unroll
      for (int i = 0; i < whole_panels; ++i) {
        DqSlice<8>& to = own.sums.slice<8>(own.block, first_whole_panel() + i, slice);
        if (warp_any(is_first)) {
          to.write(whole_panel(i), lane_index());
        } else {
          to.add<pause_between_additions>(whole_panel(i), lane_index());
        }
      }
    }
    arrive_as_warp(dq.added);
  }
};

}  // namespace cuflash

extern "C" __global__ void __cluster_dims__(2, 1, 1)
    __launch_bounds__(cuflash::Config::num_threads, 1)
        cuflash_backward_pair_sm90(const __grid_constant__ cuflash::BackwardSm90Params params) {
  using namespace cuflash;
  SharedMemory& smem = shared_memory<SharedMemory>();
  wait_for_delta();
  if (sequences_overlap(params.score)) return;
  if (threadIdx.x == 0) {
    init_barriers(smem);
    // Tiles are drawn, so that a tile starts only after all tiles before it have started.
    if (ptx::cluster_rank() == 0) smem.tile = atomicAdd(params.turns, 1);
  }
  ptx::cluster_sync();  // all mbarriers are initialised, and the tile is drawn
  const int tile = __shfl_sync(
      0xffffffff,
      ptx::load_shared_of_cluster(ptx::shared_address_of(0, ptx::shared_address(&smem.tile))), 0);
  const Work work = Work::at(params, tile);
  const int warp = __shfl_sync(0xffffffff, warp_index(), 0);
  // Registers of each thread. Summed over all warpgroups they equal what the block got at launch.
  // Segments, packed sequences and bounds from arrays take 8 more in the first warpgroup.
  constexpr bool walks_far =
      Score::has_segments || Score::holds_bounds || Config::cu_seqlens != Dtype::none;
  constexpr int producer_registers = 24 + 8 * stages_dq + 8 * walks_far,
                dq_registers = 128 - producer_registers;
  if (warp < 4) {
    ptx::setmaxnreg_dec<producer_registers>();
    if (warp == 0) Producer{params, smem}.run(work);
    // The lanes of a warp share a walk over segments. One lane adds.
    if (warp != 0 && (Score::has_segments || lane_index() == 0)) {
      run_dq_warps(params, work, warp, smem.dq);
    }
  } else if (warp < 8) {
    ptx::setmaxnreg_inc<224>();
    ScoreWarpgroup{params, smem, 0}.run(work);
  } else if (warp < 12) {
    ptx::setmaxnreg_inc<160>();
    DkWarpgroup{params, smem}.run(work);
  } else {
    ptx::setmaxnreg_dec<dq_registers>();
    DqWarpgroup{params, smem}.run(work);
  }
  ptx::cluster_sync();  // neither thread block ends while the other accesses its shared memory
}
