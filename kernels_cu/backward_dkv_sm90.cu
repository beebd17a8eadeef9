// dk and dv (or one of them) on Hopper: TMA and warp-specialised wgmma; no atomics, the order of
// every sum is fixed.
//
//   for each tile of block_n keys:                            one block of threads
//     dk = 0, dv = 0                                          64 keys per warpgroup
//     for each batch entry that shares these keys:            heads of a group, broadcast axes
//       for each block of block_m queries that see some key:  masked blocks first
//         s^T = k q^T;  dp^T = v dout^T
//         p^T = exp(score(s^T) - lse)                         while dp^T is multiplied
//         dv += p^T dout
//         ds^T = p^T (dp^T - delta) score'(s^T)               while dv is multiplied
//         dk += ds^T q                                        until s^T of the next block is there
//     dk *= scale
//
// p^T and ds^T are operands in the registers that hold them: rows of a warpgroup are keys, both
// results are sums over columns. Warpgroup 0 produces: its first warp loads. The others consume.
//
//   barrier      arrivals a phase   what the end of a phase says
//   keys_full    1 + bytes          k and v of the tile are there
//   full         32 + bytes         q and dout of a block are there, and lse and delta of its rows
//   raw          1 + bytes          q and dout are there, of which rows are to be cleared
//   empty        consumers          every warpgroup is done with the block: load the next
#include "config.cuh"
#include "params.cuh"
#include "numeric.cuh"
#include "pipeline.cuh"
#include "scheduler.cuh"
#include "score.cuh"
#include "segments.cuh"
#include "exact.cuh"
#include "tile/matmul_sm90.cuh"
#include "tile/store.cuh"
#include "sm90/gradient.cuh"
#include "sm90/load.cuh"

namespace cuflash {

struct SharedMemory {
  using KTile = PanelTile<Config::block_n, Config::head_dim>;
  // dv alone does not need v: eight rows, the least that a tile has, stand for it.
  using VTile = PanelTile<Config::grad_k ? Config::block_n : 8, Config::head_dim_v>;
  using QTile = PanelTile<Config::block_m, Config::head_dim>;
  using DoutTile = PanelTile<Config::block_m, Config::head_dim_v>;

  QTile q[Config::num_stages];
  DoutTile dout[Config::num_stages];
  KTile k;
  VTile v;
  alignas(16) float lse[Config::num_stages][Config::block_m];
  alignas(16) float delta[Config::num_stages][Config::block_m];
  uint64_t full[Config::num_stages], empty[Config::num_stages];
  uint64_t keys_full, raw;
};
static_assert(Config::smem_bytes == 0 || sizeof(SharedMemory) == Config::smem_bytes,
              "BackwardKVSm90Config.smem_bytes counts this struct");
static_assert(Config::block_n == 64 * consumers, "64 keys per warpgroup");

// By one thread, before any other touches a barrier.
__device__ __forceinline__ void init_barriers(SharedMemory& smem) {
  for (int i = 0; i < Config::num_stages; ++i) {
    init(smem.full[i], 32);  // the lanes of the producer
    init(smem.empty[i], consumers);
  }
  init(smem.keys_full, 1);
  init(smem.raw, 1);
  ptx::fence_mbarrier_init();
}

// The tile of this block of threads, as often as it is asked for.
struct Work {
  int first_key;
  int owner;
  int sequence;

  __device__ __forceinline__ static Work of_this_block(const BackwardParams& params) {
    const Tile tile = tile_of(params.grid, ptx::block_index());
    // Under a causal bound the first keys are seen by the most queries.
    const Place place = place_of<Config::block_n>(Packing::of_keys(params.score), tile.block);
    return {place.block * Config::block_n, tile.owner, place.sequence};
  }

  // The `index`-th batch entry of the owner.
  __device__ __forceinline__ BatchIndex entry(const BackwardParams& params, int index) const {
    return {params.batch, owner * params.grid.entries_per_owner + index, sequence};
  }
};

// ---------------------------------------------------------------------------------- the producer
// Statistics of the rows of a block, dealt out to the lanes; a row past the end sees nothing.
struct LaneRows {
  static constexpr int count = (Config::block_m + 31) / 32;

