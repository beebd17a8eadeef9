// Attention forward for Hopper: TMA, warp-specialised wgmma, FlashAttention-3 with K released early.
//
//   for each tile of block_m rows of q:                       persistent blocks of threads
//     m = -inf, l = 0, o = 0
//     for each block of block_n keys that some row sees, last first:
//       s = q k^T;  s = score(s);  m' = max(m, rowmax s)      64 rows per warpgroup
//       p = exp(s - m');  l = l exp(m - m') + rowsum p;  o = o exp(m - m') + p v
//     out = o / l,  lse = m + log l
//
// Warpgroup 0 produces: warp 0 draws tiles and loads, warp 1 stores results. The others consume 64 rows
// of the tile each; s of a block is multiplied together with p v of the block before, so that the
// softmax runs under p v. m' keeps the old maximum unless a row's grew by more than a factor of 2^8.
//
// Shared memory: q[num_q_stages], k[num_stages], v[num_stages], every tile in panels of 64 columns;
// out is staged in q. Barriers, with arrivals per phase and what a phase allows:
//
//   q_full      1 + bytes         q is there
//   q_empty     1 or warps        q was read and, if out is staged in it, stored: it may be loaded
//   k/v_full    1 + bytes         k or v of a block is there
//   k/v_empty   consumers         that buffer may be loaded
//   v_raw       1 + bytes         v of a block with rows nobody may see is there, to be cleared
//   o_full      4 (warps)         64 rows of out are staged
//   work_full   1                 the next tile is drawn
//   work_empty  readers (warps)   that slot may be written
//   never       -                 nobody waits: see Consumer::next_block
//
// Named barriers: `turn` passes the right to start products from warpgroup to warpgroup, so that the
// softmax of one runs under the products of the next; `together` joins one warpgroup.
// docs/forward-sm90.md draws the schedule.
#include "config.cuh"
#include "params.cuh"
#include "numeric.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/matmul_sm90.cuh"
#include "scheduler.cuh"
#include "score.cuh"
#include "exact.cuh"
#include "softmax.cuh"
#include "pipeline.cuh"

namespace cuflash {

constexpr int consumers = Config::block_m / 64;
// With two q tiles, results are staged in the one that was read while the other is under way; with
// one they go to global memory directly.
constexpr bool stages_out = Config::num_q_stages == 2;
constexpr int first_turn = 1, first_together = first_turn + consumers;  // named barriers
constexpr int producer_registers = consumers == 2 ? 40 : 32;
constexpr int consumer_registers = consumers == 2 ? 232 : 160;
static_assert(Config::num_threads == 128 * (consumers + 1), "one producer warpgroup");

// One tile of queries.
struct Work {
  int first_row;  // negative: no tile is left
  BatchIndex entry;

  __device__ __forceinline__ Work(const ForwardSm90Params& params, int index)
      : Work(params, tile_of(params.grid, min(index, num_tiles(params) - 1))) {
    if (index >= num_tiles(params)) first_row = -1;
  }

  // Coordinates of this entry in the tensor map of an operand: axes it is broadcast along have
  // extent 1 there.
  __device__ __forceinline__ void coordinates(int (&batch)[3], const Layout& layout) const {
#pragma unroll
    for (int i = 0; i < 3; ++i) batch[i] = layout.batch.axis[i] != 0 ? entry.axis[i] : 0;
  }

 private:
  __device__ __forceinline__ static int num_tiles(const ForwardSm90Params& params) {
    return params.grid.num_blocks * params.grid.num_owners;
  }

  __device__ __forceinline__ Work(const ForwardSm90Params& params, const Tile& tile)
      : first_row((Score::last_rows_see_most ? params.grid.num_blocks - 1 - tile.block
                                             : tile.block) *
                  Config::block_m),
        entry(params.batch, tile.owner) {}
};

struct SharedMemory {
  using QTile = PanelTile<Config::block_m, Config::head_dim>;
  using KTile = PanelTile<Config::block_n, Config::head_dim>;
  using VTile = PanelTile<Config::block_n, Config::head_dim_v>;

