// The forward of a problem without keys: out is zero, lse is minus infinity.
#include "config.cuh"
#include "params.cuh"

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads)
    cuflash_forward_of_no_keys(const __grid_constant__ cuflash::ForwardParams params) {
  float* out = static_cast<float*>(params.out);
  for (int i = threadIdx.x; i < params.head_dim_v; i += blockDim.x) {
    out[blockIdx.x * params.head_dim_v + i] = 0.0f;
  }
  float* lse = static_cast<float*>(params.lse);
  if (lse != nullptr && threadIdx.x == 0) lse[blockIdx.x] = -__int_as_float(0x7f800000);
}
