// A warpgroup that computes the gradients of 64 keys on Hopper: scores, their gradient, dk and dv.
#pragma once

#include "sm90/dkv_producer.cuh"

namespace cuflash {

// Indices of the first query and key of a lane's scores.
struct LaneIndices {
  int row, key;

  CUFLASH_DEVICE LaneIndices(int first_row, int first_key) {
    const uint32_t thread = ptx::thread_index(), lane = thread % 32;
    row = first_row + fragment_column(0, 0, lane);
    key = first_key + 16 * (thread / 32) - 64 + fragment_row(0, 0, lane);
  }

  // Rows that see the lane's key of a half, without regard to the mask. They are relative to `row`,
  // so that the column of each register is compared as a constant.
  CUFLASH_DEVICE Range seeing(const Score& score, int half) const {
    const int kv_idx = key + 8 * half;
    return score.q_range(kv_idx, kv_idx + 1).relative_to(row);
  }
};

// A warpgroup computes with `rows` queries at a time, from row `first` of a block on.
template <int rows>
struct DkvWarpgroup {
  static constexpr int tiles = rows / 8;

  const BackwardSm90Params& params;
  DkvSharedMemory& smem;
  const int warpgroup;  // index among the consumers
  Ring<Config::num_stages> ring;
  float dk_acc[1][Config::head_dim / 8][4];
  float dv_acc[1][Config::head_dim_v / 8][4];
  uint32_t frag[1][tiles / 2][4];  // p^T, then ds^T
  // k and v as operands, if they are kept in registers.
  uint32_t k_frag[1][Config::keys_in_registers ? Config::head_dim / 16 : 1][4];
  uint32_t v_frag[1][Config::keys_in_registers ? Config::head_dim_v / 16 : 1][4];

  CUFLASH_DEVICE void wait_for_keys(uint32_t parity = 0) {
    wait(smem.keys_full, parity);
    if constexpr (Config::keys_in_registers) {
      read_operand(k_frag, smem.k, 64 * warpgroup);
      read_operand(v_frag, smem.v, 64 * warpgroup);
    }
  }

  CUFLASH_DEVICE void start_scores(float (&s_acc)[1][tiles][4], const Ring<Config::num_stages>& at,
                                   int first = 0) {
    wait(smem.full[at.stage()], at.full_parity());
    const uint64_t q = smem.q[at.stage()].k_major(first);
    if constexpr (Config::keys_in_registers) {
      start_transposed_product<DkvSharedMemory::QTile>(s_acc, k_frag, q);
    } else {
      start_transposed_product<DkvSharedMemory::KTile, DkvSharedMemory::QTile>(
          s_acc, smem.k.k_major(64 * warpgroup), q);
    }
  }

  CUFLASH_DEVICE void start_dp(float (&dp_acc)[1][tiles][4], int first = 0) {
    const uint64_t dout = smem.dout[ring.stage()].k_major(first);
    if constexpr (Config::keys_in_registers) {
      start_transposed_product<DkvSharedMemory::DoutTile>(dp_acc, v_frag, dout);
    } else {
      start_transposed_product<DkvSharedMemory::VTile, DkvSharedMemory::DoutTile>(
          dp_acc, smem.v.k_major(64 * warpgroup), dout);
    }
  }

  CUFLASH_DEVICE void start_dv(int first = 0) {
    start_product<DkvSharedMemory::DoutTile, 0, tiles / 2>(dv_acc, frag,
                                                           smem.dout[ring.stage()].mn_major(first));
  }

  CUFLASH_DEVICE void start_dk(int first = 0) {
    start_product<DkvSharedMemory::QTile, 0, tiles / 2>(dk_acc, frag,
                                                        smem.q[ring.stage()].mn_major(first));
  }

  CUFLASH_DEVICE void release_previous_block() {
    const Ring<Config::num_stages> before{ring.uses - 1};
    arrive_as_readers(smem.empty[before.stage()], ring.uses > 0);  // lse and delta were read, too
  }

  // Reads lse or delta of the current block for the queries of this lane's columns, of the first
  // `count` tiles of 8 columns.
  template <int count>
  CUFLASH_DEVICE void read(float2 (&of_columns)[count],
                           const float (&of_rows)[Config::num_stages][Config::block_m],
                           int first = 0) const {
    const float* from = own_columns(of_rows, first);
#pragma unroll
    for (int t = 0; t < count; ++t) of_columns[t] = *reinterpret_cast<const float2*>(from + 8 * t);
  }
  CUFLASH_DEVICE const float* own_columns(
      const float (&of_rows)[Config::num_stages][Config::block_m], int first) const {
    return of_rows[ring.stage()] + first + fragment_column(0, 0, ptx::thread_index() % 32);
  }

