// Calls clear_rows_outside_sequences of Hopper's forward, alone, for rows of no packed sequence.
#include "sm90/rows_outside_sequences.cuh"

extern "C" __global__ void __launch_bounds__(32)
    cuflash_rows_outside_sequences(const __grid_constant__ cuflash::ForwardSm90Params params) {
  cuflash::clear_rows_outside_sequences(params);
}
