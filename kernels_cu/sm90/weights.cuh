// Exponents of a block become weights while p v of the block before is in flight; under a softcap
// alone, products do.
#pragma once

#include "score/exponents.cuh"
#include "sm90/barrier.cuh"
#include "sm90/logits.cuh"
#include "sm90/softmax.cuh"

namespace cuflash {

// Nothing ties exponentials to the wait for p v, and ptxas would move it above most of them. An
// arrival that never happens, because no sum has these bits, needs those so far done.
CUFLASH_DEVICE void tie(const SplitSoftmax& softmax, uint64_t& never) {
  const float sum = softmax.block_sum[0] + softmax.block_sum[1];
  arrive_if(never, __float_as_uint(sum) == 0xffffffffu);
}

// exponent(score, t, i) of register i of tile t.
template <int tiles, typename Exponent>
CUFLASH_DEVICE void exponentiate(float (&s_acc)[1][tiles][4], SplitSoftmax& softmax,
                                 uint64_t& never, const Exponent& exponent) {
  constexpr int tied = tiles * Config::overlap_quarters / 4;
  softmax.exponentiate(s_acc, 0, tied, exponent);
  if constexpr (tied > 0) tie(softmax, never);
  softmax.exponentiate(s_acc, tied, tiles, exponent);
}

// Exponents of some tiles are formed while exponentials of those before are taken, whose sums are
// complete one step later: ptxas would leave all sums to the end.
template <Edge edge, int tiles>
CUFLASH_DEVICE void exponentiate_capped(float (&s_acc)[1][tiles][4], SplitSoftmax& softmax,
                                        uint64_t& never, const RowExponents (&of_row)[2],
                                        const SeenColumns& seen) {
  using Part = CappedExponents<tiles>;
  constexpr int tied = tiles * Config::overlap_quarters / 4;
  Part parts[2];
  parts[0].form(s_acc, 0, of_row);
  float sum = 0.0f;
  unrolled<tiles / Part::count>([&](int number) {
    Part& part = parts[number % 2];
    const int begin = number * Part::count, end = begin + Part::count;
    part.mend(s_acc, begin, of_row, sum);
    sum = softmax.block_sum[0] + softmax.block_sum[1];
    if (end < tiles) parts[(number + 1) % 2].form(s_acc, end, of_row);
    softmax.exponentiate(s_acc, begin, end, [&](float, int t, int i) {
      const bool is_seen = edge == Edge::none || seen.of_row[i / 2].contains(t, i % 2);
      return is_seen ? part.exponents[t - begin][i] : -infinity();
    });
    if (begin < tied && tied <= end) tie(softmax, never);
  });
}

// Raw products become weights, relative to the rows' reference: that of the largest product.
template <Edge edge, int tiles>
CUFLASH_DEVICE void capped_softmax(float (&s_acc)[1][tiles][4], SplitSoftmax& softmax,
                                   uint64_t& never, const Score& score, int first_row,
                                   int first_key) {
  const LaneIndices lane(first_row, first_key);
  const SeenColumns seen(score, lane, edge, 8 * tiles);
  unrolled<2>([&](int half) {
    float largest = -infinity();
    unrolled<tiles, 2>([&](int t, int i) {
      const float uncapped = s_acc[0][t][2 * half + i] * score.scale();
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
  exponentiate_capped<edge>(s_acc, softmax, never, of_row, seen);
  softmax.add_block();
}

}  // namespace cuflash
