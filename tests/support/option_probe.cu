// Scores, their derivatives and what dropout keeps, pair by pair as in the exact paths of kernels,
// and exponents as full blocks form them.
#include "config.cuh"
#include "score/dropout.cuh"
#include "score/exponents.cuh"

namespace cuflash {

// Arrays of shape (entries, m, n); sinks has shape (entries).
struct Probed {
  const float* products;
  float* scores;
  float* slopes;
  float* exponents;  // relative to a reference of 0.25; 0 where products do not give them
  uint8_t* kept;
  float* sinks;
};

__device__ void probe_entry(const ScoreParams& params, int number, const Probed& to) {
  const BatchAxes axes{1, {1 << 30, 1, 1, 1, 1, 1}};
  const BatchIndex entry(axes, number);
  const Score score(params, entry);
  to.sinks[number] = score.sink(entry);
  for (int m = 0; m < params.seqlen_q; ++m) {
    const Range keys = score.kv_range(m, m + 1);
    const ColumnBits of_row = score.segment_of_row<1>(m, 0, keys);
    for (int n = 0; n < params.seqlen_k; ++n) {
      const int at = (number * params.seqlen_q + m) * params.seqlen_k + n;
      const bool visible = keys.contains(n) && score.sees(m, n);
      to.scores[at] = visible ? score.apply(to.products[at], m, n) : -infinity();
      to.slopes[at] = visible ? score.derivative(to.products[at], m, n) : 0.0f;
      if constexpr (Score::exponent_of_product) {
        const int first = n < 3 || score.crosses_diagonal({m, m + 1}, {n - 3, n + 1}) ? n : n - 3;
        const RowExponents row(score, m, first, 0.25f);
        float product = to.products[at];
        if constexpr (Score::multiplies_slopes) {  // as tensor cores add them: sm90/slopes.cuh
          const float step = score.slope / score.scale();
          product +=
              (first <= score.near_offset + m ? step : -step) * static_cast<float>(n - first);
        }
        const float near = row(product);
        to.exponents[at] = Config::softcap ? row.exact_exponent(product, near) : near;
      } else {
        to.exponents[at] = 0.0f;
      }
      to.kept[at] = keeps_pair(score, m, n);
      // The two ways to ask for a segment have to agree; a lane of one tile holds columns 0 and 1.
      const bool seen = score.visible(m, n);
      const ColumnBits of_key =
          score.segment_of_key<1>(n, m, score.q_range(n, n + 1).relative_to(m));
      const bool agree = !seen || (of_key.contains(0, 0) && (n > 1 || of_row.contains(0, n)));
      if (!agree) to.scores[at] = infinity();
    }
  }
}

}  // namespace cuflash

extern "C" void probe(const cuflash::ScoreParams* params, int entries, const cuflash::Probed* to) {
  for (int number = 0; number < entries; ++number) cuflash::probe_entry(*params, number, *to);
}
