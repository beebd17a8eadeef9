// A warpgroup that computes 64 rows of out: from the scores of a block to the sum over its keys.
#pragma once

#include "sm90/consumer_schedule.cuh"
#include "sm90/finished_rows.cuh"
#include "sm90/raw_scores.cuh"
#include "sm90/weights.cuh"

namespace cuflash {

struct OutWarpgroup {
  const ForwardSm90Params& params;
  SharedMemory& smem;
  const int warpgroup;                // index among the consumers
  Ring<Config::num_stages> ring;      // of k and v: at the block of the pending p v, else the next
  Ring<Config::num_q_stages> q_ring;  // of q: one step for each tile
  Ring<look_up_stages> look_up_ring;
  SplitSoftmax softmax;
  float o_acc[1][o_tiles][4];
  float block_acc[1][is_fp8 ? o_tiles : 1][4];  // p v of one block of e4m3
  uint32_t p_frag[1][s_tiles * sizeof(Element) / 4][4];

  // s and p of the first block that these rows visit.
  template <Keys keys>
  CUFLASH_DEVICE void attend_first_block(const Score& score, const ConsumerRows& rows, int block,
                                         bool masked, bool is_last) {
    float s_acc[1][num_tiles_of(keys)][4];
    const int first_key = block * Config::block_n;
    wait(smem.k_full[ring.stage()], ring.full_parity());
    pingpong_wait();
    start_scores<keys>(s_acc);
    pingpong_signal();
    const auto dropped = dropped_pairs<num_tiles_of(keys)>(score, rows, first_key);
    const PrefetchedMaskBias<num_tiles_of(keys)> prefetched(score, rows.first_row, first_key);
    ptx::wgmma_wait<0>();
    ptx::pin(flat(s_acc));
    release_scores(is_last);
    if (keys == Keys::all && !masked && !looks_up) {
      online_softmax<Edge::none>(s_acc, score, rows.first_row, first_key, prefetched);
    } else if (Score::masks_before_full && (Score::has_segments || !rows.own.has_full())) {
      online_softmax<Edge::both>(s_acc, score, rows.first_row, first_key, prefetched);
    } else {
      online_softmax<Edge::last>(s_acc, score, rows.first_row, first_key, prefetched);
    }
    pack_p<keys>(s_acc, dropped);
  }

  // q k^T of this block and p v of the previous block. The softmax of this block runs under that
  // p v.
  template <Edge edge, Keys keys = Keys::all>
  CUFLASH_DEVICE void attend_block(const Score& score, const ConsumerRows& rows, int block,
                                   bool is_last) {
    float s_acc[1][num_tiles_of(keys)][4];
    const int first_key = block * Config::block_n + 8 * first_tile_of(keys);
    const Ring<Config::num_stages> before = start_qk_and_pv<keys>(s_acc, [] {});
    const auto dropped = dropped_pairs<num_tiles_of(keys)>(score, rows, first_key);
    PrefetchedMaskBias<num_tiles_of(keys)> prefetched;
    if constexpr (edge != Edge::none) prefetched = {score, rows.first_row, first_key};
    wait_for_scores(s_acc);
    release_scores(is_last);
    online_softmax<edge>(s_acc, score, rows.first_row, first_key, prefetched);
    finish_pv(before);
    pack_p<keys>(s_acc, dropped);
    softmax.rescale_rows(o_acc);
  }

  // attend_block() for a full block, relative to the current reference of the rows: no maximum is
  // formed. If weights show that the reference is too low, it is raised afterwards.
  CUFLASH_DEVICE void attend_full_block(const Score& score, const ConsumerRows& rows,
                                        const BatchIndex& entry, int block, bool is_last) {
    float s_acc[1][s_tiles][4];
    const int first_key = block * Config::block_n;
    const bool are_before = first_key < score.near_offset + rows.first_row;
    const Ring<Config::num_stages> before = start_qk_and_pv<Keys::all>(
        s_acc, [&] { smem.slopes.start_product(s_acc, warpgroup, are_before); });
    const auto dropped = dropped_pairs<s_tiles>(score, rows, first_key);
    wait_for_scores(s_acc);
    release_scores(is_last);
    if constexpr (looks_up) {
      look_up<Edge::none>(s_acc, score, rows.first_row, first_key);
      softmax.rescale[0] = softmax.rescale[1] = 1.0f;
      if (warp_any(softmax.has_low_reference())) softmax.raise_low_references(s_acc, score);
    }
    softmax.keep_reference();
    exponentiate_full(s_acc, score, rows, first_key);
    finish_pv(before);
    if constexpr (looks_up) softmax.rescale_rows(o_acc);
    if (warp_any(softmax.needs_higher_reference())) {
      bool lost[2];
      softmax.raise_to_weights(s_acc, score, lost);
      softmax.rescale_rows(o_acc);
      if (warp_any(lost[0] || lost[1])) {
        const int warp_row = rows.first_row + 16 * (ptx::thread_index() / 32 % 4);
        const RawScores raw(params, entry, score.seqlen, warp_row);
        recompute_weights(s_acc, o_acc, softmax, lost, raw, score, rows.first_row, first_key);
      }
    }
    softmax.add_block();
    pack_p<Keys::all>(s_acc, dropped);
  }

