// Which weights of a warp's accumulator (16 rows, 128 columns) are kept, by the masks for its
// operand. Compiled for the host, where lanes run one after the other.
#include "score/dropout.cuh"

extern "C" void probe(const cuflash::ScoreParams* params, int first_row, int first_key,
                      bool (*kept)[128]) {
  using namespace cuflash;
  const BatchAxes axes{0, {1, 1, 1, 1, 1, 1}};
  const Score score(*params, BatchIndex(axes, 0));
  for (unsigned lane = 0; lane < 32; ++lane) {
    threadIdx.x = lane;
    const DroppedPairs<1, 16> pairs(score, first_row, first_key);
    for (int t = 0; t < 16; ++t) {
      for (int i = 0; i < 4; ++i) {
        const uint32_t mask = pairs.apply_to(0xffffffff, 0, t, i / 2) >> (16 * (i % 2)) & 0xffff;
        kept[fragment_row(0, i, lane)][fragment_column(t, i, lane)] = mask == 0xffff;
        if (mask != 0 && mask != 0xffff) std::abort();  // some bits of a weight only
      }
    }
  }
}
