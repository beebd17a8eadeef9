// How two warps that share rows exchange their parts of a left operand. A lane has the same rows in
// both warps, so each lane stores its registers for the same lane of the other warp.
#pragma once

#include "tile/fragment.cuh"

namespace cuflash {

// The part of one warp: 16 `slices` rows and 16 `steps` columns.
template <int slices, int steps>
struct LeftOperand {
  struct alignas(2 * sizeof(Register)) Two {
    Register first, second;
  };

  Two two[slices][steps][operand_registers / 2][32];

  CUFLASH_DEVICE void store(const Register (&frag)[slices][steps][operand_registers]) {
    const int lane = lane_index();
    unrolled<slices, steps>([&](int s, int k) {
#pragma unroll
      for (int i = 0; i < operand_registers; i += 2) {
        two[s][k][i / 2][lane] = {frag[s][k][i], frag[s][k][i + 1]};
      }
    });
  }

  CUFLASH_DEVICE void load(Register (&frag)[slices][steps][operand_registers]) const {
    const int lane = lane_index();
    unrolled<slices, steps>([&](int s, int k) {
#pragma unroll
      for (int i = 0; i < operand_registers; i += 2) {
        const Two both = two[s][k][i / 2][lane];
        frag[s][k][i] = both.first;
        frag[s][k][i + 1] = both.second;
      }
    });
  }
};

}  // namespace cuflash