  RowStatistics row[count];

  __device__ __forceinline__ LaneRows(const RowStatistics* from, int first_row, int num_rows) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int q_idx = first_row + 32 * i + lane_index();
      row[i] = q_idx < num_rows ? from[q_idx] : RowStatistics{infinity(), 0.0f};
    }
  }

  __device__ __forceinline__ void store(SharedMemory& smem, int stage) const {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int at = 32 * i + lane_index();
      if (Config::block_m % 32 != 0 && at >= Config::block_m) break;
      smem.lse[stage][at] = row[i].lse;
      smem.delta[stage][at] = row[i].delta;
    }
  }

  // Rows that see nothing, lanes as bits.
  __device__ __forceinline__ uint32_t hidden(int i) const {
    return __ballot_sync(0xffffffff, row[i].lse == infinity());
  }
};

struct Producer {
  const BackwardSm90Params& params;
  SharedMemory& smem;
  Ring<Config::num_stages> ring;
  Ring<1> raw_ring;

  __device__ __forceinline__ void run() {
    const Work work = Work::of_this_block(params);
    if (lane_index() == 0) load_keys(work);
    __syncwarp();
#pragma unroll 1
    for (int index = 0; index < params.grid.entries_per_owner; ++index) {
      const BatchIndex entry = work.entry(params, index);
      const Score score(params.score, entry);
      const Range keys{work.first_key, work.first_key + Config::block_n};
      const BlockRanges blocks = score.q_blocks(keys.begin, keys.end);
      VisitedBlocks<Walk::queries> visited(score, blocks, keys);
      const Seqlen& seqlen = score.seqlen;
      const RowStatistics* rows = params.rows + entry * params.rows_layout.batch + seqlen.first_q;
      const auto rows_of = [&](int block) {
        return LaneRows(rows, block * Config::block_m, seqlen.rows_q);
      };
      int block = visited.first_from(blocks.begin);
      LaneRows statistics = rows_of(block);
#pragma unroll 1
      while (block < blocks.end) {
        load_rows(entry, seqlen.first_q + block * Config::block_m, statistics);
        block = visited.next_after(block);
        statistics = rows_of(block);  // on its way while the next buffer is waited for
      }
    }
  }

 private:
  // In lane 0. Broadcast axes are those that an owner's entries differ in.
  __device__ __forceinline__ void load_keys(const Work& work) {
    const BatchIndex entry = work.entry(params, 0);
    constexpr int bytes =
        SharedMemory::KTile::bytes + (Config::grad_k ? SharedMemory::VTile::bytes : 0);
    ptx::mbarrier_arrive_expect(ptx::shared_address(&smem.keys_full), bytes);
    const int first_key = Seqlen(params.score, entry).first_k + work.first_key;
    start_load(smem.k, params.k_map, params.k_layout, entry, first_key, smem.keys_full);
    if constexpr (Config::grad_k) {
      start_load(smem.v, params.v_map, params.v_layout, entry, first_key, smem.keys_full);
    }
  }

  // Rows of q from `first_row` of the array on. Nothing of a row that saw nothing, or that belongs
  // to the next packed sequence, may reach a product, where 0 * NaN would count.
  __device__ __forceinline__ void load_rows(const BatchIndex& entry, int first_row,
                                            const LaneRows& statistics) {
    const int stage = ring.stage();
    const int loaded = params.score.seqlen_q - first_row;  // what lies behind arrives as zeros
    bool clears = false;
#pragma unroll
    for (int i = 0; i < LaneRows::count; ++i) {
      const bool exists = 32 * i + lane_index() < min(loaded, Config::block_m);
      clears |= __any_sync(0xffffffff, exists && statistics.row[i].lse == infinity());
    }
    wait(smem.empty[stage], ring.empty_parity());
    statistics.store(smem, stage);
    if (lane_index() == 0) {
      uint64_t& full = clears ? smem.raw : smem.full[stage];
      ptx::mbarrier_arrive_expect(ptx::shared_address(&full),
                                  SharedMemory::QTile::bytes + SharedMemory::DoutTile::bytes);
      start_load(smem.q[stage], params.q_map, params.q_layout, entry, first_row, full);
      start_load(smem.dout[stage], params.dout_map, params.dout_layout, entry, first_row, full);
    }
    __syncwarp();  // no lane may be left two phases behind in a wait
    if (clears) clear_hidden_rows(stage, statistics);
    // Each lane for what it wrote; without a row to clear lane 0 did when it announced the bytes.
    arrive_if(smem.full[stage], clears || lane_index() != 0);
    ring.advance();
  }