  QTile q[Config::num_q_stages];
  KTile k[Config::num_stages];
  VTile v[Config::num_stages];
  uint64_t q_full[Config::num_q_stages], q_empty[Config::num_q_stages];
  uint64_t k_full[Config::num_stages], k_empty[Config::num_stages];
  uint64_t v_full[Config::num_stages], v_empty[Config::num_stages];
  uint64_t v_raw;
  uint64_t o_full[Config::num_q_stages][consumers];
  uint64_t work_full[2], work_empty[2];
  uint64_t never;
  int awaited[consumers][4];  // by warps that write again what is being stored: see store_exact
  Work work[2];
};
static_assert(Config::smem_bytes == 0 || sizeof(SharedMemory) == Config::smem_bytes,
              "ForwardSm90Config.smem_bytes counts this struct");

__device__ __forceinline__ void wait(const uint64_t& barrier, uint32_t parity) {
  ptx::mbarrier_wait(ptx::shared_address(&barrier), parity);
}
__device__ __forceinline__ void arrive_if(uint64_t& barrier, bool mine) {
  ptx::mbarrier_arrive_if(ptx::shared_address(&barrier), mine);
}

// The next tile of this block of threads, as the producer drew it.
__device__ __forceinline__ Work receive_work(SharedMemory& smem, const Ring<2>& ring) {
  const int stage = ring.stage();
  wait(smem.work_full[stage], ring.full_parity());
  const Work work = smem.work[stage];
  __syncwarp();
  arrive_if(smem.work_empty[stage], lane_index() == 0);
  return work;
}

// ---------------------------------------------------------------------------------- producer warp
struct Producer {
  const ForwardSm90Params& params;
  SharedMemory& smem;
  Ring<Config::num_q_stages> q_ring;
  Ring<Config::num_stages> k_ring, v_ring;
  Ring<2> work_ring;
  Ring<1> raw_ring;

  // All tiles of this block of threads; the whole warp comes along, its first lane issues.
  __device__ __forceinline__ void run() {
    if (lane_index() < 4) ptx::prefetch_tensor_map((&params.q_map)[lane_index()]);
#pragma unroll 1
    for (int index = blockIdx.x;;) {
      const Work work(params, index);
      publish(work);
      if (work.first_row < 0) return;
      const Score score(params.score, work.entry);
      const BlockRanges blocks = score.kv_blocks(work.first_row, work.first_row + Config::block_m);
      const Range seen = score.kv_range(0, params.score.seqlen_q);  // by any row of this entry
      int block = blocks.end - 1;
      // A single q is free only when the tile before is done, a second one long before k.
      if constexpr (stages_out) load_q(work);
      if (block >= blocks.begin) load_k(work, block);
      if constexpr (!stages_out) load_q(work);
#pragma unroll 1
      for (; block > blocks.begin; --block) {
        load_k(work, block - 1);
        load_v(work, block, seen);
      }
      // Drawn late: drawn early, longest first loses its balance. The answer comes during load_v.
      const int drawn = draw();
      if (block >= blocks.begin) load_v(work, block, seen);
      index = __shfl_sync(0xffffffff, drawn, 0);
    }
  }

 private:
  __device__ __forceinline__ void publish(const Work& work) {
    const int stage = work_ring.stage();
    wait(smem.work_empty[stage], work_ring.empty_parity());
    if (lane_index() == 0) smem.work[stage] = work;
    arrive_if(smem.work_full[stage], lane_index() == 0);
    work_ring.advance();
  }

