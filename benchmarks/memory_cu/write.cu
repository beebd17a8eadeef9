// How fast are bytes written?

extern "C" __global__ void cuflash_write(uint4* target, long long vectors, unsigned value) {
  const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
  const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
#pragma unroll 8
  for (long long i = first; i < vectors; i += threads) {
    target[i] = make_uint4(value, value, value, value);
  }
}