  // Computes probabilities from raw products.
  CUFLASH_DEVICE void compute_p(float (&p)[1][tiles][4], const float (&products)[1][tiles][4],
                                const float2 (&lse)[tiles], const Score& score, int first_row,
                                int first_key, int first = 0) const {
    const LaneIndices lane(first_row + first, first_key);
    unrolled<tiles, 4>([&](int t, int i) {
      const float logit =
          score.apply(products[0][t][i], lane.row + 8 * t + i % 2, lane.key + 8 * (i / 2));
      p[0][t][i] =
          ptx::exp2_approx(score.probability_exponent(logit, i % 2 == 0 ? lse[t].x : lse[t].y));
    });
  }

  // compute_p() with a bias from shared memory, which is read in the order of t, half and i. lse is
  // read when it is needed, because a bias leaves no registers to hold it.
  template <typename Bias>
  CUFLASH_DEVICE void compute_biased_p(float (&s_acc)[1][tiles][4], const Score& score, Bias& bias,
                                       int first_row, int first_key, int first) const {
    const LaneIndices lane(first_row + first, first_key);
    const uint32_t lse = ptx::shared_address(smem.lse[ring.stage()] + (lane.row - first_row));
    float2 of_columns;
    unrolled<tiles, 4>([&](int t, int i) {
      if (i == 0) of_columns = ptx::load_shared_pair(lse + 32 * t);
      const int q_idx = lane.row + 8 * t + i % 2, kv_idx = lane.key + 8 * (i / 2);
      float& s = s_acc[0][t][i];
      const float logit = score.with_bias(s, bias(t, i / 2, i % 2), q_idx, kv_idx);
      s = ptx::exp2_approx(
          score.probability_exponent(logit, i % 2 == 0 ? of_columns.x : of_columns.y));
    });
  }

  CUFLASH_DEVICE void hide_pairs(float (&p)[1][tiles][4], const Score& score, int first_row,
                                 int first_key, bool masked, int first = 0) const {
    if (!warp_any(masked)) return;
    const LaneIndices lane(first_row + first, first_key);
    ColumnBits seeing[2];
    if constexpr (Score::hides_by_bits) find_seeing(seeing, score, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Range range = lane.seeing(score, half);
      unrolled<tiles, 2>([&](int t, int i) {
        const bool sees =
            Score::hides_by_bits ? seeing[half].contains(t, i) : range.contains(8 * t + i);
        if (!sees) p[0][t][2 * half + i] = 0.0f;
      });
    }
  }

  // Which of a lane's columns (queries) see its two keys, without regard to formulas.
  CUFLASH_DEVICE void find_seeing(ColumnBits (&seeing)[2], const Score& score,
                                  const LaneIndices& lane) const {
    score.unmasked_of_keys<tiles>(seeing, lane.key, lane.row);
#pragma unroll 1  // one key at a time: bits of both would take registers from p
    for (int half = 0; half < 2; ++half) {
      const Range range = lane.seeing(score, half);
      const uint32_t bits = ColumnBits::within(range).bits &
                            score.segment_of_key<tiles>(lane.key + 8 * half, lane.row, range).bits;
      seeing[0].bits &= half == 0 ? bits : 0xffffffff;
      seeing[1].bits &= half == 1 ? bits : 0xffffffff;
    }
  }

  // The pairs of a block that dropout keeps. (D27)
  CUFLASH_DEVICE KeptBits<1, tiles> kept_pairs(const Score& score, int first_row,
                                               int first_key) const {
    const int warp_key = first_key + 16 * (ptx::thread_index() / 32) - 64;
    return {score, first_row, warp_key};
  }

  // The bias of a lane's pairs, read from global memory.
  struct GlobalBias {
    Score::BiasOf<tiles> of_key[2];

    CUFLASH_DEVICE GlobalBias(const Score& score, const LaneIndices& lane)
        : of_key{score.bias_of_key<tiles>(lane.key, lane.row),
                 score.bias_of_key<tiles>(lane.key + 8, lane.row)} {}
    CUFLASH_DEVICE float operator()(int t, int half, int i) const { return of_key[half](t, i); }
  };

