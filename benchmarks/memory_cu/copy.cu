// How fast are bytes read and written elsewhere?

constexpr int at_once = 4;  // vectors of a thread that are on their way together

extern "C" __global__ void cuflash_copy(const uint4* source, uint4* target, long long vectors) {
  const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
  const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (long long i = first; i + (at_once - 1) * threads < vectors; i += at_once * threads) {
    uint4 read[at_once];
#pragma unroll
    for (int n = 0; n < at_once; ++n) read[n] = __ldcg(source + i + n * threads);
#pragma unroll
    for (int n = 0; n < at_once; ++n) target[i + n * threads] = read[n];
  }
}
