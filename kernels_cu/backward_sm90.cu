// dq, dk and dv on Hopper in one pass over the scores: five products for each pair of blocks.
//
//   for each tile of block_n keys:                            one block of threads
//     dk = 0, dv = 0                                          64 keys per warpgroup
//     for each batch entry that shares these keys:            heads of a group, broadcast axes
//       for each block of block_m queries that see some key:  last rows first
//         s^T = k q^T;  dp^T = v dout^T
//         p^T = exp(score(s^T) - lse)                         while dp^T is multiplied
//         dv += p^T dout
//         ds^T = p^T (dp^T - delta) score'(s^T)               also to shared memory
//         dk += ds^T q
//         sums of the block += ds k                           by the writer, in the tile's turn
//     dk *= scale
//
// What a tile adds to the sums (sm90/dq_sums.cuh) is one float32 addition of each element.
// Where they are ordered, the tile of the first keys that the block sees stores, the others add one
// after the other: a turn counts those that did. A tile waits only for tiles of its owner that hold
// keys before its own, and was drawn after them: the first tile at work never waits, whatever else
// runs on the device. All tiles walk from the last rows to the first: they follow each other
// without waiting once each has started a block behind the one before.
//
// Warpgroup 0 loads (warp 0) and writes sums (warp 1). The others consume.
//
//   barrier      arrivals a phase   what the end of a phase says
//   dq_full      4 (warps)          64 x 64 of dq are staged: add them
//   dq_empty     1                  they were read: stage the next
//   others                          sm90/key_owner.cuh
//
// Named barrier 1 joins the warpgroups: ds of a block is complete, and that of the block before
// the last was read.
#include "config.cuh"
#include "params.cuh"
#include "ptx/stmatrix.cuh"
#include "sm90/dq_sums.cuh"
#include "sm90/key_owner.cuh"

namespace cuflash {

struct SharedMemory : KeyOwnerMemory {
  using DsTile = PanelTile<Config::block_n, Config::block_m>;

  DsTile ds[2];  // ds^T: rows are keys
  alignas(128) DqSums::Slice dq[consumers][4];
  uint64_t dq_full[consumers], dq_empty[consumers];
  int tile;
};
static_assert(Config::smem_bytes == 0 || sizeof(SharedMemory) == Config::smem_bytes,
              "BackwardOnePassConfig.smem_bytes counts this struct");

static_assert(Score::is_plain, "others take registers");
static_assert(DqSums::parts == consumers, "one part of dq for each warpgroup");

// By one thread, before any other touches a barrier.
__device__ __forceinline__ void init_barriers(SharedMemory& smem) {
  init_rings(smem);
  for (int i = 0; i < consumers; ++i) {
    init(smem.dq_full[i], 4);
    init(smem.dq_empty[i], 1);
  }
  ptx::fence_mbarrier_init();
}

// ----------------------------------------------------------------------------- the loading warp
struct Producer {
  const BackwardSm90Params& params;
  SharedMemory& smem;

  __device__ __forceinline__ void run() {
    KeyOwnerProducer<LastRowsFirst>{params, smem}.run(KeyTile::at(params, smem.tile));
  }
};

// ----------------------------------------------------------------------------- the writing warp
// Whose turn it is to add to the sums of each block of queries, after the number of tiles drawn.
struct Turns {
  uint32_t* of_entry;

  __device__ __forceinline__ Turns(const BackwardSm90Params& params, int flat_entry) {
    const int64_t blocks = (params.score.seqlen_q + Config::block_m - 1) / Config::block_m;
    of_entry = params.turns + 1 + flat_entry * blocks;
  }

  __device__ __forceinline__ void await(int block, uint32_t turn) const {
    while (ptx::load_acquire(of_entry + block) != turn) {
    }
    ptx::fence_async_proxy_global();
  }

  __device__ __forceinline__ void pass_on(int block, uint32_t turn) const {
    ptx::fence_async_proxy_global();
    ptx::store_release(of_entry + block, turn + 1);
  }
};

struct Writer {
  const BackwardSm90Params& params;
  SharedMemory& smem;
  Ring<1> ring;

