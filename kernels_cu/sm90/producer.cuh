// The warp that draws tiles and loads q, k and v for the consumers.
#pragma once

#include "ptx/sync.cuh"
#include "sm90/load.cuh"
#include "sm90/load_pages.cuh"
#include "sm90/outward_blocks.cuh"
#include "sm90/shared_memory.cuh"

namespace cuflash {

struct Producer {
  const ForwardSm90Params& params;
  SharedMemory& smem;
  Ring<Config::num_q_stages> q_ring;
  Ring<Config::num_stages> k_ring, v_ring;
  Ring<2> work_ring;
  Ring<1> raw_ring;
  TileOrder order;
  int num_draws;
  Work work;

  // Uses no mbarrier, and so may run before they are initialised.
  CUFLASH_DEVICE void find_first_tile() {
    if (lane_index() < 4) ptx::prefetch_tensor_map((&params.q_map)[lane_index()]);
    work = work_of(blockIdx.x);
  }

  // Loads all tiles of this thread block. The whole warp runs this code, its first lane issues.
  CUFLASH_DEVICE void run() {
    // A single buffer of q is free only after the previous tile, a second one long before k.
    if (stages_out && work.first_row >= 0) load_q();
    publish();
#pragma unroll 1
    while (work.first_row >= 0) {
      const Score score(params.score, work.entry, KeyPart::of_thread_block(params).keys);
      const Range rows{work.first_row, work.first_row + Config::block_m};
      const BlockRanges blocks = score.kv_blocks(rows.begin, rows.end);
      KeyWalk visited(score, blocks, rows);
      const Range seen = score.kv_range(0, score.seqlen.rows_q);  // seen by any row of this entry
      const BatchIndex entry = work.entry;
      const int first_k = score.seqlen.first_k;
      const KeyPages<Config::paged> pages(params, entry);
      int block = visited.last_from(blocks.end - 1);
      auto box = pages.look_up(params, block * Config::block_n);
      if (block >= blocks.begin) load_k(entry, first_k, block, pages, box);
      if constexpr (!stages_out) load_q();
      int next = visited.next_before(block);
      int after = visited.next_before(next);
      auto next_box = pages.look_up(params, next * Config::block_n);
#pragma unroll 1
      while ((draws_early ? after : next) >= blocks.begin) {
        load_k(entry, first_k, next, pages, next_box);
        load_v(entry, first_k, block, seen, pages, box);
        block = next;
        box = next_box;
        next = after;
        next_box = pages.look_up(params, next * Config::block_n);  // before waiting for its buffer
        after = visited.next_before(after);
      }
      const int drawn = draw();
      if (draws_early && next >= blocks.begin) {
        load_k(entry, first_k, next, pages, next_box);
        load_v(entry, first_k, block, seen, pages, box);
        block = next;
        box = next_box;
      }
      if (!draws_early && block >= blocks.begin) {
        load_v(entry, first_k, block, seen, pages, box);
      }
      work = work_of(__shfl_sync(0xffffffff, drawn, 0));
      publish();
      if (draws_early && block >= blocks.begin) load_v(entry, first_k, block, seen, pages, box);
      if (stages_out && work.first_row >= 0) load_q();
    }
  }

 private:
  // Tiles drawn early lose the balance of longest first. But with two buffers, both in use, the
  // next tile must be known when the last v is loaded, so that its q and k follow at once.
  static constexpr bool draws_early = Config::num_stages == 2;

  CUFLASH_DEVICE void publish() {
    const int stage = work_ring.stage();
    wait(smem.work_empty[stage], work_ring.empty_parity());
    if (lane_index() == 0) smem.work[stage] = work;
    arrive_as_warp(smem.work_full[stage]);
    work_ring.advance();
  }

  // The tile of an index or, if that has no rows, the next drawn tile that has rows.
  CUFLASH_DEVICE Work work_of(int index) {
    Work found(params, index, order);
    if constexpr (is_packed) {
#pragma unroll 1
      while (warp_any(found.first_row >= 0 && !found.exists())) {
        found = Work(params, __shfl_sync(0xffffffff, draw(), 0), order);
      }
    }
    return found;
  }