  __device__ __forceinline__ void clear_hidden_rows(int stage, const LaneRows& statistics) {
    wait(smem.raw, raw_ring.full_parity());
    raw_ring.advance();
#pragma unroll
    for (int i = 0; i < LaneRows::count; ++i) {
      for_each_bit(statistics.hidden(i), [&](int bit) {
        const int row = 32 * i + bit;
        if (row >= Config::block_m) return;
        clear_row(smem.q[stage], row);
        clear_row(smem.dout[stage], row);
      });
    }
    ptx::fence_async_proxy();
  }
};

// --------------------------------------------------------------------------------- the consumers
// The first query and key of a lane's scores.
struct LaneIndices {
  int row, key;

  __device__ __forceinline__ LaneIndices(int first_row, int first_key) {
    const int thread = ptx::thread_index(), lane = thread % 32;
    row = first_row + fragment_column(0, 0, lane);
    key = first_key + 16 * (thread / 32 - 4) + fragment_row(0, 0, lane);
  }

  // Rows that see the key of a half, mask apart, counted from `row`: the column of a register is
  // compared as a constant.
  __device__ __forceinline__ Range seeing(const Score& score, int half) const {
    const int kv_idx = key + 8 * half;
    return score.q_range(kv_idx, kv_idx + 1).relative_to(row);
  }
};

struct Consumer {
  static constexpr int tiles = Config::block_m / 8;
  static constexpr bool ahead =
      Config::scores_ahead && Score::is_plain && Config::grad_k && Config::grad_v;

  const BackwardSm90Params& params;
  SharedMemory& smem;
  const int warpgroup;  // of the consumers
  Ring<Config::num_stages> ring;
  float dk_acc[1][Config::head_dim / 8][4];
  float dv_acc[1][Config::head_dim_v / 8][4];
  uint32_t frag[1][tiles / 2][4];  // p^T, then ds^T

