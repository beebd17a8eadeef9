// How two warps that own the same rows give each other their parts of a left operand: the lanes of
// both hold the same rows of it, so that each lane leaves its registers for one lane of the other.
#pragma once

#include "tile/fragment.cuh"

namespace cuflash {

// Of one warp: 16 `slices` rows, 16 `steps` columns.
template <int slices, int steps>
struct LeftOperand {
  struct alignas(2 * sizeof(Register)) Two {
    Register first, second;
  };

  Two two[slices][steps][operand_registers / 2][32];

  CUFLASH_DEVICE void put(const Register (&frag)[slices][steps][operand_registers]) {
    const int lane = lane_index();
    unrolled<slices, steps>([&](int s, int k) {
#pragma unroll
      for (int i = 0; i < operand_registers; i += 2) {
        two[s][k][i / 2][lane] = {frag[s][k][i], frag[s][k][i + 1]};
      }
    });
  }

  CUFLASH_DEVICE void take(Register (&frag)[slices][steps][operand_registers]) const {
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
