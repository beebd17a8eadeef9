// How long does one thread wait for a word whose address it has just read?

extern "C" __global__ void cuflash_read_latency(const int* next, int* last, int steps) {
  int at = 0;
  for (int step = 0; step < steps; ++step) at = __ldcg(next + at);
  *last = at;
}