  // In lane 0.
  __device__ __forceinline__ int draw() const {
    if (lane_index() != 0) return 0;
    if (params.tile_counter != nullptr) return atomicAdd(params.tile_counter, 1) + gridDim.x;
    // Back and forth over the longest-first list, which evens out what falls along it.
    const int turn = work_ring.uses;
    return turn * gridDim.x + (turn % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  }

  template <typename Tile>
  __device__ __forceinline__ void load(Tile& tile, const ptx::TensorMap& map, const Layout& layout,
                                       uint64_t& full, const Work& work, int first_row) {
    if (lane_index() == 0) {
      int batch[3];
      work.coordinates(batch, layout);
      const uint32_t barrier = ptx::shared_address(&full);
      ptx::mbarrier_arrive_expect(barrier, Tile::bytes);
#pragma unroll
      for (int panel = 0; panel < Tile::num_panels; ++panel) {
        ptx::tma_load(ptx::shared_address(tile.data[panel]), map, barrier, 64 * panel, first_row,
                      batch);
      }
    }
    __syncwarp();  // no lane may be left two phases behind in a wait
  }

  __device__ __forceinline__ void load_q(const Work& work) {
    const int stage = q_ring.stage();
    wait(smem.q_empty[stage], q_ring.empty_parity());
    load(smem.q[stage], params.q_map, params.q_layout, smem.q_full[stage], work, work.first_row);
    q_ring.advance();
  }

  __device__ __forceinline__ void load_k(const Work& work, int block) {
    const int stage = k_ring.stage();
    wait(smem.k_empty[stage], k_ring.empty_parity());
    load(smem.k[stage], params.k_map, params.k_layout, smem.k_full[stage], work,
         block * Config::block_n);
    k_ring.advance();
  }

  // Rows outside `seen` must not reach p v, where 0 * NaN would count. Past the end of the tensor TMA
  // brings zeros; what lies before it is cleared here.
  __device__ __forceinline__ void load_v(const Work& work, int block, Range seen) {
    const int stage = v_ring.stage(), first_key = block * Config::block_n;
    const Range stale{max(seen.begin - first_key, 0), seen.end - first_key};
    const int loaded = min(Config::block_n, params.score.seqlen_k - first_key);
    const bool clears = stale.begin > 0 || stale.end < loaded;
    wait(smem.v_empty[stage], v_ring.empty_parity());
    load(smem.v[stage], params.v_map, params.v_layout, clears ? smem.v_raw : smem.v_full[stage],
         work, first_key);
    if (clears) {
      wait(smem.v_raw, raw_ring.full_parity());
      raw_ring.advance();
      clear_rows(smem.v[stage], 0, stale.begin);
      clear_rows(smem.v[stage], stale.end, loaded);
      ptx::fence_async_proxy();
      __syncwarp();
      arrive_if(smem.v_full[stage], lane_index() == 0);
    }
    v_ring.advance();
  }

  template <typename Tile>
  __device__ __forceinline__ void clear_rows(Tile& tile, int begin, int end) {
#pragma unroll 1
    for (int row = begin; row < end; ++row) {
#pragma unroll
      for (int panel = 0; panel < Tile::num_panels; ++panel) {
        reinterpret_cast<uint32_t*>(tile.data[panel][row])[lane_index()] = 0;
      }
    }
  }
};

// ------------------------------------------------------------------------------------- store warp
// Sends the staged results of each warpgroup on their way and hands q back to the producer.
__device__ __forceinline__ void store_tiles(const ForwardSm90Params& params, SharedMemory& smem) {
  int batch[3];
#pragma unroll 1
  for (uint32_t tiles = 0;; ++tiles) {
    const Ring<Config::num_q_stages> q_ring{tiles};
    const Work work = receive_work(smem, Ring<2>{tiles});
    if (work.first_row < 0) break;
    work.coordinates(batch, params.out_layout);
    const int stage = q_ring.stage();
#pragma unroll 1
    for (int w = 0; w < consumers; ++w) {
      wait(smem.o_full[stage][w], q_ring.full_parity());
      __syncwarp();  // as in Producer::load
      if (lane_index() != 0) continue;
#pragma unroll
      for (int panel = 0; panel < SharedMemory::VTile::num_panels; ++panel) {
        ptx::tma_store(params.out_map, ptx::shared_address(smem.q[stage].data[panel][64 * w]),
                       64 * panel, work.first_row + 64 * w, batch);
      }
      ptx::tma_store_commit();
      for (int warp = 0; warp < 4; ++warp) {
        volatile int& awaited = smem.awaited[w][warp];
        if (awaited == 0) continue;
        ptx::tma_store_wait();
        awaited = 0;
      }
    }
    if (lane_index() == 0) ptx::tma_store_wait_read();
    arrive_if(smem.q_empty[stage], lane_index() == 0);
  }
  if (lane_index() == 0) ptx::tma_store_wait();
}

// ---------------------------------------------------------------------------- consumer warpgroups
// Maximum and sum of a row in the pieces that the schedule needs.
struct SplitSoftmax : OnlineSoftmax<1> {
  float shift[2];    // the reference that exponents are formed against
  float rescale[2];  // of what was summed before
  float block_sum[2];

