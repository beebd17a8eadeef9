// How long does one thread wait until a word that it wrote can be seen by all?

extern "C" __global__ void cuflash_write_latency(const int* next, int* target, int* last,
                                                 int steps) {
  // As scattered as what is read, but known long before: 65,537 lines further at each step.
  unsigned at = 0;
  const unsigned words = static_cast<unsigned>(*next);
  for (int step = 0; step < steps; ++step) {
    target[at] = step;
    __threadfence();  // until the write is visible
    at = (at + 65537u * 32u) % words;
  }
  *last = static_cast<int>(at);
}
