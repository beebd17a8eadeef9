// The loading warp of backward_pair_sm90.cu: it loads k and v of its thread block, and half of the
// columns of q and dout for both thread blocks.
#pragma once

#include "sm90/pair.cuh"

namespace cuflash {

struct Producer {
  const BackwardSm90Params& params;
  SharedMemory& smem;
  Ring<Config::num_stages> ring;
  uint32_t raw_parity = 0;  // bit i: parity of the next phase of rows_raw[i]

  CUFLASH_DEVICE void run(const Work& work) {
    load_keys(work);
#pragma unroll 1
    for (int index = 0; index < params.grid.entries_per_owner; ++index) {
      const BatchIndex entry = work.keys.entry(params, index);
      const Score score(params.score, entry);
      const BlockRanges blocks =
          work.keys.own_blocks(score.q_blocks(work.tile().begin, work.tile().end), params);
      PairWalk walk(score, blocks, work.tile());
      load_rows_of(*this, entry, score.seqlen, walk);
    }
  }

  // Loads every second panel, for both thread blocks. Each of them clears rows that saw no key.
  template <typename RowsTile>
  CUFLASH_DEVICE void start_rows(RowsTile& tile, const ptx::TensorMap& map, const Layout& layout,
                                 const BatchIndex& entry, int first_row, uint64_t& full) const {
    int batch[3];
    map_coordinates(batch, entry, layout);
#pragma unroll 1
    for (int panel = ptx::cluster_rank(); panel < RowsTile::num_panels; panel += 2) {
      ptx::tma_load_multicast(ptx::shared_address(tile.data[panel]), map,
                              ptx::shared_address(&full), 64 * panel, first_row, batch, 3);
    }
  }
  CUFLASH_DEVICE uint64_t& raw(int stage) const { return smem.rows_raw[stage]; }
  CUFLASH_DEVICE void wait_for_raw(int stage) {
    wait(smem.rows_raw[stage], raw_parity >> stage & 1);
    raw_parity ^= 1u << stage;
  }

 private:
  CUFLASH_DEVICE void load_keys(const Work& work) {
    constexpr int bytes =
        SharedMemory::KTile::bytes + SharedMemory::VTile::bytes + SharedMemory::OtherKTile::bytes;
    const BatchIndex entry = work.keys.entry(params, 0);
    const int first_k = Seqlen(params.score, entry).first_k;
    const Range seen = seen_keys(work), tile = work.tile();
    const bool clears =
        seen.begin > tile.begin || seen.end < min(tile.end, params.score.seqlen_k - first_k);
    uint64_t& full = clears ? smem.raw : smem.keys_full;
    if (lane_index() == 0) {
      ptx::mbarrier_arrive_expect(ptx::shared_address(&full), bytes);
      start_load(smem.k, params.k_map, params.k_layout, entry, first_k + work.keys.first_key, full);
      start_load(smem.v, params.v_map, params.v_layout, entry, first_k + work.keys.first_key, full);
      int batch[3];
      map_coordinates(batch, entry, params.k_layout);
#pragma unroll
      for (int i = 0; i < whole_panels + shares_middle; ++i) {  // the middle panel comes last
        const int panel = i < whole_panels ? first_whole_panel() + i : whole_panels;
        ptx::tma_load(ptx::shared_address(smem.other_k.data[i]), params.k_map,
                      ptx::shared_address(&full), 64 * panel, first_k + work.other_key(), batch);
      }
    }
    __syncwarp();  // all lanes are past their wait: see sm90/barrier.cuh
    if (clears) {
      wait(smem.raw, 0);
      clear_unseen(smem.k, seen, work.keys.first_key, first_k);
      clear_unseen(smem.v, seen, work.keys.first_key, first_k);
      clear_unseen(smem.other_k, seen, work.other_key(), first_k);
      ptx::fence_async_proxy();
    }
    arrive_if(smem.keys_full, clears || lane_index() != 0);
  }

  template <typename KeysTile>
  CUFLASH_DEVICE void clear_unseen(KeysTile& tile, Range seen, int first_key, int first_k) const {
    const int loaded = min(Config::block_n, params.score.seqlen_k - first_k - first_key);
    clear_outside(tile, {max(seen.begin - first_key, 0), seen.end - first_key}, loaded);
  }

  // Keys that a query of some entry may see. No other key may reach a product that sums over keys:
  // 0 * NaN is NaN.
  CUFLASH_DEVICE Range seen_keys(const Work& work) const {
    Range seen{work.tile().end, work.tile().begin};
#pragma unroll 1
    for (int index = 0; index < params.grid.entries_per_owner; ++index) {
      const Score score(params.score, work.keys.entry(params, index));
      const Range keys = score.kv_range(0, score.seqlen.rows_q);
      if (keys.begin >= keys.end) continue;
      seen = {min(seen.begin, keys.begin), max(seen.end, keys.end)};
    }
    return seen;
  }
};

}  // namespace cuflash
