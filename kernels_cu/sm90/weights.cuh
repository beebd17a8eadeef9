// Weights of a block, computed while p v of the previous block is in flight: from exponents or,
// under a softcap alone, from products.
#pragma once

#include "score/exponents.cuh"
#include "sm90/barrier.cuh"
#include "sm90/logits.cuh"
#include "sm90/softmax.cuh"

namespace cuflash {

// Keeps exponentials before the wait for p v, which ptxas would move above most of them. The
// arrival depends on the exponentials so far. It never happens, because no sum has these bits.
CUFLASH_DEVICE void pin_before_wait(const SplitSoftmax& softmax, uint64_t& dependency) {
  const float sum = softmax.block_sum[0] + softmax.block_sum[1];
  arrive_if(dependency, __float_as_uint(sum) == 0xffffffffu);
}

// Turns scores into weights. exponent(score, t, i) is called for register i of tile t.
template <int tiles, typename Exponent>
CUFLASH_DEVICE void exponentiate(float (&s_acc)[1][tiles][4], SplitSoftmax& softmax,
                                 uint64_t& dependency, const Exponent& exponent) {
  constexpr int pinned = tiles * Config::overlap_quarters / 4;
  softmax.exponentiate(s_acc, 0, pinned, exponent);
  if constexpr (pinned > 0) pin_before_wait(softmax, dependency);
  softmax.exponentiate(s_acc, pinned, tiles, exponent);
}

// Forms exponents of some tiles while exponentials of the tiles before are computed. Each step uses
// the sum of the step before, because ptxas would otherwise leave all sums to the end.
template <Edge edge, int tiles>
CUFLASH_DEVICE void exponentiate_capped(float (&s_acc)[1][tiles][4], SplitSoftmax& softmax,
                                        uint64_t& dependency, const RowExponents (&of_row)[2],
                                        const SeenColumns& seen) {
  using Part = CappedExponents<tiles>;
  constexpr int pinned = tiles * Config::overlap_quarters / 4;
  Part parts[2];
  parts[0].form_near(s_acc, 0, of_row);
  float sum = 0.0f;
  unrolled<tiles / Part::count>([&](int number) {
    Part& part = parts[number % 2];
    const int begin = number * Part::count, end = begin + Part::count;
    part.correct_far(s_acc, begin, of_row, sum);
    sum = softmax.block_sum[0] + softmax.block_sum[1];
    if (end < tiles) parts[(number + 1) % 2].form_near(s_acc, end, of_row);
    softmax.exponentiate(s_acc, begin, end, [&](float, int t, int i) {
      const bool is_seen = edge == Edge::none || seen.of_row[i / 2].contains(t, i % 2);
      return is_seen ? part.exponents[t - begin][i] : -infinity();
    });
    if (begin < pinned && pinned <= end) pin_before_wait(softmax, dependency);
  });
}

// Turns raw products into weights, relative to the reference of the largest product of a row.
template <Edge edge, int tiles>
CUFLASH_DEVICE void capped_softmax(float (&s_acc)[1][tiles][4], SplitSoftmax& softmax,
                                   uint64_t& dependency, const Score& score, int first_row,
                                   int first_key) {
  const LaneIndices lane(first_row, first_key);
  const SeenColumns seen(score, lane, edge, 8 * tiles);
  unrolled<2>([&](int half) {
    float largest = -infinity();
    unrolled<tiles, 2>([&](int t, int i) {
      // A visible product of -inf is a score: the softcap makes it -cap.
      const float uncapped = fmaxf(s_acc[0][t][2 * half + i] * score.scale(), -largest_float);
      const bool is_seen = edge == Edge::none || seen.of_row[half].contains(t, i);
      largest = fmaxf(largest, is_seen ? uncapped : -infinity());
    });
    largest = quad_max(largest);
    const float cap = score.params.softcap, logit = cap * tanh(__fdividef(largest, cap));
    softmax.raise_reference(half, largest == -infinity() ? largest : logit, score);
  });
  softmax.keep_reference();
  const RowExponents of_row[2] = {{score, lane.row, first_key, softmax.shift[0]},
                                  {score, lane.row + 8, first_key, softmax.shift[1]}};
  exponentiate_capped<edge>(s_acc, softmax, dependency, of_row, seen);
  softmax.add_block();
}

}  // namespace cuflash
