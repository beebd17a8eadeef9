// How fast is shared memory read, 16 bytes a thread, every bank once?

constexpr int vectors = 2048;  // 32 KiB

extern "C" __global__ void __launch_bounds__(1024)
    cuflash_shared(unsigned* sum, int repeats, int step) {
  __shared__ uint4 room[vectors];
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) room[i] = make_uint4(i, i, i, i);
  __syncthreads();  // room is filled
  unsigned seen = 0;
  int at = threadIdx.x;
  for (int repeat = 0; repeat < repeats; ++repeat) {
#pragma unroll 16
    for (int i = 0; i < 16; ++i) {
      const uint4 read = room[at];
      seen ^= read.x ^ read.y ^ read.z ^ read.w;
      at = (at + step) % vectors;
    }
  }
  // Never true, but for the compiler: what is read is used.
  if (seen == 0x5eed) *sum = seen;
}