  __device__ __forceinline__ void run() {
    if (lane_index() != 0) return;
    const KeyTile work = KeyTile::at(params, smem.tile);
#pragma unroll 1
    for (int index = 0; index < params.grid.entries_per_owner; ++index) {
      const BatchIndex entry = work.entry(params, index);
      const Score score(params.score, entry);
      const Turns turns(params, work.owner * params.grid.entries_per_owner + index);
      const DqSums sums(params, entry);
      const Range keys{work.first_key, work.first_key + Config::block_n};
      const BlockRanges blocks = score.q_blocks(keys.begin, keys.end);
      const LastRowsFirst walk(score, blocks, keys);
#pragma unroll 1
      for (int block = walk.first(); walk.is_left(block); block = walk.next(block)) {
        const int first_row = block * Config::block_m;
        const int before = score.kv_blocks(first_row, first_row + Config::block_m).begin;
        const int turn = work.first_key / Config::block_n - before;
        write(sums, turns, block, turn);
      }
    }
    ptx::tma_store_wait();  // shared memory ends with this block of threads
  }

 private:
  __device__ __forceinline__ void write(const DqSums& sums, const Turns& turns, int block,
                                        int turn) {
#pragma unroll 1
    for (int part = 0; part < DqSums::parts; ++part) {
      wait(smem.dq_full[part], ring.full_parity());
      if (Config::ordered && part == 0) turns.await(block, turn);
      const int bytes = DqSums::Slice::bytes * sums.slices(block, part);
      if (bytes != 0) {
        const uint32_t from = ptx::shared_address(&smem.dq[part]);
        float* const to = sums.part(block, part)->value[0][0];
        if (Config::ordered && turn == 0) {
          ptx::bulk_store(to, from, bytes);
        } else {
          ptx::bulk_add(to, from, bytes);
        }
      }
      ptx::tma_store_commit();
    }
    ptx::tma_store_wait_read();
#pragma unroll
    for (int part = 0; part < consumers; ++part) arrive_if(smem.dq_empty[part], true);
    if constexpr (Config::ordered) {
      ptx::tma_store_wait();
      turns.pass_on(block, turn);
    }
    ring.advance();
  }
};

// --------------------------------------------------------------------------------- the consumers
struct Consumer : KeyOwner<64> {
  // Do registers hold dp beside the scores and dq?
  static constexpr bool dp_beside_dq = Config::head_dim + Config::head_dim_v <= 128;
  static constexpr int ds_complete = 1;  // a named barrier

  __device__ __forceinline__ void run() {
    const KeyTile work = KeyTile::at(params, shared().tile);
    clear(dk_acc);
    clear(dv_acc);
    wait_for_keys();
#pragma unroll 1
    for (int index = 0; index < params.grid.entries_per_owner; ++index) {
      const Score score(params.score, work.entry(params, index));
      const Range tile{work.first_key, work.first_key + Config::block_n};
      const BlockRanges blocks = score.q_blocks(tile.begin, tile.end);
      const LastRowsFirst walk(score, blocks, tile);
#pragma unroll 1
      for (int block = walk.first(); walk.is_left(block); block = walk.next(block)) {
        const int first_row = block * Config::block_m;
        add_block(score, first_row, work.first_key, walk.masked(block));
      }
    }
    ptx::wgmma_wait<0>();
    ptx::pin(flat(dk_acc));
    ptx::pin(flat(dv_acc));
    if (warp_agrees(ring.uses > 0)) {
      float dq_acc[1][8][4];
      start_dq_of_block_before(dq_acc);
      ptx::wgmma_wait<0>();
      stage_dq_of_block_before(dq_acc);
      ptx::fence_async_proxy();
      arrive_as_warp(shared().dq_full[warpgroup]);
    }
    store(KeyTile::at(params, shared().tile));
  }

 private:
  __device__ __forceinline__ SharedMemory& shared() const {
    return static_cast<SharedMemory&>(smem);
  }

