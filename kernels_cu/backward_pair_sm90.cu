// dq, dk and dv on Hopper in one pass, for head sizes of which one SM holds no more
// than 64 keys: two thread blocks, a cluster, compute with 64 keys each and share what they
// load. (D23)
//
//   a tile of 2 x 64 keys is drawn:                           two thread blocks
//     dk = 0, dv = 0                                          each for its 64 keys
//     for each batch entry that shares these keys:            heads of a group, broadcast axes
//       for each block of 64 queries that see some key:       last rows first
//         s^T = k q^T                                         the second warpgroup
//         p^T = exp(score(s^T) - lse)
//         dp^T = v dout^T;  dv += p^T dout
//         ds^T = p^T (dp^T - delta) score'(s^T)               to the shared memory of both
//         dk += ds^T q                                        the third
//         sums of the block += ds k                           the fourth: of all 128 keys, half of
//                                                             the columns
//     dk *= scale
//
// Each loads half of the columns of q and dout for both. What a tile adds to the sums
// (sm90/dq_accum.cuh), and in which order tiles do, is as in backward_sm90.cu; each half of the
// columns has turns of its own (sm90/pair_writer.cuh). Without an order the tile of the first keys
// still stores, and the others add as they come once it has: sums need no zeros before.
//
//   barrier      arrivals a phase   what the end of a phase says
//   keys_full    32 + bytes         k and v are there, and those columns of the other's k
//   full         32 + bytes         q and dout of a block are there, and lse and delta of its rows
//   raw          1 + bytes          k and v are there, of which rows are to be cleared
//   rows_raw     1 + bytes          the same of q and dout
//   empty        4 + 1 + 2          scores and dk of both are done with the block: load the next
//   ds_full      4 (warps)          ds of the own keys is there
//   other_full   1 + bytes          that of the other's
//   ds_empty     3                  all have multiplied with ds of the own keys: stage the next
//   dq.full      4 (warps)          what a block adds to dq is staged: a writer may add it
//   dq.empty     1                  it was read: stage the next
//   dq.come      1                  where nothing is staged: it is this tile's turn to add
//   dq.taken     4 (warps)          it has added: pass the turn on
#include "ptx/stmatrix.cuh"
#include "sm90/pair_producer.cuh"
#include "sm90/pair_writer.cuh"

namespace cuflash {

// ------------------------------------------------------------------------------- the warpgroups
// A warp's 16 rows of dk or dv; returns those that are non-finite, as bits.
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

// For backward_combine.cu.
CUFLASH_DEVICE DkvSlice* part_of_keys(const BackwardParams& params, const Work& work) {
  return own_slice(params, work.keys, work.keys.first_key + 16 * (warp_index() % 4));
}

constexpr int dk_stored = 1;  // a named barrier

// Scores, ds and dv.
struct ScoreOwner : DkvWarpgroup<64> {
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

  // Do registers hold dp beside scores, lse and the operand p? Then it is multiplied under
  // exponentials.
  static constexpr bool dp_beside_p = Config::head_dim_v < 256;

  // The last product of a block is waited for when the scores of the next are there.
  CUFLASH_DEVICE void add_block(const Score& score, int first_row, int first_key, bool masked) {
    float s_acc[1][tiles][4], dp_acc[1][tiles][4];
    start_scores(s_acc, ring);
    if (dp_beside_p) start_dp(dp_acc);
    ptx::wgmma_wait<dp_beside_p ? 1 : 0>();
    ptx::pin(flat(s_acc));
    release_block_before_in_both();
    float2 lse[tiles];
    read(lse, smem.lse);
    compute_p(s_acc, s_acc, lse, score, first_row, first_key);
    hide_pairs(s_acc, score, first_row, first_key, masked);
    to_operand(frag, s_acc);
    if (!dp_beside_p) start_dp(dp_acc);
    start_dv();
    ptx::wgmma_wait<1>();
    ptx::pin(flat(dp_acc));
    float2 delta[tiles];
    read(delta, smem.delta);
    compute_ds(s_acc, dp_acc, delta);
    wait(shared().ds_empty, Ring<1>{ring.uses}.empty_parity());
    stage_ds(s_acc);
    ring.advance();
  }

  CUFLASH_DEVICE void release_block_before_in_both() {
    uint64_t& empty = smem.empty[Ring<Config::num_stages>{ring.uses - 1}.stage()];
    arrive_as_readers(empty, ring.uses > 0);
    arrive_at_other_if(empty, leads_warpgroup() && ring.uses > 0);
  }

  // Each warp its 16 keys, for both thread blocks.
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
      DkvSlice* slice = part_of_keys(params, work);
      if (slice != nullptr) slice->dv.write(dv_acc[0], lane_index());
      return;
    }
    uint32_t broken =
        store_keys(params, work, params.dv, params.dv_layout, params.head_dim_v, 1.0f, dv_acc[0]);
    ptx::named_barrier_sync(dk_stored, 256);
    const int warp = warp_index() % 4;
    broken |= shared().broken[warp];
    for_each_bit(broken, [&](int row) {
      recompute_dkv(params, work.keys.owner, 0, work.keys.first_key + 16 * warp + row);
    });
  }
};