  // For scores that are more than a product: turns raw products into p score', and writes the
  // operand p^T to frag.
  template <bool masked, typename Bias>
  CUFLASH_DEVICE void compute_p_and_weights(float (&s_acc)[1][tiles][4],
                                            const KeptBits<1, tiles>& kept, const Score& score,
                                            Bias&& bias, int first_row, int first_key,
                                            int first = 0) {
    const LaneIndices lane(first_row + first, first_key);
    ColumnBits seeing[2];
    if constexpr (masked) find_seeing(seeing, score, lane);
    const float* lse = smem.lse[ring.stage()] + (lane.row - first_row);
    unrolled<2 * tiles>([&](int n) {
      // A bias in shared memory is read in the order of t, then half.
      const int t = Config::bias_stages ? n / 2 : n % tiles;
      const int half = Config::bias_stages ? n % 2 : n / tiles;
      float p[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& value = s_acc[0][t][2 * half + i];
        const float product = value;
        const int q_idx = lane.row + 8 * t + i, kv_idx = lane.key + 8 * half;
        const bool visible =
            !masked || (seeing[half].contains(t, i) && score.formula_shows(q_idx, kv_idx));
        const float b = bias(t, half, i);
        const float logit = score.apply_if(visible, product, b, q_idx, kv_idx);
        p[i] = ptx::exp2_approx(score.probability_exponent(logit, lse[8 * t + i]));
        value = visible ? p[i] * score.derivative_at(logit, product, b, q_idx, kv_idx) : 0.0f;
      }
      if constexpr (!Score::adds_only) {
        frag[0][t / 2][t % 2 * 2 + half] =
            kept.apply_to(pack<Config::dtype>(p[0], p[1]), 0, t, half);
      }
    });
    if constexpr (Score::adds_only) to_kept_operand(s_acc, kept);
  }

  // compute_p_and_weights() with a bias from global memory. Pairs are hidden where some may be.
  CUFLASH_DEVICE void compute_biased_weights(float (&s_acc)[1][tiles][4],
                                             const KeptBits<1, tiles>& kept, const Score& score,
                                             int first_row, int first_key, bool masked) {
    const GlobalBias bias(score, {first_row, first_key});
    if (Score::hides_pairs || warp_any(masked)) {
      compute_p_and_weights<true>(s_acc, kept, score, bias, first_row, first_key);
    } else {
      compute_p_and_weights<false>(s_acc, kept, score, bias, first_row, first_key);
    }
  }

  // Packs probabilities as the operand p^T, with 0 for pairs that dropout drops.
  CUFLASH_DEVICE void to_kept_operand(const float (&p)[1][tiles][4],
                                      const KeptBits<1, tiles>& kept) {
    to_operand(frag, p);
    unrolled<tiles, 2>([&](int t, int half) {
      uint32_t& pair = frag[0][t / 2][t % 2 * 2 + half];
      pair = kept.apply_to(pair, 0, t, half);
    });
  }

  // Turns the weights of dp^T - delta into ds^T. `delta` holds the first tiles; the others are read
  // as registers become free.
  template <int ahead>
  CUFLASH_DEVICE void compute_ds(float (&weight)[1][tiles][4], const float (&dp_acc)[1][tiles][4],
                                 float2 (&delta)[ahead], int first = 0) const {
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      const float2 own = delta[t % ahead];
      if (t + ahead < tiles) {
        const float* from = own_columns(smem.delta, first);
        delta[t % ahead] = *reinterpret_cast<const float2*>(from + 8 * (t + ahead));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weight[0][t][i] *= dp_acc[0][t][i] - (i % 2 == 0 ? own.x : own.y);
      }
    }
  }

  CUFLASH_DEVICE void store(const KeyTile& work) const {
    const int first_key = work.first_key + 16 * (warp_index() - 4);
    const BatchIndex entry = work.entry(params, 0);
    const Seqlen seqlen(params.score, entry);
    const int num_keys = min(max(seqlen.rows_k - first_key, 0), 16);
    uint32_t rows_to_recompute = 0;
    if constexpr (Config::grad_k) {
      store_slice_wide(RowTarget(params.dk, params.dk_layout, entry, seqlen.first_k,
                                 params.head_dim, Config::head_dim),
                       first_key, num_keys, params.score.scale, dk_acc[0]);
      rows_to_recompute |= non_finite_rows(dk_acc[0]);
    }
    if constexpr (Config::grad_v) {
      store_slice_wide(RowTarget(params.dv, params.dv_layout, entry, seqlen.first_k,
                                 params.head_dim_v, Config::head_dim_v),
                       first_key, num_keys, kept_scale(params.score), dv_acc[0]);
      rows_to_recompute |= non_finite_rows(dv_acc[0]);
    }
    __syncwarp();  // four lanes wrote each row, and the warp may overwrite it below
    for_each_bit(rows_to_recompute & ((1u << num_keys) - 1), [&](int row) {
      recompute_dkv(params, work.owner, work.sequence, first_key + row);
    });
  }
};

}  // namespace cuflash
