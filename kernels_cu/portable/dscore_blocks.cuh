// What a block of pairs adds to the sums of the scores' gradient in backward_dscore_sm80.cu, over
// whatever they sum.
#pragma once

#include "tile/matmul.cuh"
#include "portable/seen_columns.cuh"
#include "schedule/segments.cuh"
#include "simt/recompute_rows.cuh"

namespace cuflash {

struct SharedMemory {
  using QTile = OperandTile<Config::block_m, Config::head_dim>;
  using DoutTile = OperandTile<Config::block_m, Config::head_dim_v>;
  using KTile = StreamedTile<Config::block_n, Config::head_dim>;
  using VTile = StreamedTile<Config::block_n, Config::head_dim_v>;

  // The operands of a block of one batch entry. Where each pair has its own sum (SumsTo::pairs),
  // the operands of the next entry are loaded at the same time.
  struct Operands {
    QTile q;
    DoutTile dout;
    KTile k;
    VTile v;
  };
  Operands operands[Config::num_stages];
  Real column_sums[Config::num_warps][Config::block_n];
};

constexpr int slices = Config::block_m / (16 * Config::num_warps);
static_assert(slices * 16 * Config::num_warps == Config::block_m, "every warp owns whole slices");
constexpr int tiles = Config::block_n / 8;
constexpr bool streams_queries = Config::sums_to == SumsTo::keys;

// With packing, sums for slopes and scale are stored like the packed queries. A bias has one matrix
// for each sequence, or one for all.
constexpr bool packed = Config::cu_seqlens != Dtype::none;
constexpr bool of_packed_rows = packed && Config::grad_of != GradOf::bias;

// The tile of this thread block, computed again at each call.
struct Work {
  int m_block;  // 0 if queries are streamed
  int n_block;  // 0 if keys are streamed
  int owner;
  Range sequences;

  CUFLASH_DEVICE static Work of_thread_block(const BackwardParams& params) {
    const Tile tile = tile_of(params.grid, ptx::block_index());
    Range sequences{0, 1};
    int rank = tile.block;
    if constexpr (of_packed_rows) {
      const Place place = place_of<Config::block_m>(Packing::of_queries(params.score), rank);
      rank = place.block;
      sequences = {place.sequence, place.sequence + 1};
    } else if constexpr (packed) {
      sequences.end = params.score.num_sequences;
      if (params.sums_layout.batch.axis[max_batch_axes - 1] != 0) {
        const int tiles_each = params.grid.num_blocks / params.score.num_sequences;
        sequences = {rank / tiles_each, rank / tiles_each + 1};
        rank %= tiles_each;
      }
    }
    if constexpr (Config::sums_to == SumsTo::keys) return {0, rank, tile.owner, sequences};
    if constexpr (Config::sums_to == SumsTo::queries) return {rank, 0, tile.owner, sequences};
    const int columns = (num_columns(params) + Config::block_n - 1) / Config::block_n;
    return {rank / columns, rank % columns, tile.owner, sequences};
  }

  // The `index`-th batch entry of the owner.
  CUFLASH_DEVICE BatchIndex entry(const BackwardParams& params, int index, int sequence) const {
    return {params.batch, owner * params.grid.entries_per_owner + index, sequence};
  }

  // The extents of the bias.
  CUFLASH_DEVICE static int num_rows(const BackwardParams& params) {
    return packed ? params.score.q_length : params.score.seqlen_q;
  }
  CUFLASH_DEVICE static int num_columns(const BackwardParams& params) {
    return packed ? params.score.kv_length : params.score.seqlen_k;
  }
};

// The bias of this thread block's pairs, where all entries of the owner share one bias, because it
// is broadcast along them. Empty if the bias is read pair by pair.
constexpr bool holds_bias = Config::holds_bias;
static_assert(!holds_bias || (Config::grad_of == GradOf::bias && !packed && !Config::simt),
              "all entries share one bias");
struct HeldBias {
  Score::BiasOf<holds_bias ? tiles : 1> of_row[slices][2];