  // Draws an index in lane 0. The other lanes return 0.
  CUFLASH_DEVICE int draw() {
    if (lane_index() != 0) return 0;
    if (params.tile_counter != nullptr) {
      // Every thread block draws once past the end, so that all draws are as many as the tiles: the
      // last draw resets the counter to 0 for the next launch.
      return atomicInc(params.tile_counter, Work::num_tiles(params) - 1) + gridDim.x;
    }
    // Back and forth over the longest-first list, which evens out the falling lengths.
    ++num_draws;
    return num_draws * gridDim.x + (num_draws % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  }

  CUFLASH_DEVICE void load_q() {
    const int stage = q_ring.stage();
    int first_row = work.first_row;
    if constexpr (is_packed) {
      first_row += Packing::of_queries(params.score).begin(work.entry.sequence());
    }
    wait(smem.q_empty[stage], q_ring.empty_parity());
    load(smem.q[stage], params.q_map, params.q_layout, smem.q_full[stage], work.entry, first_row);
    q_ring.advance();
  }

  // Loads a block of keys of an entry. Key 0 of the entry is row `first_k` of the array.
  template <typename Pages>
  CUFLASH_DEVICE void load_k(const BatchIndex& entry, int first_k, int block, const Pages& pages,
                             const typename Pages::Box& box) {
    const int stage = k_ring.stage();
    wait(smem.k_empty[stage], k_ring.empty_parity());
    if constexpr (Config::paged) {
      load_box(smem.k[stage], params.k_map, pages.k_axes, box, smem.k_full[stage]);
    } else {
      load(smem.k[stage], params.k_map, params.k_layout, smem.k_full[stage], entry,
           first_k + block * Config::block_n);
    }
    k_ring.advance();
  }

  // Loads a block of v. Rows outside `seen` must not reach p v, where 0 * NaN is NaN. TMA writes
  // zeros past the end of the tensor, and this function clears the other rows outside `seen`.
  template <typename Pages>
  CUFLASH_DEVICE void load_v(const BatchIndex& entry, int first_k, int block, Range seen,
                             const Pages& pages, const typename Pages::Box& box) {
    const int stage = v_ring.stage(), first_key = block * Config::block_n;
    const Range kept{max(seen.begin - first_key, 0), seen.end - first_key};
    const int exist = params.score.seqlen_k - first_k - first_key;
    const int loaded = Config::paged ? Config::block_n : min(Config::block_n, exist);
    const bool clears = kept.begin > 0 || kept.end < loaded;
    auto& to = v_buffers(smem);
    wait(to.v_empty[stage], v_ring.empty_parity());
    uint64_t& full = clears ? smem.v_raw : to.v_full[stage];
    if constexpr (Config::paged) {
      load_box(to.v[stage], params.v_map, pages.v_axes, box, full);
    } else {
      load(to.v[stage], params.v_map, params.v_layout, full, entry, first_k + first_key);
    }
    if (clears) {
      wait(smem.v_raw, raw_ring.full_parity());
      raw_ring.advance();
      clear_rows(to.v[stage], 0, kept.begin);
      clear_rows(to.v[stage], kept.end, loaded);
      ptx::fence_async_proxy();
      arrive_as_readers(to.v_full[stage], true);
    } else if constexpr (reader_arrivals > 1) {
      arrive_if(to.v_full[stage], lane_index() > 0);  // lane 0 arrived with the expected bytes
    }
    v_ring.advance();
  }

  // Loads a block of k or v from pages.
  template <typename Tile>
  CUFLASH_DEVICE void load_box(Tile& tile, const ptx::TensorMap& map, const PageAxes& axes,
                               const KeyPages<true>::Box& box, uint64_t& full) {
    if (lane_index() == 0) ptx::mbarrier_arrive_expect(ptx::shared_address(&full), Tile::bytes);
    __syncwarp();  // the mbarrier expects the bytes of all lanes
    start_load_of_pages(tile, map, axes, params, box, full);
    __syncwarp();  // as in load()
  }

  template <typename Tile>
  CUFLASH_DEVICE void load(Tile& tile, const ptx::TensorMap& map, const Layout& layout,
                           uint64_t& full, const BatchIndex& entry, int first_row) {
    if (lane_index() == 0) {
      ptx::mbarrier_arrive_expect(ptx::shared_address(&full), Tile::bytes);
      start_load(tile, map, layout, entry, first_row, full);
    }
    __syncwarp();  // all lanes are past their wait: see sm90/barrier.cuh
  }
};

}  // namespace cuflash