  // dq of the block before is multiplied while this one's exponentials are computed, and staged
  // while its dv is multiplied. Before the first block it is that of whatever lies there, and not
  // written.
  __device__ __forceinline__ void add_block(const Score& score, int first_row, int first_key,
                                            bool masked) {
#pragma unroll
    for (int part = 0; part < DqSums::row_parts; ++part) {
      float s_acc[1][tiles][4], dp_acc[1][tiles][4], dq_acc[1][8][4];
      float2 lse[tiles], delta[tiles];
      const int first = 64 * part;
      const bool with_dq = part == 0, dp_early = !with_dq || dp_beside_dq;
      start_scores(s_acc, ring, first);
      if (dp_early) start_dp(dp_acc, first);
      if (with_dq) start_dq_of_block_before(dq_acc);
      read(lse, smem.lse, first);
      if (with_dq && dp_early) {
        ptx::wgmma_wait<2>();
      } else {
        ptx::wgmma_wait<1>();
      }
      ptx::pin(flat(s_acc));  // and dk of the part before has read frag
      if (with_dq) release_block_before();
      compute_p(s_acc, s_acc, lse, score, first_row, first_key, first);
      hide_pairs(s_acc, score, first_row, first_key, masked, first);
      to_operand(frag, s_acc);
      start_dv(first);
      if (dp_early) read(delta, smem.delta, first);
      ptx::wgmma_wait<1>();
      if (with_dq) stage_dq_of_block_before(dq_acc);
      if (!dp_early) {
        start_dp(dp_acc, first);
        read(delta, smem.delta, first);
        ptx::wgmma_wait<0>();
      }
      ptx::pin(flat(dp_acc));
      compute_ds(s_acc, dp_acc, delta);
      ptx::wgmma_wait<0>();  // dv has read frag
      to_operand(frag, s_acc);
      stage_ds(part);
      start_dk(first);
    }
    ptx::fence_async_proxy();
    __syncwarp();  // its lanes are done: one speaks for all
    arrive_if(shared().dq_full[warpgroup], lane_index() == 0 && ring.uses > 0);
    ring.advance();
  }

  __device__ __forceinline__ void start_dq_of_block_before(float (&dq_acc)[1][8][4]) const {
    ptx::named_barrier_sync(ds_complete, 128 * consumers);
    start_panel_product<SharedMemory::DsTile, SharedMemory::KTile>(
        dq_acc, shared().ds[(ring.uses + 1) % 2].summed_over_rows(0, warpgroup % DqSums::row_parts),
        smem.k.summed_over_rows(0, warpgroup / DqSums::row_parts));
  }

  __device__ __forceinline__ void stage_dq_of_block_before(float (&dq_acc)[1][8][4]) const {
    ptx::pin(flat(dq_acc));
    if (warp_agrees(ring.uses > 0)) stage_dq(dq_acc);
  }

  // This warpgroup's rows of 64 columns of ds^T for all.
  __device__ __forceinline__ void stage_ds(int part) const {
    const uint32_t thread = ptx::thread_index() - 128, lane = thread % 32;
    const uint32_t row = thread / 32 * 16 + lane % 16;
    const uint32_t lane_address = ptx::shared_address(shared().ds[ring.uses % 2].data[part]) +
                                  row * 128 + (((lane / 16) ^ (row & 7)) << 4);
#pragma unroll
    for (int i = 0; i < tiles / 2; ++i) {
      ptx::stmatrix_x4(lane_address ^ (i << 5), frag[0][i][0], frag[0][i][1], frag[0][i][2],
                       frag[0][i][3]);
    }
  }

  __device__ __forceinline__ void stage_dq(const float (&dq_acc)[1][8][4]) const {
    wait(shared().dq_empty[warpgroup], Ring<1>{ring.uses - 1}.empty_parity());
    const uint32_t thread = ptx::thread_index() % 128;
    shared().dq[warpgroup][thread / 32].write(dq_acc[0], thread % 32);
  }
};

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads, 1)
    cuflash_backward_sm90(const __grid_constant__ cuflash::BackwardSm90Params params) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  using namespace cuflash;
  SharedMemory& smem = *reinterpret_cast<SharedMemory*>(smem_bytes);
  // Drawn, so that a tile runs only when all before it do.
  if (threadIdx.x == 0) smem.tile = Config::ordered ? atomicAdd(params.turns, 1) : blockIdx.x;
  run_roles<Producer, Consumer, Writer>(params, smem);
}