  HeldBias() = default;
  CUFLASH_DEVICE HeldBias(const Score& score, int first_row, int first_key) {
    if constexpr (holds_bias) {
      const ScoreParams& params = score.params;
      const Layout& layout = params.bias_layout;
      unrolled<slices, 2>([&](int s, int half) {
        const int q_idx = min(first_row + fragment_row(s, 2 * half), params.seqlen_q - 1);
        of_row[s][half] = {
            score.first_bias(), layout.row, layout.column, q_idx, first_key + fragment_column(0, 0),
            params.seqlen_k};
      });
    }
  }
};

// What a pair adds to the result, from the gradient `ds` of its logit.
CUFLASH_DEVICE Real contribution(const Score& score, Real ds, Real product, int q_idx, int kv_idx) {
  if constexpr (Config::grad_of == GradOf::alibi_slopes) {
    return -ds * score.formula_slope(product, q_idx, kv_idx) * score.distance(q_idx, kv_idx);
  } else if constexpr (Config::grad_of == GradOf::scale) {
    return ds * score.derivative(product, q_idx, kv_idx) * product;
  } else {
    return ds * score.formula_slope(product, q_idx, kv_idx);
  }
}

// Adds the pairs of one block, except those of queries far from 0: they set `any_far`.
template <bool masked>
CUFLASH_DEVICE void add_pairs(Real (&acc)[slices][tiles][4], const Real (&s_acc)[slices][tiles][4],
                              const Real (&dp_acc)[slices][tiles][4],
                              const RowStatistics* statistics, const Score& score,
                              const HeldBias& bias, int first_row, int first_key, bool& any_far) {
  const int lane = ptx::thread_index() % 32;
  const int lane_row = first_row + fragment_row(0, 0, lane);
  const int lane_key = first_key + fragment_column(0, 0, lane);
  const WarpPowers power;
#pragma unroll
  for (int s = 0; s < slices; ++s) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int q_idx = lane_row + 16 * s + 8 * half;
      RowStatistics row = score.seqlen.statistics(statistics, q_idx);
      if (is_quiet_nan(row.lse)) {
        any_far = true;
        row.lse = infinity();
      }
      const SeenColumns<masked, tiles> seen(score, q_idx, lane_key);
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const Real product = s_acc[s][t][2 * half + i];
          const int kv_idx = lane_key + 8 * t + i;
          const bool visible = seen.contains(t, i);
          const Real logit =
              score.apply_held(visible, product, bias.of_row[s][half], t, i, q_idx, kv_idx);
          const Real p = power(score.probability_exponent(logit, row.lse));
          const Real ds = p * (dp_acc[s][t][2 * half + i] - row.delta);
          // A hidden pair's values may be NaN, and 0 * NaN is NaN.
          if (!(masked || holds_bias) || logit != -infinity()) {
            acc[s][t][2 * half + i] += contribution(score, ds, product, q_idx, kv_idx);
          }
        }
      }
    }
  }
}

// Starts the copies of one block of one batch entry.
CUFLASH_DEVICE void load_block(const BackwardParams& params, SharedMemory::Operands& smem,
                               const BatchIndex& entry, const Score& score, int first_row,
                               int first_key) {
  const Range rows{0, score.seqlen.q}, keys{0, score.seqlen.k};
  const int first_q = score.seqlen.first_q, first_k = score.seqlen.first_k;
  const RowSource q(params.q, params.q_layout, entry, first_q, params.head_dim);
  const RowSource dout(params.dout, params.dout_layout, entry, first_q, params.head_dim_v);
  const RowSource k(params.k, params.k_layout, entry, first_k, params.head_dim);
  const RowSource v(params.v, params.v_layout, entry, first_k, params.head_dim_v);
  load_tile(smem.q, q, first_row, rows);
  load_tile(smem.dout, dout, first_row, rows);
  load_tile(smem.k, k, first_key, keys);
  load_tile(smem.v, v, first_key, keys);
}