  template <int tiles>
  __device__ __forceinline__ void find_maximum(const float (&s_acc)[1][tiles][4],
                                               const Score& score) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float block_max = row_max[0][half];
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
        block_max = fmaxf(block_max, fmaxf(s_acc[0][t][2 * half], s_acc[0][t][2 * half + 1]));
      }
      block_max = quad_max(block_max);
      const float old_reference = score.reference(row_max[0][half]);
      const float new_reference = score.reference(block_max);
      // Relative to a slightly old maximum p is at most 2^8: as exact, and o keeps its scale.
      const bool grew = score.exponent_between(new_reference, old_reference) > 8.0f;
      row_max[0][half] = grew ? block_max : row_max[0][half];
      const float reference = grew ? new_reference : old_reference;
      shift[half] = reference == -infinity() ? 0.0f : reference;
      rescale[half] =
          grew ? ptx::exp2_approx(score.exponent_between(old_reference, shift[half])) : 1.0f;
      row_sum[0][half] *= rescale[half];
      block_sum[half] = 0.0f;
    }
  }

  // Scores of column tiles [begin, end) become probabilities.
  template <int begin, int end, int tiles>
  __device__ __forceinline__ void exponentiate(float (&s_acc)[1][tiles][4], const Score& score) {
#pragma unroll
    for (int t = begin; t < end; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s_acc[0][t][i] = ptx::exp2_approx(score.exponent(s_acc[0][t][i], shift[i / 2]));
      }
    }
#pragma unroll
    for (int t = begin; t < end; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        block_sum[half] += s_acc[0][t][2 * half] + s_acc[0][t][2 * half + 1];
      }
    }
  }

  __device__ __forceinline__ void add_block() {
    row_sum[0][0] += block_sum[0];
    row_sum[0][1] += block_sum[1];
  }

  template <int tiles>
  __device__ __forceinline__ void rescale_rows(float (&o_acc)[1][tiles][4]) const {
    if (!__any_sync(0xffffffff, rescale[0] != 1.0f || rescale[1] != 1.0f)) return;
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o_acc[0][t][i] *= rescale[i / 2];
    }
  }
};

struct Consumer {
  static constexpr int s_tiles = Config::block_n / 8, o_tiles = Config::head_dim_v / 8;
  static constexpr bool masks_inner_blocks =
      Config::window_left || Config::window_right || Score::may_hide_rows;

  const ForwardSm90Params& params;
  SharedMemory& smem;
  const int warpgroup;  // of the consumers
  Ring<Config::num_stages> ring;  // of k and v; at the block whose p v is pending, or the next
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
      store(work, score);
    }
  }

 private:
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
      if constexpr (masks_inner_blocks) {
#pragma unroll 1
        for (; block >= own.full_end; --block) next_block<true>(score, first_row, block);
      }
#pragma unroll 1
      for (; block >= own.full_begin; --block) next_block<false>(score, first_row, block);
      if constexpr (Config::window_left) {
#pragma unroll 1
        for (; block >= own.begin; --block) next_block<true>(score, first_row, block);
      }
      last_product();
    }
