// Roles that the Hopper kernels for float32 share: producer warpgroups, which split the streamed
// operands, and two consumer warpgroups.
//
// mbarriers: a phase of `full` ends when the four warps of the producer have written a tile. A
// phase of `empty` ends when every consumer has multiplied with the tile, or when every warp of the
// consumers has read it.
#pragma once

#include "schedule/pipeline.cuh"
#include "ptx/sync.cuh"
#include "sm90/barrier.cuh"
#include "sm90_tf32/tf32_pairs.cuh"

namespace cuflash {

static_assert(Config::split_columns == 1, "a thread block computes all columns of its rows");

constexpr int consumers = 2;  // warpgroups, of 64 rows each; register counts assume two

constexpr int reader_releases = 4 * consumers * reader_arrivals;

// The barriers of a ring of tiles.
struct TileBarriers {
  uint64_t full[Config::num_stages], empty[Config::num_stages];

  // `releases`: arrivals that end a phase of `empty`.
  CUFLASH_DEVICE void init(int releases = consumers) {
    for (int i = 0; i < Config::num_stages; ++i) {
      cuflash::init(full[i], 4 * reader_arrivals);
      cuflash::init(empty[i], releases);
    }
  }

  CUFLASH_DEVICE void wait_full(const Ring<Config::num_stages>& ring) const {
    wait(full[ring.stage()], ring.full_parity());
  }

  // Called by the producer: write() fills a tile for products. Its warps arrive as readers do, so
  // that racecheck sees who wrote.
  template <typename Write>
  CUFLASH_DEVICE void fill(const Ring<Config::num_stages>& ring, Write write) {
    wait(empty[ring.stage()], ring.empty_parity());
    write();
    ptx::fence_async_proxy();
    arrive_as_readers(full[ring.stage()], true);
  }
  // Called by a consumer. The products of multiply() are done when it returns.
  template <typename Multiply>
  CUFLASH_DEVICE void read(const Ring<Config::num_stages>& ring, Multiply multiply) {
    wait_full(ring);
    multiply();
    arrive_if(empty[ring.stage()], leads_warpgroup());
  }
  // Releases a tile without a product, once all threads of the warpgroup are past their wait. Named
  // barrier i belongs to warpgroup i.
  CUFLASH_DEVICE void skip(const Ring<Config::num_stages>& ring) {
    read(ring, [] { ptx::named_barrier_sync(ptx::thread_index() / 128, 128); });
  }
  // Called by every warp of the consumers after its loads: reader_releases arrivals in all.
  CUFLASH_DEVICE void release_as_reader(const Ring<Config::num_stages>& ring) {
    arrive_as_readers(empty[ring.stage()], true);
  }
};

}  // namespace cuflash
