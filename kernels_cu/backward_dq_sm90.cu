// dq on Hopper: TMA and warp-specialised wgmma, without atomics. Every sum has a fixed order.
//
//   for each tile of block_m rows of q:                       one thread block
//     dq = 0                                                  64 rows per warpgroup
//     for each block of block_n keys that some row sees:
//       s = q k^T;  dp = dout v^T
//       p = exp(score(s) - lse)                               while dp is multiplied
//       ds = p (dp - delta) score'(s)                         an operand in registers
//       dq += ds k                                            until s of the next block is done
//     dq *= scale
//
// Warpgroup 0 is the producer: its first warp loads. The other warpgroups are consumers.
//
//   barrier      arrivals a phase   what the end of a phase means
//   rows_full    1 + bytes          q and dout of the tile have arrived
//   full         1 + bytes          k and v of a block have arrived
//   raw          1 + bytes          k and v have arrived, and some of their rows must be cleared
//   empty        consumers          every warpgroup has used the block: load the next
#include "schedule/pipeline.cuh"
#include "schedule/tiles.cuh"
#include "schedule/segments.cuh"
#include "simt/recompute_rows.cuh"
#include "sm90/roles.cuh"
#include "sm90/load.cuh"

namespace cuflash {

constexpr int consumers = Config::block_m / 64;  // warpgroups, of 64 rows each
static_assert(Config::block_m % 64 == 0, "each warpgroup computes 64 rows");

struct SharedMemory {
  using QTile = PanelTile<Config::block_m, Config::head_dim>;
  using DoutTile = PanelTile<Config::block_m, Config::head_dim_v>;
  using KTile = PanelTile<Config::block_n, Config::head_dim>;
  using VTile = PanelTile<Config::block_n, Config::head_dim_v>;

  QTile q;
  DoutTile dout;
  KTile k[Config::num_stages];
  VTile v[Config::num_stages];
  uint64_t full[Config::num_stages], empty[Config::num_stages];
  uint64_t rows_full, raw;
};

// Called by one thread, before any other thread uses an mbarrier.
CUFLASH_DEVICE void init_barriers(SharedMemory& smem) {
  for (int i = 0; i < Config::num_stages; ++i) {
    init(smem.full[i], 1);
    init(smem.empty[i], consumers);
  }
  init(smem.rows_full, 1);
  init(smem.raw, 1);
  ptx::fence_mbarrier_init();
}

using Work = RowTile;

// ---------------------------------------------------------------------------------- the producer
struct Producer {
  const BackwardSm90Params& params;
  SharedMemory& smem;
  Ring<Config::num_stages> ring;
  Ring<1> raw_ring;

  CUFLASH_DEVICE void run() {
    const Work work = Work::of_thread_block(params);
    const BatchIndex entry{params.batch, work.owner, work.sequence};
    const Score score(params.score, entry);
    if (lane_index() == 0) load_rows(entry, score.seqlen.first_q + work.first_row);
    __syncwarp();
    const Range rows{work.first_row, work.first_row + Config::block_m};
    const BlockRanges blocks = score.kv_blocks(rows.begin, rows.end);
    VisitedBlocks<Walk::keys> visited(score, blocks, rows);
    const Range seen = score.kv_range(0, score.seqlen.rows_q);  // seen by any row of this entry
#pragma unroll 1
    for (int block = visited.first_from(blocks.begin); block < blocks.end;
         block = visited.next_after(block)) {
      load_keys(entry, block * Config::block_n, score.seqlen.first_k, seen);
    }
  }

 private:
  // Called by lane 0.
  CUFLASH_DEVICE void load_rows(const BatchIndex& entry, int first_row) {
    ptx::mbarrier_arrive_expect(ptx::shared_address(&smem.rows_full),
                                SharedMemory::QTile::bytes + SharedMemory::DoutTile::bytes);
    start_load(smem.q, params.q_map, params.q_layout, entry, first_row, smem.rows_full);
    start_load(smem.dout, params.dout_map, params.dout_layout, entry, first_row, smem.rows_full);
  }