  // Writes the slope of a tile for all its products, after the products of the previous tile.
  CUFLASH_DEVICE void write_slopes(const Score& score) {
    ptx::named_barrier_sync(first_warpgroup_barrier + warpgroup, 128);
    const int thread = ptx::thread_index() % 128;
    if (thread < 8) smem.slopes.write_columns(warpgroup, thread, score);
    ptx::named_barrier_sync(first_warpgroup_barrier + warpgroup, 128);
  }

  // p v of the last block that these rows visit.
  template <Keys keys>
  CUFLASH_DEVICE void multiply_last_pv() {
    start_pv<keys>(ring);
    finish_pv(ring);
    ring.advance();
  }

  // Skips a block that none of these 64 rows sees, in step with the other warpgroups.
  CUFLASH_DEVICE void skip_block() {
    wait(smem.k_full[ring.stage()], ring.full_parity());
    wait(smem.v_full[ring.stage()], ring.full_parity());
    // All threads are past these waits before one of them lets the phases end.
    ptx::named_barrier_sync(first_warpgroup_barrier + warpgroup, 128);
    arrive_if(smem.k_empty[ring.stage()], leads_warpgroup());
    arrive_if(smem.v_empty[ring.stage()], leads_warpgroup());
    ring.advance();
    pingpong_wait();
    pingpong_signal();
  }

  // The weights that dropout drops, drawn while scores are multiplied. (D6)
  template <int tiles>
  CUFLASH_DEVICE DroppedPairs<1, tiles> dropped_pairs(const Score& score, const ConsumerRows& rows,
                                                      int first_key) const {
    const DroppedPairs<1, tiles> dropped(
        score, rows.first_row + 16 * (ptx::thread_index() / 32 % 4), first_key);
    // ptxas would draw after the wait for the products. This arrival needs the drawn bits before
    // the wait. It never happens, because all bits of each half of `any_draws` are equal. (D3)
    if constexpr (Config::dropout && Score::leaves_registers_for_dropout) {
      arrive_if(smem.dependency, dropped.any_draws == 1);
    }
    return dropped;
  }

  // Starts q k^T of the ring's next block, the product of add(), and p v of the previous block.
  // Returns the ring at the previous block.
  template <Keys keys, int tiles, typename Add>
  CUFLASH_DEVICE Ring<Config::num_stages> start_qk_and_pv(float (&s_acc)[1][tiles][4],
                                                          const Add& add) {
    const Ring<Config::num_stages> before = ring;
    ring.advance();
    wait(smem.k_full[ring.stage()], ring.full_parity());
    pingpong_wait();
    start_scores<keys>(s_acc);
    add();
    start_pv<Keys::all>(before);
    pingpong_signal();
    return before;
  }

  template <int tiles>
  CUFLASH_DEVICE void wait_for_scores(float (&s_acc)[1][tiles][4]) {
    ptx::wgmma_wait<(Config::overlap_quarters > 0)>();
    ptx::pin(flat(s_acc));
  }

  // Releases k, and after the last block also q: their products are done.
  CUFLASH_DEVICE void release_scores(bool is_last) {
    arrive_if(smem.k_empty[ring.stage()], leads_warpgroup());
    release_q(is_last);
  }

  CUFLASH_DEVICE void finish_pv(const Ring<Config::num_stages>& at) {
    ptx::wgmma_wait<0>();
    if constexpr (is_fp8) {
      ptx::pin(flat(block_acc));
      unrolled<o_tiles, 4>([&](int t, int i) { o_acc[0][t][i] += block_acc[0][t][i]; });
    } else {
      ptx::pin(flat(o_acc));
    }
    arrive_if(smem.v_empty[at.stage()], leads_warpgroup());
  }

  // If out is staged in q, the store warp releases q instead.
  CUFLASH_DEVICE void release_q(bool last) {
    if constexpr (!stages_out) arrive_if(smem.q_empty[q_ring.stage()], last && leads_warpgroup());
  }

  // Releases q without a product. All threads of the warpgroup are past their wait for q.
  CUFLASH_DEVICE void release_unread_q() {
    if constexpr (!stages_out) ptx::named_barrier_sync(first_warpgroup_barrier + warpgroup, 128);
    release_q(true);
  }

  // Turns raw products into weights, relative to the reference of each row.
  template <Edge edge, int tiles>
  CUFLASH_DEVICE void online_softmax(float (&s_acc)[1][tiles][4], const Score& score, int first_row,
                                     int first_key, const PrefetchedMaskBias<tiles>& prefetched) {
    if constexpr (Score::is_capped_product) {
      return capped_softmax<edge>(s_acc, softmax, smem.dependency, score, first_row, first_key);
    }
    if constexpr (looks_up) {
      look_up<edge>(s_acc, score, first_row, first_key);
    } else {
      apply_score<edge>(s_acc, score, first_row, first_key, prefetched);
    }
    softmax.find_maximum(s_acc, score);
    exponentiate(s_acc, softmax, smem.dependency, [&](float value, int, int i) {
      return score.exponent(value, softmax.shift[i / 2]);
    });
    softmax.add_block();
  }

