// Shared memory of the Hopper forward: tiles of q, k and v, mbarriers and the current work.
//
//   barrier      arrivals a phase   what the end of a phase means
//   q_full       1 + bytes          q has arrived
//   q_empty      1 or consumers     q was read and, if out is staged in it, stored: load the next
//   k/v_full     1* + bytes         k or v of a block has arrived (e4m3 v: `transposers` arrivals)
//   k/v_empty    consumers          every warpgroup has multiplied with the block: load the next
//   v_raw        1 + bytes          v of a block has arrived, and some rows must be cleared
//   untransposed.v_full:   1* + bytes, e4m3: v of a block has arrived, before its transposition
//   untransposed.v_empty:  transposers, this v was transposed into the ring of v: load the next
//   o_full       4 (warps)          64 rows of out are staged: store them
//   work_full    1                  the next tile is drawn
//   work_empty   readers (warps)    every reader has a copy of the tile: draw the next
//   dependency   -                  no thread waits: see pin_before_wait() in sm90/weights.cuh
//
// * v has `reader_arrivals` instead of 1, because the warp may clear rows.
// Named barriers: those of ping-pong pass the right to start products from warpgroup to warpgroup,
// so that the softmax of one runs under the products of the next. first_warpgroup_barrier and the
// following ones join the threads of one warpgroup.
#pragma once

#include "schedule/pipeline.cuh"
#include "sm90/barrier.cuh"
#include "sm90/tile_order.cuh"
#include "sm90/look_ups.cuh"
#include "sm90/matmul.cuh"
#include "sm90/slopes.cuh"

namespace cuflash {

constexpr int consumers = Config::block_m / 64;  // warpgroups, of 64 rows each
// With two buffers of q, out is staged in the buffer that was read while the other one is loaded.
// With one buffer, or if out is wider than q, out goes from registers to global memory.
constexpr bool stages_out = Config::num_q_stages == 2 && Config::out_dtype == Config::dtype;
// Warps that transpose v of e4m3, whose products sum only contiguous elements.
constexpr int transposers = is_fp8 ? 3 : 0;
constexpr int first_pingpong_barrier = 1,
              first_warpgroup_barrier = first_pingpong_barrier + consumers;  // 0 is __syncthreads
static_assert(Config::num_threads == 128 * (consumers + 1),
              "one producer warpgroup, the others are consumers");
static_assert(!Config::split_keys || !is_packed, "a thread block computes one split of one tile");

// One tile of queries.
struct Work {
  int first_row;  // within its sequence; negative: no tile is left
  BatchIndex entry;

  Work() = default;
  CUFLASH_DEVICE Work(const ForwardSm90Params& params, int index, TileOrder& order)
      : Work(params, tile_of(params.grid, min(index, num_tiles(params) - 1)), order) {
    if (index >= num_tiles(params)) first_row = -1;
  }

  // Does the tile have rows? Some indices of packed sequences have none.
  CUFLASH_DEVICE bool exists() const { return !is_packed || entry.sequence() >= 0; }

  CUFLASH_DEVICE static int num_tiles(const ForwardSm90Params& params) {
    return params.grid.num_blocks * params.grid.num_owners;
  }

 private:
  CUFLASH_DEVICE Work(const ForwardSm90Params& params, const Tile& tile, TileOrder& order)
      : Work(params, tile.owner, order.place_of(params, tile.block)) {}
  CUFLASH_DEVICE Work(const ForwardSm90Params& params, int owner, const Place& place)
      : first_row(place.block * Config::block_m),
        entry(params.batch, KeyPart::owner(params, owner), place.sequence) {}
};

// Buffers of v of e4m3 before its transposition.
template <bool enabled>
struct UntransposedV {
  PanelTile<Config::block_n, Config::head_dim_v> v[Config::num_stages];
  uint64_t v_full[Config::num_stages], v_empty[Config::num_stages];
};
template <>
struct UntransposedV<false> {};

struct SharedMemory {
  using QTile = PanelTile<Config::block_m, Config::head_dim>;
  using KTile = PanelTile<Config::block_n, Config::head_dim>;
  using VTile = If<is_fp8, PanelTile<Config::head_dim_v, Config::block_n>,
                   PanelTile<Config::block_n, Config::head_dim_v>>;

  QTile q[Config::num_q_stages];
  KTile k[Config::num_stages];
  VTile v[Config::num_stages];
  UntransposedV<is_fp8> untransposed;
  LookUps<looks_up> look_ups;
  uint64_t q_full[Config::num_q_stages], q_empty[Config::num_q_stages];
  uint64_t k_full[Config::num_stages], k_empty[Config::num_stages];
  uint64_t v_full[Config::num_stages], v_empty[Config::num_stages];
  uint64_t v_raw;
  uint64_t o_full[Config::num_q_stages][consumers];
  uint64_t work_full[2], work_empty[2];
  uint64_t dependency;
  Work work[2];
  SlopeTiles<numbers_keys> slopes;
};

// The struct with the buffers to which TMA writes v.
template <typename Memory>
CUFLASH_DEVICE auto& v_buffers(Memory& smem) {
  if constexpr (is_fp8) {
    return smem.untransposed;
  } else {
    return smem;
  }
}

// Called by one thread, before any other thread uses an mbarrier.
CUFLASH_DEVICE void init_barriers(SharedMemory& smem) {
  for (int i = 0; i < Config::num_q_stages; ++i) {
    init(smem.q_full[i], 1);
    init(smem.q_empty[i], stages_out ? 1 : consumers);
    for (int w = 0; w < consumers; ++w) init(smem.o_full[i][w], 4);
  }
  for (int i = 0; i < Config::num_stages; ++i) {
    init(smem.k_full[i], 1);
    init(smem.k_empty[i], consumers);
    init(smem.v_full[i], is_fp8 ? transposers : reader_arrivals);
    init(smem.v_empty[i], consumers);
    if constexpr (is_fp8) {
      init(v_buffers(smem).v_full[i], reader_arrivals);
      init(v_buffers(smem).v_empty[i], transposers);
    }
  }
  for (int i = 0; i < 2; ++i) {
    init(smem.work_full[i], 1);
    init(smem.work_empty[i], 4 * consumers + stages_out + transposers + 2 * looks_up);
  }
  smem.look_ups.init_barriers();
  init(smem.v_raw, 1);
  init(smem.dependency, 1);
  ptx::fence_mbarrier_init();
}

// Receives the next tile of this thread block from the producer. Every reading warp calls this once
// for each tile. Its first lane reads for all lanes, and arrives once all are past their wait.
CUFLASH_DEVICE Work receive_work(SharedMemory& smem, const Ring<2>& ring) {
  const int stage = ring.stage();
  wait(smem.work_full[stage], ring.full_parity());
  const bool first = ptx::thread_index() % 32 == 0;
  Work work{};
  if (first) work = smem.work[stage];
  work.first_row = __shfl_sync(0xffffffff, work.first_row, 0);
#pragma unroll
  for (int i = 0; i < max_batch_axes; ++i) {
    work.entry.axis[i] = __shfl_sync(0xffffffff, work.entry.axis[i], 0);
  }
  arrive_if(smem.work_empty[stage], first);
  return work;
}

}  // namespace cuflash