  // Loads a block of keys from `first_key` on. Key 0 of the entry is row `first_k` of the arrays.
  // Keys outside `seen` must not reach a product, where 0 * NaN would be NaN. TMA writes zeros past
  // the end of the arrays, and this function clears the other keys outside `seen`.
  CUFLASH_DEVICE void load_keys(const BatchIndex& entry, int first_key, int first_k, Range seen) {
    const int stage = ring.stage(), from = first_k + first_key;
    const Range kept{max(seen.begin - first_key, 0), seen.end - first_key};
    const int loaded = min(Config::block_n, params.score.seqlen_k - from);
    const bool clears = kept.begin > 0 || kept.end < loaded;
    wait(smem.empty[stage], ring.empty_parity());
    if (lane_index() == 0) {
      uint64_t& full = clears ? smem.raw : smem.full[stage];
      ptx::mbarrier_arrive_expect(ptx::shared_address(&full),
                                  SharedMemory::KTile::bytes + SharedMemory::VTile::bytes);
      start_load(smem.k[stage], params.k_map, params.k_layout, entry, from, full);
      start_load(smem.v[stage], params.v_map, params.v_layout, entry, from, full);
    }
    __syncwarp();  // all lanes are past their wait: see sm90/barrier.cuh
    if (clears) {
      wait(smem.raw, raw_ring.full_parity());
      raw_ring.advance();
      clear_outside(smem.k[stage], kept, loaded);
      clear_outside(smem.v[stage], kept, loaded);
      ptx::fence_async_proxy();
      arrive_as_warp(smem.full[stage]);
    }
    ring.advance();
  }
};

// --------------------------------------------------------------------------------- the consumers
// The first query and key of a lane's scores.
struct LaneIndices {
  int row, key;

  CUFLASH_DEVICE LaneIndices(int first_row, int first_key) {
    const int thread = ptx::thread_index(), lane = thread % 32;
    row = first_row + 16 * (thread / 32 - 4) + fragment_row(0, 0, lane);
    key = first_key + fragment_column(0, 0, lane);
  }
};

struct Consumer {
  static constexpr int tiles = Config::block_n / 8;
  static constexpr bool ahead = Config::scores_ahead && Score::is_product;

  const BackwardSm90Params& params;
  SharedMemory& smem;
  const int warpgroup;  // index among the consumers
  Ring<Config::num_stages> ring;
  RowStatistics rows[2];
  float dq_acc[1][Config::head_dim / 8][4];
  uint32_t frag[1][tiles / 2][4];

  CUFLASH_DEVICE void run() {
    const Work work = Work::of_thread_block(params);
    const BatchIndex entry{params.batch, work.owner, work.sequence};
    const Score score(params.score, entry);
    const Range tile{work.first_row, work.first_row + Config::block_m};
    const BlockRanges blocks = score.kv_blocks(tile.begin, tile.end);
    VisitedBlocks<Walk::keys> visited(score, blocks, tile);
    read_statistics(entry, score.seqlen, work.first_row);
    clear(dq_acc);
    wait(smem.rows_full, 0);
    float s_acc[1][tiles][4];
    if constexpr (ahead) {
      if (warp_any(blocks.begin < blocks.end)) start_scores(s_acc, ring);
      ptx::wgmma_wait<0>();
      ptx::pin(flat(s_acc));
    }
#pragma unroll 1
    for (int block = visited.first_from(blocks.begin); block < blocks.end;
         block = visited.next_after(block)) {
      const int first_key = block * Config::block_n;
      const bool masked = visited.masked(block);
      if constexpr (ahead) {
        const bool is_last = warp_any(block + 1 == blocks.end);
        add_block_ahead(s_acc, score, work.first_row, first_key, masked, is_last);
      } else {
        add_block(score, work.first_row, first_key, masked);
      }
    }
    ptx::wgmma_wait<0>();
    ptx::pin(flat(dq_acc));
    store(work);
  }