// Adds the pairs of a block whose operands are in shared memory.
CUFLASH_DEVICE void add_loaded(const BackwardParams& params, SharedMemory::Operands& smem,
                               const BatchIndex& entry, const Score& score, const HeldBias& bias,
                               int first_row, int first_key, bool masked,
                               Real (&acc)[slices][tiles][4], bool& any_far) {
  const int warp_row = warp_index() * 16 * slices;
  Real s_acc[slices][tiles][4], dp_acc[slices][tiles][4];
  clear(s_acc);
  multiply_transposed(s_acc, read_rows(smem.q, warp_row), read_columns(smem.k));
  clear(dp_acc);
  multiply_transposed<columns_of_dp>(dp_acc, read_rows(smem.dout, warp_row), read_columns(smem.v));
  drop_gradients(dp_acc, score, first_row + warp_row, first_key);
  const RowStatistics* statistics =
      params.rows + entry * params.rows_layout.batch + score.seqlen.first_q;
  if (masked) {
    add_pairs<true>(acc, s_acc, dp_acc, statistics, score, bias, first_row + warp_row, first_key,
                    any_far);
  } else {
    add_pairs<false>(acc, s_acc, dp_acc, statistics, score, bias, first_row + warp_row, first_key,
                     any_far);
  }
}

// Loads and adds one block of pairs of one batch entry.
CUFLASH_DEVICE void add_block(const BackwardParams& params, SharedMemory& smem,
                              const BatchIndex& entry, const Score& score, int first_row,
                              int first_key, bool masked, Real (&acc)[slices][tiles][4],
                              bool& any_far) {
  SharedMemory::Operands& operands = smem.operands[0];
  __syncthreads();  // every warp is done with the previous block
  load_block(params, operands, entry, score, first_row, first_key);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  split(operands.k);
  split(operands.v);
  __syncthreads();  // q, dout, k and v are complete
  const HeldBias bias(score, first_row + warp_index() * 16 * slices, first_key);
  add_loaded(params, operands, entry, score, bias, first_row, first_key, masked, acc, any_far);
}

// Adds one block of pairs of every entry of the owner in which some of these pairs are visible. The
// operands of the next entry are loaded while this entry's pairs are added.
struct EntriesOfPairs {
  const BackwardParams& params;
  SharedMemory& smem;
  const Work work;
  const int first_row = work.m_block * Config::block_m, first_key = work.n_block * Config::block_n;

  CUFLASH_DEVICE void add(Real (&acc)[slices][tiles][4], bool& any_far) const {
    const int num_entries = params.grid.entries_per_owner;
    int index = first_from(0), stage = 0;
    if (index < num_entries) load(index, stage);
    ptx::cp_async_commit();
    const HeldBias bias(Score(params.score, entry(0)), first_row + warp_index() * 16 * slices,
                        first_key);
#pragma unroll 1
    for (; index < num_entries; stage ^= 1) {
      const int next = first_from(index + 1);
      if (next < num_entries) load(next, stage ^ 1);
      ptx::cp_async_commit();
      ptx::cp_async_wait<1>();
      split(smem.operands[stage].k);
      split(smem.operands[stage].v);
      __syncthreads();  // this entry's operands are complete
      const Score score(params.score, entry(index));
      add_loaded(params, smem.operands[stage], entry(index), score, bias, first_row, first_key,
                 blocks_of(score).masked(work.n_block), acc, any_far);
      __syncthreads();  // every warp is done with these operands
      index = next;
    }
  }

 private:
  CUFLASH_DEVICE BatchIndex entry(int index) const { return work.entry(params, index, 0); }

  CUFLASH_DEVICE void load(int index, int stage) const {
    load_block(params, smem.operands[stage], entry(index), Score(params.score, entry(index)),
               first_row, first_key);
  }

  // The first entry from `index` on in which some pair of the block is visible.
  CUFLASH_DEVICE int first_from(int index) const {
#pragma unroll 1
    for (; index < params.grid.entries_per_owner; ++index) {
      const BlockRanges blocks = blocks_of(Score(params.score, entry(index)));
      if (work.n_block >= blocks.begin && work.n_block < blocks.end) break;
    }
    return index;
  }

  CUFLASH_DEVICE BlockRanges blocks_of(const Score& score) const {
    return score.kv_blocks(first_row, first_row + Config::block_m);
  }
};

}  // namespace cuflash
