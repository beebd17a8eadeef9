// The threads of neighbours_probe.cu, one after the other on the host.
#include <bit>

inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
TYPES;

extern "C" void run(long threads, PLACES) {
  for (long i = 0; i < threads; ++i) {
    BODY;
  }
}