 private:
  CUFLASH_DEVICE void read_statistics(const BatchIndex& entry, const Seqlen& seqlen,
                                      int first_row) {
    const RowStatistics* from = params.rows + entry * params.rows_layout.batch + seqlen.first_q;
    const int row = LaneIndices(first_row, 0).row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int q_idx = row + 8 * half;
      rows[half] = seqlen.statistics(from, q_idx);
    }
  }

  CUFLASH_DEVICE void start_scores(float (&s_acc)[1][tiles][4],
                                   const Ring<Config::num_stages>& at) {
    wait(smem.full[at.stage()], at.full_parity());
    start_transposed_product<SharedMemory::QTile, SharedMemory::KTile>(
        s_acc, smem.q.k_major(64 * warpgroup), smem.k[at.stage()].k_major());
  }

  CUFLASH_DEVICE void start_dp(float (&dp_acc)[1][tiles][4]) {
    start_transposed_product<SharedMemory::DoutTile, SharedMemory::VTile>(
        dp_acc, smem.dout.k_major(64 * warpgroup), smem.v[ring.stage()].k_major());
  }

  CUFLASH_DEVICE void release_previous_block() {
    const Ring<Config::num_stages> before{ring.uses - 1};
    arrive_if(smem.empty[before.stage()], leads_warpgroup() && ring.uses > 0);
  }

  CUFLASH_DEVICE static void drop(float (&dp_acc)[1][tiles][4], const Score& score, int first_row,
                                  int first_key) {
    drop_gradients(dp_acc, score, first_row + 16 * (ptx::thread_index() / 32 - 4), first_key);
  }

  // ds from p, and dq += ds k.
  CUFLASH_DEVICE void start_dq(float (&p)[1][tiles][4], const float (&dp_acc)[1][tiles][4]) {
    unrolled<tiles, 4>([&](int t, int i) { p[0][t][i] *= dp_acc[0][t][i] - rows[i / 2].delta; });
    to_operand(frag, p);
    start_product<SharedMemory::KTile>(dq_acc, frag, smem.k[ring.stage()].mn_major());
  }

  // The last product of a block is waited for only after the scores of the next block are done.
  CUFLASH_DEVICE void add_block(const Score& score, int first_row, int first_key, bool masked) {
    float s_acc[1][tiles][4], dp_acc[1][tiles][4];
    start_scores(s_acc, ring);
    start_dp(dp_acc);
    ptx::wgmma_wait<Score::is_product>();
    ptx::pin(flat(s_acc));
    release_previous_block();
    if constexpr (Score::is_product) {
      compute_p(s_acc, s_acc, score, first_row, first_key);
      hide_pairs(s_acc, score, first_row, first_key, masked);
    } else {
      if (Score::hides_pairs || warp_any(masked)) {
        compute_weights<true>(s_acc, score, first_row, first_key);
      } else {
        compute_weights<false>(s_acc, score, first_row, first_key);
      }
    }
    ptx::wgmma_wait<0>();
    ptx::pin(flat(dp_acc));
    drop(dp_acc, score, first_row, first_key);
    start_dq(s_acc, dp_acc);
    ring.advance();
  }

  // On entry s_acc holds the scores of this block. The product of the next block's scores starts as
  // soon as they are read. After the last block it repeats this block's scores, which are not used.
  CUFLASH_DEVICE void add_block_ahead(float (&s_acc)[1][tiles][4], const Score& score,
                                      int first_row, int first_key, bool masked, bool is_last) {
    float p[1][tiles][4], dp_acc[1][tiles][4];
    start_dp(dp_acc);
    compute_p(p, s_acc, score, first_row, first_key);
    hide_pairs(p, score, first_row, first_key, masked);
    start_scores(s_acc, Ring<Config::num_stages>{ring.uses + !is_last});
    ptx::wgmma_wait<1>();
    ptx::pin(flat(dp_acc));
    release_previous_block();
    drop(dp_acc, score, first_row, first_key);
    start_dq(p, dp_acc);
    ptx::wgmma_wait<1>();
    ptx::pin(flat(s_acc));
    ring.advance();
  }