  __device__ __forceinline__ void run() {
    const Work work = Work::of_this_block(params);
    clear(dk_acc);
    clear(dv_acc);
    wait(smem.keys_full, 0);
#pragma unroll 1
    for (int index = 0; index < params.grid.entries_per_owner; ++index) {
      const Score score(params.score, work.entry(params, index));
      const Range tile{work.first_key, work.first_key + Config::block_n};
      const BlockRanges blocks = score.q_blocks(tile.begin, tile.end);
      VisitedBlocks<Walk::queries> visited(score, blocks, tile);
      float s_acc[1][tiles][4];
      if constexpr (ahead) {
        if (warp_agrees(blocks.begin < blocks.end)) start_scores(s_acc, ring);
        ptx::wgmma_wait<0>();
        ptx::pin(flat(s_acc));
      }
#pragma unroll 1
      for (int block = visited.first_from(blocks.begin); block < blocks.end;
           block = visited.next_after(block)) {
        const int first_row = block * Config::block_m;
        const bool masked = blocks.masked(block) || !visited.of_one_segment(block);
        if constexpr (ahead) {
          const bool is_last = warp_agrees(block + 1 == blocks.end);
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
  __device__ __forceinline__ void start_scores(float (&s_acc)[1][tiles][4],
                                               const Ring<Config::num_stages>& at) {
    wait(smem.full[at.stage()], at.full_parity());
    start_transposed_product<SharedMemory::KTile, SharedMemory::QTile>(
        s_acc, smem.k.summed_over_columns(64 * warpgroup),
        smem.q[at.stage()].summed_over_columns());
  }

  __device__ __forceinline__ void start_dp(float (&dp_acc)[1][tiles][4]) {
    start_transposed_product<SharedMemory::VTile, SharedMemory::DoutTile>(
        dp_acc, smem.v.summed_over_columns(64 * warpgroup),
        smem.dout[ring.stage()].summed_over_columns());
  }

  __device__ __forceinline__ void start_dv() {
    start_product<SharedMemory::DoutTile>(dv_acc, frag, smem.dout[ring.stage()].summed_over_rows());
  }

  __device__ __forceinline__ void start_dk() {
    start_product<SharedMemory::QTile>(dk_acc, frag, smem.q[ring.stage()].summed_over_rows());
  }

  __device__ __forceinline__ void release_block_before() {
    const Ring<Config::num_stages> before{ring.uses - 1};
    arrive_if(smem.empty[before.stage()], leads_warpgroup() && ring.uses > 0);
  }

  // The last product of a block is waited for when the scores of the next are there.
  __device__ __forceinline__ void add_block(const Score& score, int first_row, int first_key,
                                            bool masked) {
    float s_acc[1][tiles][4], dp_acc[1][tiles][4];
    start_scores(s_acc, ring);
    if constexpr (Config::grad_k) start_dp(dp_acc);
    ptx::wgmma_wait<Config::grad_k && Score::is_plain>();
    ptx::pin(flat(s_acc));
    release_block_before();
    if constexpr (Score::is_plain) {
      compute_p(s_acc, s_acc, score, first_row, first_key);
      hide_pairs(s_acc, score, first_row, first_key, masked);
      to_operand(frag, s_acc);
    } else {
      if (Score::hides_pairs || warp_agrees(masked)) {
        compute_p_and_weights<true>(s_acc, score, first_row, first_key);
      } else {
        compute_p_and_weights<false>(s_acc, score, first_row, first_key);
      }
    }
    if constexpr (Config::grad_v) start_dv();
    if constexpr (Config::grad_k) {
      ptx::wgmma_wait<Config::grad_v>();
      ptx::pin(flat(dp_acc));
      compute_ds(s_acc, dp_acc);
      ptx::wgmma_wait<0>();  // dv has read frag
      to_operand(frag, s_acc);
      start_dk();
    }
    ring.advance();
  }

  // Scores of this block are there, those of the next start as soon as they are read; after the
  // last block they are this block's once more, and not used.
  __device__ __forceinline__ void add_block_ahead(float (&s_acc)[1][tiles][4], const Score& score,
                                                  int first_row, int first_key, bool masked,
                                                  bool is_last) {
    float p[1][tiles][4], dp_acc[1][tiles][4];
    start_dp(dp_acc);
    compute_p(p, s_acc, score, first_row, first_key);
    hide_pairs(p, score, first_row, first_key, masked);
    ptx::wgmma_wait<1>();  // dk of the block before has read frag
    release_block_before();
    to_operand(frag, p);
    start_dv();
    start_scores(s_acc, Ring<Config::num_stages>{ring.uses + !is_last});
    ptx::wgmma_wait<2>();
    ptx::pin(flat(dp_acc));
    compute_ds(p, dp_acc);
    ptx::wgmma_wait<1>();  // dv has read frag
    to_operand(frag, p);
    start_dk();
    ptx::wgmma_wait<1>();
    ptx::pin(flat(s_acc));
    ring.advance();
  }

  // Raw products become probabilities.
  __device__ __forceinline__ void compute_p(float (&p)[1][tiles][4],
                                            const float (&products)[1][tiles][4],
                                            const Score& score, int first_row,
                                            int first_key) const {
    const LaneIndices lane(first_row, first_key);
    const float* lse = smem.lse[ring.stage()] + (lane.row - first_row);
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      const float2 pair = *reinterpret_cast<const float2*>(lse + 8 * t);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float logit =
            score.apply(products[0][t][i], lane.row + 8 * t + i % 2, lane.key + 8 * (i / 2));
        p[0][t][i] =
            ptx::exp2_approx(score.probability_exponent(logit, i % 2 == 0 ? pair.x : pair.y));
      }
    }
  }

  __device__ __forceinline__ void hide_pairs(float (&p)[1][tiles][4], const Score& score,
                                             int first_row, int first_key, bool masked) const {
    if (!warp_agrees(masked)) return;
    const LaneIndices lane(first_row, first_key);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Range seeing = lane.seeing(score, half);
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (!seeing.contains(8 * t + i)) p[0][t][2 * half + i] = 0.0f;
        }
      }
    }
  }

  // Where scores take more: raw products become p score', frag the operand p^T.
  template <bool masked>
  __device__ __forceinline__ void compute_p_and_weights(float (&s_acc)[1][tiles][4],
                                                        const Score& score, int first_row,
                                                        int first_key) {
    const LaneIndices lane(first_row, first_key);
    ColumnBits unmasked[2];
    if constexpr (masked) score.unmasked_of_keys<tiles>(unmasked, lane.key, lane.row);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Range seeing = lane.seeing(score, half);
      ColumnBits segment;
      if constexpr (masked) {
        segment = score.segment_of_key<tiles>(lane.key + 8 * half, lane.row, seeing);
      }
      const float* lse = smem.lse[ring.stage()] + (lane.row - first_row);
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
        float p[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& value = s_acc[0][t][2 * half + i];
          const float product = value;
          const int q_idx = lane.row + 8 * t + i, kv_idx = lane.key + 8 * half;
          const bool visible =
              !masked || (seeing.contains(8 * t + i) && segment.contains(t, i) &&
                          unmasked[half].contains(t, i) && score.formula_shows(q_idx, kv_idx));
          const float logit = visible ? score.apply(product, q_idx, kv_idx) : -infinity();
          p[i] = ptx::exp2_approx(score.probability_exponent(logit, lse[8 * t + i]));
          value = visible ? p[i] * score.derivative(product, q_idx, kv_idx) : 0.0f;
        }
        frag[0][t / 2][t % 2 * 2 + half] = pack<Config::dtype>(p[0], p[1]);
      }
    }
  }

  // The weights of dp^T - delta become ds^T.
  __device__ __forceinline__ void compute_ds(float (&weight)[1][tiles][4],
                                             const float (&dp_acc)[1][tiles][4]) const {
    const float* delta = smem.delta[ring.stage()] + fragment_column(0, 0, ptx::thread_index() % 32);
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      const float2 pair = *reinterpret_cast<const float2*>(delta + 8 * t);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weight[0][t][i] *= dp_acc[0][t][i] - (i % 2 == 0 ? pair.x : pair.y);
      }
    }
  }

  __device__ __forceinline__ void store(const Work& work) const {
    const int first_key = work.first_key + 16 * (warp_index() - 4);
    const BatchIndex entry = work.entry(params, 0);
    const Seqlen seqlen(params.score, entry);
    const int num_keys = min(max(seqlen.rows_k - first_key, 0), 16);
    uint32_t broken = 0;
    if constexpr (Config::grad_k) {
      store_slice(RowTarget(params.dk, params.dk_layout, entry, seqlen.first_k, params.head_dim,
                            Config::head_dim),
                  first_key, num_keys, params.score.scale, dk_acc[0]);
      broken |= non_finite_rows(dk_acc[0]);
    }
    if constexpr (Config::grad_v) {
      store_slice(RowTarget(params.dv, params.dv_layout, entry, seqlen.first_k, params.head_dim_v,
                            Config::head_dim_v),
                  first_key, num_keys, 1.0f, dv_acc[0]);
      broken |= non_finite_rows(dv_acc[0]);
    }
    __syncwarp();  // a row was written by four lanes, and an exact one by all
    for_each_bit(broken & ((1u << num_keys) - 1),
                 [&](int row) { exact_dkv(params, work.owner, work.sequence, first_key + row); });
  }
};

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads, 1)
    cuflash_backward_dkv_sm90(const __grid_constant__ cuflash::BackwardSm90Params params) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  using namespace cuflash;
  run_roles<Producer, Consumer>(params, *reinterpret_cast<SharedMemory*>(smem_bytes));
}
