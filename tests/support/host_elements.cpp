// A kernel of CuPy's that works element by element, on the host. Macros: REAL, its element of more
// than 8 bits; INPUT, NAME, FACTOR and OUTPUT, as its parameters are; BODY, the file with its text.
#include "host_kernel.h"

using std::rintf;
using std::signbit;
using T = REAL;

// Rounded towards 0: a cast rounds to nearest.
inline float __double2float_rz(double x) {
  const float y = static_cast<float>(x);
  return std::fabs(static_cast<double>(y)) > std::fabs(x) ? std::nextafterf(y, 0.0f) : y;
}

extern "C" void run(long count, const INPUT* inputs, const FACTOR* factors, OUTPUT* outputs) {
  for (long i = 0; i < count; ++i) {
    const INPUT NAME = inputs[i];
    const FACTOR factor = factors[i];
    OUTPUT& y = outputs[i];
#include BODY
  }
}