  // Computes probabilities from raw products.
  CUFLASH_DEVICE void compute_p(float (&p)[1][tiles][4], const float (&products)[1][tiles][4],
                                const Score& score, int first_row, int first_key) const {
    const LaneIndices lane(first_row, first_key);
    unrolled<tiles, 4>([&](int t, int i) {
      const float logit =
          score.apply(products[0][t][i], lane.row + 8 * (i / 2), lane.key + 8 * t + i % 2);
      p[0][t][i] = ptx::exp2_approx(score.probability_exponent(logit, rows[i / 2].lse));
    });
  }

  // The branch also keeps all exponentials before the wait for dp. Nothing else orders the two, and
  // ptxas would move the wait above most of the exponentials.
  CUFLASH_DEVICE void hide_pairs(float (&p)[1][tiles][4], const Score& score, int first_row,
                                 int first_key, bool masked) const {
    if (!warp_any(masked)) return;
    const LaneIndices lane(first_row, first_key);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Range keys = score.kv_range_from(lane.key, lane.row + 8 * half);
      unrolled<tiles, 2>([&](int t, int i) {
        if (!keys.contains(8 * t + i)) p[0][t][2 * half + i] = 0.0f;
      });
    }
  }

  // For scores that are more than a product: computes p score' from raw products.
  template <bool masked>
  CUFLASH_DEVICE void compute_weights(float (&s_acc)[1][tiles][4], const Score& score,
                                      int first_row, int first_key) const {
    const LaneIndices lane(first_row, first_key);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int q_idx = lane.row + 8 * half;
      const Range keys = score.kv_range_from(lane.key, q_idx);
      const auto bias = score.bias_of_row<tiles>(q_idx, lane.key);
      ColumnBits seen;
      if constexpr (masked) seen = score.seen_of_row<tiles>(q_idx, lane.key, keys);
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& value = s_acc[0][t][2 * half + i];
          const float product = value;
          const int kv_idx = lane.key + 8 * t + i;
          const bool visible = !masked || (keys.contains(8 * t + i) && seen.contains(t, i) &&
                                           score.formula_shows(q_idx, kv_idx));
          const float b = bias(t, i);
          const float logit = score.apply_if(visible, product, b, q_idx, kv_idx);
          const float p = ptx::exp2_approx(score.probability_exponent(logit, rows[half].lse));
          value = visible ? p * score.derivative_at(logit, product, b, q_idx, kv_idx) : 0.0f;
        }
      }
    }
  }

  CUFLASH_DEVICE void store(const Work& work) const {
    const int first_row = work.first_row + 16 * (warp_index() - 4);
    const BatchIndex entry{params.batch, work.owner, work.sequence};
    const Seqlen seqlen(params.score, entry);
    const int num_rows = min(max(seqlen.rows_q - first_row, 0), 16);
    store_slice(RowTarget(params.dq, params.dq_layout, entry, seqlen.first_q, params.head_dim,
                          Config::head_dim),
                first_row, num_rows, params.score.scale, dq_acc[0]);
    __syncwarp();  // four lanes wrote each row, and the warp may overwrite it below
    for_each_bit(non_finite_rows(dq_acc[0]) & ((1u << num_rows) - 1), [&](int row) {
      recompute_dq(params, work.owner, work.sequence, first_row + row);
    });
  }
};

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads, 1)
    cuflash_backward_dq_sm90(const __grid_constant__ cuflash::BackwardSm90Params params) {
  using namespace cuflash;
  run_roles<Producer, Consumer>(params, shared_memory<SharedMemory>());
}
