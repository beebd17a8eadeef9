// Does every guard hold its pattern? For `guards.py`: a block of threads a guard, a thread a byte.

extern "C" __global__ void compare(const unsigned char* const* guards, unsigned char pattern,
                                   unsigned char* damaged) {
  if (guards[blockIdx.x][threadIdx.x] != pattern) damaged[blockIdx.x] = 1;
}