#pragma unroll 1
    for (; block >= tile.begin; --block) skip_block(true);
    // By every warp: nothing else tells that all of them are past the wait for q.
    if constexpr (!stages_out) arrive_if(smem.q_empty[q_ring.stage()], lane_index() == 0);
  }

  __device__ __forceinline__ bool leads() const { return threadIdx.x % 128 == 0; }
  __device__ __forceinline__ void take_turn() const {
    ptx::named_barrier_sync(first_turn + warpgroup, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    const int next = warpgroup + 1 == consumers ? 0 : warpgroup + 1;
    ptx::named_barrier_arrive(first_turn + next, 256);
  }

  __device__ __forceinline__ void start_scores(float (&s_acc)[1][s_tiles][4]) {
    start_transposed_product<SharedMemory::QTile, SharedMemory::KTile>(
        s_acc, smem.q[q_ring.stage()].summed_over_columns(64 * warpgroup),
        smem.k[ring.stage()].summed_over_columns());
  }

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

  __device__ __forceinline__ void start_product_with(const Ring<Config::num_stages>& at) {
    wait(smem.v_full[at.stage()], at.full_parity());
    start_product<SharedMemory::VTile>(o_acc, p_frag, smem.v[at.stage()].summed_over_rows());
  }

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
    // No warp may still wait for a phase that the release lets pass twice.
    ptx::named_barrier_sync(first_together + warpgroup, 128);
    arrive_if(smem.k_empty[ring.stage()], leads());
    arrive_if(smem.v_empty[ring.stage()], leads());
    ring.advance();
    if (!with_turn) return;
    take_turn();
    pass_turn();
  }

  template <bool masked>
  __device__ __forceinline__ void apply_score(float (&s_acc)[1][s_tiles][4], const Score& score,
                                              int first_row, int first_key) const {
    if constexpr (masked || !Config::scale_in_exponent) {
      const int warp_row = first_row + 16 * (warp_index() % 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int q_idx = warp_row + fragment_row(0, 2 * half);
        // Relative to this lane's first column: compared with one constant per register.
        const int first_column = first_key + fragment_column(0, 0);
        Range columns = score.kv_range(q_idx, q_idx + 1).relative_to(first_column);
        if constexpr (!Config::window_left) columns.begin = 0;  // nothing is hidden on that side
#pragma unroll
        for (int t = 0; t < s_tiles; ++t) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int column = 8 * t + i;
            float& s = s_acc[0][t][2 * half + i];
            const int kv_idx = first_column + column;
            const bool visible =
                !masked || (columns.contains(column) && score.unmasked(q_idx, kv_idx));
            s = visible ? score.apply(s, q_idx, kv_idx) : -infinity();
          }
        }
      }
    }
  }

  // out and lse of these 64 rows; rows that saw nothing become +0 and -inf.
  __device__ __forceinline__ void store(const Work& work, const Score& score) {
    const int warp = warp_index() % 4;
    const int warp_row = work.first_row + 64 * warpgroup + 16 * warp;
    const uint32_t broken_rows = non_finite_rows(o_acc[0]);
    softmax.finish();
    bool hidden[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.row_sum[0][half];
      hidden[half] = warp_row + fragment_row(0, 2 * half) >= score.seqlen.q || sum == 0.0f;
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
      stage_out(warp, broken_rows != 0);
    } else {
      store_out(work, warp_row);
    }
    if (broken_rows != 0) store_exact(work, warp_row, broken_rows);
    if (params.lse == nullptr || lane_index() % 4 != 0) return;
    float* lse = params.lse + work.entry * params.lse_layout.batch;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int q_idx = warp_row + fragment_row(0, 2 * half);
      if (q_idx >= params.score.seqlen_q) continue;
      lse[q_idx * params.lse_layout.row] =
          hidden[half] ? -infinity() : softmax.lse(0, half, score);
    }
  }

  // These 64 rows of q were read by this warpgroup alone, which is done with them.
  __device__ __forceinline__ void stage_out(int warp, bool awaits) {
    const int lane = lane_index(), stage = q_ring.stage();
    auto& tile = smem.q[stage];
    const int row = 64 * warpgroup + 16 * warp + lane % 16;
#pragma unroll
    for (int t = 0; t < o_tiles; t += 2) {
      const int chunk = t % 8 + lane / 16;
      const auto& o = o_acc[0];
      ptx::stmatrix_x4(
          ptx::shared_address(tile.data[t / 8]) + tile.chunk_offset(row, chunk),
          pack<Config::dtype>(o[t][0], o[t][1]), pack<Config::dtype>(o[t][2], o[t][3]),
          pack<Config::dtype>(o[t + 1][0], o[t + 1][1]),
          pack<Config::dtype>(o[t + 1][2], o[t + 1][3]));
    }
    if (awaits) smem.awaited[warpgroup][warp] = 1;
    ptx::fence_async_proxy();
    __syncwarp();
    arrive_if(smem.o_full[stage][warpgroup], lane == 0);
  }

  // Rows with anything non-finite once more, from the pairs that see each other, when what was
  // staged has reached memory.
  __device__ __forceinline__ void store_exact(const Work& work, int warp_row, uint32_t rows) {
    if constexpr (stages_out) {
      const volatile int& awaited = smem.awaited[warpgroup][warp_index() % 4];
      while (awaited != 0) {
      }
    }
    __syncwarp();
    for_each_bit(rows, [&](int row) {
      const int q_idx = warp_row + row;
      if (q_idx < Score(params.score, work.entry).seqlen.q) exact_out(params, work.entry, q_idx);
    });
  }

  // The four lanes of a quad trade places, so that each stores eight neighbouring columns.
  __device__ __forceinline__ void store_out(const Work& work, int warp_row) {
    const int quad_lane = lane_index() % 4;
    Element* out = static_cast<Element*>(params.out) + work.entry * params.out_layout.batch;
#pragma unroll
    for (int t = 0; t < o_tiles; t += 4) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] = pack<Config::dtype>(o_acc[0][t + i][2 * half], o_acc[0][t + i][2 * half + 1]);
        }
        transpose_quad(x);
        const int q_idx = warp_row + fragment_row(0, 2 * half);
        const int column = 8 * (t + quad_lane);
        if (q_idx < params.score.seqlen_q && column < params.head_dim_v) {
          *reinterpret_cast<uint4*>(out + q_idx * params.out_layout.row + column) =
              make_uint4(x[0], x[1], x[2], x[3]);
        }
      }
    }
  }

  // x[i] of lane j of a quad and x[j] of lane i change places.
  __device__ __forceinline__ static void transpose_quad(uint32_t (&x)[4]) {
    const bool odd = lane_index() & 1, high = lane_index() & 2;
    uint32_t a = __shfl_xor_sync(0xffffffff, odd ? x[0] : x[1], 1);
    uint32_t b = __shfl_xor_sync(0xffffffff, odd ? x[2] : x[3], 1);
    (odd ? x[0] : x[1]) = a;
    (odd ? x[2] : x[3]) = b;
    a = __shfl_xor_sync(0xffffffff, high ? x[0] : x[2], 2);
    b = __shfl_xor_sync(0xffffffff, high ? x[1] : x[3], 2);
    (high ? x[0] : x[2]) = a;
    (high ? x[1] : x[3]) = b;
  }
};