  // Applies the mask or bias in shared memory, and bounds if the block is at an edge.
  template <Edge edge, int tiles>
  CUFLASH_DEVICE void look_up(float (&s_acc)[1][tiles][4], const Score& score, int first_row,
                              int first_key) {
    apply_look_up(s_acc, smem.look_ups, warpgroup, look_up_ring, score);
    if constexpr (edge != Edge::none) {
      const LaneIndices lane(first_row, first_key);
      unrolled<2>([&](int half) {
        const ColumnBits seen =
            ColumnBits::within(score.kv_range_from(lane.key, lane.row + 8 * half));
        unrolled<tiles, 2>([&](int t, int i) {
          float& value = s_acc[0][t][2 * half + i];
          value = seen.contains(t, i) ? value : -infinity();
        });
      });
    }
  }

  // Computes the weights of a full block, relative to the current reference.
  CUFLASH_DEVICE void exponentiate_full(float (&s_acc)[1][s_tiles][4], const Score& score,
                                        const ConsumerRows& rows, int first_key) {
    const LaneIndices lane(rows.first_row, first_key);
    const RowExponents of_row[2] = {{score, lane.row, first_key, softmax.shift[0]},
                                    {score, lane.row + 8, first_key, softmax.shift[1]}};
    if constexpr (loads_bias) {
      exponentiate(s_acc, softmax, smem.dependency, [&](float logit, int, int i) {
        return score.exponent(logit, softmax.shift[i / 2]);
      });
    } else if constexpr (Score::is_capped) {
      exponentiate_capped<Edge::none>(s_acc, softmax, smem.dependency, of_row, {});
    } else {
      exponentiate(s_acc, softmax, smem.dependency,
                   [&](float product, int, int i) { return of_row[i / 2](product); });
    }
  }

  // Packs the weights that dropout keeps as the operand of p v, with 0 for the keys outside `keys`.
  template <Keys keys, int tiles>
  CUFLASH_DEVICE void pack_p(const float (&s_acc)[1][tiles][4],
                             const DroppedPairs<1, tiles>& dropped) {
    if constexpr (is_fp8) return pack_e4m3<keys>(s_acc);
    unrolled<s_tiles>([&](int t) {
      const int own = t - first_tile_of(keys);
      unrolled<2>([&](int half) {
        uint32_t& pair = p_frag[0][t / 2][t % 2 * 2 + half];
        if (own >= 0 && own < tiles) {
          pair = pack<half_dtype>(s_acc[0][own][2 * half], s_acc[0][own][2 * half + 1]);
          pair = dropped.apply_to(pair, 0, own, half);
        } else {
          pair = 0;
        }
      });
    });
  }

  // pack_p() for e4m3. Two tiles of 8 keys give the order in which transposers put 16 keys.
  template <Keys keys, int tiles>
  CUFLASH_DEVICE void pack_e4m3(const float (&s_acc)[1][tiles][4]) {
    unrolled<s_tiles / 2, 2>([&](int pair, int half) {
      const int own = 2 * pair - first_tile_of(keys);
      uint32_t& four = p_frag[0][pair / 2][pair % 2 * 2 + half];
      if (own >= 0 && own < tiles) {
        const float (&first)[4] = s_acc[0][own], (&second)[4] = s_acc[0][own + 1];
        four = ptx::pack_e4m3(first[2 * half], first[2 * half + 1], second[2 * half],
                              second[2 * half + 1]);
      } else {
        four = 0;
      }
    });
  }

  template <Keys keys, int tiles>
  CUFLASH_DEVICE void start_scores(float (&s_acc)[1][tiles][4]) {
    start_transposed_product<SharedMemory::QTile, SharedMemory::KTile>(
        s_acc, smem.q[q_ring.stage()].k_major(64 * warpgroup),
        smem.k[ring.stage()].k_major(8 * first_tile_of(keys)));
  }

  template <Keys keys>
  CUFLASH_DEVICE void start_pv(const Ring<Config::num_stages>& at) {
    constexpr int step = 4 / sizeof(Element);  // tiles that one product sums
    constexpr int first = first_tile_of(keys) / step, count = num_tiles_of(keys) / step;
    wait(smem.v_full[at.stage()], at.full_parity());
    const SharedMemory::VTile& v = smem.v[at.stage()];
    if constexpr (is_fp8) {
      start_product_e4m3<SharedMemory::VTile, first, count>(block_acc, p_frag, v.k_major());
    } else {
      start_product<SharedMemory::VTile, first, count>(o_acc, p_frag, v.mn_major());
    }
  }

  CUFLASH_DEVICE void pingpong_wait() const {
    if constexpr (uses_pingpong) ptx::named_barrier_sync(first_pingpong_barrier + warpgroup, 256);
  }
  CUFLASH_DEVICE void pingpong_signal() const {
    const int next = warpgroup + 1 == consumers ? 0 : warpgroup + 1;
    if constexpr (uses_pingpong) ptx::named_barrier_arrive(first_pingpong_barrier + next, 256);
  }
};

}  // namespace cuflash
