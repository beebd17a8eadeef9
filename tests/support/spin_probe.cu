// Keeps multiprocessors busy: one each, where a block of threads takes all of its shared memory.

extern "C" __global__ void cuflash_spin(long long clocks) {
  for (const long long start = clock64(); clock64() - start < clocks;) {
  }
}