// dk.
struct KeyGradient {
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
      DkvSlice* slice = part_of_keys(params, work);
      if (slice != nullptr) slice->dk.write(dk_acc[0], lane_index());
      return;
    }
    const uint32_t broken = store_keys(params, work, params.dk, params.dk_layout, params.head_dim,
                                       params.score.scale, dk_acc[0]);
    if (lane_index() == 0) smem.broken[warp_index() % 4] = broken;
    ptx::named_barrier_arrive(dk_stored, 256);
  }
};

// What the tile adds to dq.
struct QueryGradient {
  // Nanoseconds. An SM adds twice as fast as the L2 cache takes additions of all, and
  // whatever else needs it waits behind them. Who adds in order keeps others waiting, too:
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
          pass_on(smem.dq, {params, work, score, index, block});
          ring.advance();
        },
        [] {});
  }

  CUFLASH_DEVICE void multiply() {
    ptx::mbarrier_arrive_expect_if(ptx::shared_address(&smem.other_full),
                                   SharedMemory::DsTile::bytes, leads_warpgroup());
    wait(smem.ds_full, ring.full_parity());
    start_product_with(smem.ds, smem.k, first_whole_panel(), false);
    wait(smem.other_full, ring.full_parity());
    start_product_with(smem.other_ds, smem.other_k, 0, true);
    ptx::wgmma_wait<0>();
    ptx::pin(flat(whole_acc));
    if constexpr (shares_middle) ptx::pin(flat(middle_acc));
    arrive_if(smem.ds_empty, leads_warpgroup());
    arrive_at_other_if(smem.ds_empty, leads_warpgroup());
  }

  // Keys whose own panels begin at `first`; the middle one lies at the same place in both.
  template <typename KeysTile>
  CUFLASH_DEVICE void start_product_with(const SharedMemory::DsTile& ds, const KeysTile& keys,
                                         int first, bool accumulates) {
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

  // The own columns, for a writer.
  CUFLASH_DEVICE void pass_on(StagedDq& dq, const Addition&) const {
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

  // The own columns, to the sums of a block.
  CUFLASH_DEVICE void pass_on(TurnToAdd& dq, const Addition& own) const {
    wait(dq.come, ring.full_parity());
    const int slice = warp_index() % 4;
    if (warp_agrees(slice < own.slices())) {
#pragma unroll
      for (int i = 0; i < whole_panels; ++i) {
        DqSlice<8>& to = own.sums.slice<8>(own.block, first_whole_panel() + i, slice);
        if (warp_agrees(own.turn == 0)) {
          to.write(whole_panel(i), lane_index());
        } else {
          to.add<pause_between_additions>(whole_panel(i), lane_index());
        }
      }
    }
    arrive_as_warp(dq.taken);
  }
};

}  // namespace cuflash

extern "C" __global__ void __cluster_dims__(2, 1, 1)
    __launch_bounds__(cuflash::Config::num_threads, 1)
        cuflash_backward_pair_sm90(const __grid_constant__ cuflash::BackwardSm90Params params) {
  using namespace cuflash;
  SharedMemory& smem = shared_memory<SharedMemory>();
  if (threadIdx.x == 0) {
    init_barriers(smem);
    // Drawn, so that a tile runs only when all before it do.
    if (ptx::cluster_rank() == 0) smem.tile = atomicAdd(params.turns, 1);
  }
  ptx::cluster_sync();  // barriers and tile are there
  const int tile = __shfl_sync(
      0xffffffff,
      ptx::load_shared_of_cluster(ptx::shared_address_of(0, ptx::shared_address(&smem.tile))), 0);
  const Work work = Work::at(params, tile);
  const int warp = __shfl_sync(0xffffffff, warp_index(), 0);
  // Registers of a thread; their sum over all warpgroups is what the block was given at its start.
  constexpr int first_registers = stages_dq ? 32 : 24, query_registers = 128 - first_registers;
  if (warp < 4) {
    ptx::setmaxnreg_dec<first_registers>();
    if (warp == 0) Producer{params, smem}.run(work);
    if (warp != 0 && lane_index() == 0) wait_for_turns(params, work, warp, smem.dq);
  } else if (warp < 8) {
    ptx::setmaxnreg_inc<224>();
    ScoreOwner{params, smem, 0}.run(work);
  } else if (warp < 12) {
    ptx::setmaxnreg_inc<160>();
    KeyGradient{params, smem}.run(work);
  } else {
    ptx::setmaxnreg_dec<query_registers>();
    QueryGradient{params, smem}.run(work);
  }
  ptx::cluster_sync();  // neither reaches into shared memory of a thread block that has ended
}
