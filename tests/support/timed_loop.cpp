// A loop that kernel-tuner tunes on the processor; it returns its time in milliseconds.
#include <chrono>
#if block_m == 3
#error no such tile
#endif
extern "C" float add(float* out, int n) {
  auto start = std::chrono::steady_clock::now();
  for (int repeat = 0; repeat < block_m * 100; ++repeat)
    for (int i = 0; i < n; i += block_n) out[i] += 1.0f;
  return std::chrono::duration<float, std::milli>(std::chrono::steady_clock::now() - start).count();
}