__device__ __forceinline__ void init_barriers(SharedMemory& smem) {
  const auto init = [](uint64_t& barrier, int arrivals) {
    ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
  };
  for (int i = 0; i < Config::num_q_stages; ++i) {
    init(smem.q_full[i], 1);
    init(smem.q_empty[i], stages_out ? 1 : 4 * consumers);
    for (int w = 0; w < consumers; ++w) init(smem.o_full[i][w], 4);
  }
  for (int i = 0; i < Config::num_stages; ++i) {
    init(smem.k_full[i], 1);
    init(smem.k_empty[i], consumers);
    init(smem.v_full[i], 1);
    init(smem.v_empty[i], consumers);
  }
  for (int i = 0; i < 2; ++i) {
    init(smem.work_full[i], 1);
    init(smem.work_empty[i], 4 * consumers + stages_out);
  }
  for (int w = 0; w < consumers; ++w) {
    for (int warp = 0; warp < 4; ++warp) smem.awaited[w][warp] = 0;
  }
  init(smem.v_raw, 1);
  init(smem.never, 1);
  ptx::fence_mbarrier_init();
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads, 1)
    cuflash_forward_sm90(const __grid_constant__ cuflash::ForwardSm90Params params) {
  using namespace cuflash;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  SharedMemory& smem = *reinterpret_cast<SharedMemory*>(smem_bytes);
  if (threadIdx.x == 0) init_barriers(smem);
  __syncthreads();
  const int warp = __shfl_sync(0xffffffff, warp_index(), 0);
  if (warp < 4) {
    ptx::give_registers<producer_registers>();
    if (warp == 0) Producer{params, smem}.run();
    if (stages_out && warp == 1) store_tiles(params, smem);
  } else {
    ptx::take_registers<consumer_registers>();
    Consumer{params, smem, warp / 4 - 1}.run();
  }
}
