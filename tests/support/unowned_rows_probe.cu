// Calls clear_unowned_rows of Hopper's forward, alone, for rows of no packed sequence.
#include "sm90/unowned_rows.cuh"

extern "C" __global__ void __launch_bounds__(32)
    cuflash_unowned_rows(const __grid_constant__ cuflash::ForwardSm90Params params) {
  cuflash::clear_unowned_rows(params);
}
