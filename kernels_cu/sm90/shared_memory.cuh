// What the warps of one thread block share: tiles of q, k and v, barriers, the current work.
//
//   barrier      arrivals a phase   what the end of a phase says
//   q_full       1 + bytes          q is there
//   q_empty      1 or consumers     q was read and, if out is staged in it, stored: load the next
//   k/v_full     1* + bytes         k or v of a block is there; transposers where these bring v
//   k/v_empty    consumers          every warpgroup has multiplied with it: load the next
//   v_raw        1 + bytes          v of a block is there, with rows to be cleared
//   rows.v_full  1* + bytes         of e4m3: v of a block is there in rows
//   rows.v_empty transposers        it was transposed into the ring of v: load the next
//   o_full       4 (warps)          64 rows of out are staged: store them
//   work_full    1                  the next tile is drawn
//   work_empty   readers (warps)    every reader has a copy: draw the next
//   never        -                  nobody waits: see Consumer::next_block
//
// * of v, where rows may be cleared: `reader_arrivals`.
// Named barriers: `turn` passes the right to start products from warpgroup to warpgroup, so that
// the softmax of one runs under the products of the next; `together` joins one warpgroup.
#pragma once

#include "schedule/pipeline.cuh"
#include "sm90/barrier.cuh"
#include "sm90/tile_order.cuh"
#include "sm90/look_ups.cuh"
#include "sm90/matmul.cuh"
#include "sm90/slopes.cuh"

namespace cuflash {

constexpr int consumers = Config::block_m / 64;  // warpgroups, of 64 rows each
// With two q tiles, results are staged in the one that was read while the other is under way; with
// one, or where they are wider than q, they go to global memory directly.
constexpr bool stages_out = Config::num_q_stages == 2 && Config::out_dtype == Config::dtype;
// Products of e4m3 sum what is contiguous: so many warps make rows of the columns of v.
constexpr int transposers = is_fp8 ? 3 : 0;
constexpr int first_turn = 1, first_together = first_turn + consumers;  // 0 is __syncthreads
static_assert(Config::num_threads == 128 * (consumers + 1), "one producer warpgroup");
static_assert(!Config::split_keys || !is_packed, "a thread block has one part of one tile");

// One tile of queries.
struct Work {
  int first_row;  // of its sequence; negative: no tile is left
  BatchIndex entry;

  Work() = default;
  CUFLASH_DEVICE Work(const ForwardSm90Params& params, int index, TileOrder& order)
      : Work(params, tile_of(params.grid, min(index, num_tiles(params) - 1)), order) {
    if (index >= num_tiles(params)) first_row = -1;
  }

  // Are there rows of this index?
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

// Where v of e4m3 lands, before it is transposed.
template <bool are_there>
struct RowsOfV {
  PanelTile<Config::block_n, Config::head_dim_v> v[Config::num_stages];
  uint64_t v_full[Config::num_stages], v_empty[Config::num_stages];
};
template <>
struct RowsOfV<false> {};

struct SharedMemory {
  using QTile = PanelTile<Config::block_m, Config::head_dim>;
  using KTile = PanelTile<Config::block_n, Config::head_dim>;
  using VTile = If<is_fp8, PanelTile<Config::head_dim_v, Config::block_n>,
                   PanelTile<Config::block_n, Config::head_dim_v>>;

  QTile q[Config::num_q_stages];
  KTile k[Config::num_stages];
  VTile v[Config::num_stages];
  RowsOfV<is_fp8> rows;
  LookUps<looks_up> look_ups;
  uint64_t q_full[Config::num_q_stages], q_empty[Config::num_q_stages];
  uint64_t k_full[Config::num_stages], k_empty[Config::num_stages];
  uint64_t v_full[Config::num_stages], v_empty[Config::num_stages];
  uint64_t v_raw;
  uint64_t o_full[Config::num_q_stages][consumers];
  uint64_t work_full[2], work_empty[2];
  uint64_t never;
  Work work[2];
  SlopeTiles<numbers_keys> slopes;
};

// Where TMA brings v.
template <typename Memory>
CUFLASH_DEVICE auto& landing_of_v(Memory& smem) {
  if constexpr (is_fp8) {
    return smem.rows;
  } else {
    return smem;
  }
}

// By one thread, before any other touches a barrier.
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
      init(landing_of_v(smem).v_full[i], reader_arrivals);
      init(landing_of_v(smem).v_empty[i], transposers);
    }
  }
  for (int i = 0; i < 2; ++i) {
    init(smem.work_full[i], 1);
    init(smem.work_empty[i], 4 * consumers + stages_out + transposers + 2 * looks_up);
  }
  smem.look_ups.init_barriers();
  init(smem.v_raw, 1);
  init(smem.never, 1);
  ptx::fence_mbarrier_init();
}

// The next tile of this thread block, as the producer drew it; each reading warp asks once. Its
// first lane reads for all and vouches for what it read, once all are past their wait.
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
