// 2^x in float64 for the weights of a softmax, by a table and a polynomial, to about one unit in
// the last place: 0.992 in tests over the range, 1.004 as the sum of each step's bound. (D46)
//
//   x = i / 32 + r,  i an integer,  |r| <= 1/64
//   2^x = 2^(i / 32) (1 + r q(r)),  q(r) = (2^r - 1) / r
//
// x is an exponent of 2, so that i and r come from three additions, of which all but the first are
// exact. 2^(i / 32) is a table entry with an exponent added to its bits.
#pragma once

#include "config.cuh"

namespace cuflash {

// The bits of 2^(j / 32), rounded to nearest, minus j << 47. For an i whose lower five bits are j,
// adding i << 47 gives the bits of 2^(i / 32).
__device__ constexpr uint64_t exp2_table[32] = {
    0x3ff0000000000000, 0x3fefd9b0d3158574, 0x3fefb5586cf9890f, 0x3fef9301d0125b51,
    0x3fef72b83c7d517b, 0x3fef54873168b9aa, 0x3fef387a6e756238, 0x3fef1e9df51fdee1,
    0x3fef06fe0a31b715, 0x3feef1a7373aa9cb, 0x3feedea64c123422, 0x3feece086061892d,
    0x3feebfdad5362a27, 0x3feeb42b569d4f82, 0x3feeab07dd485429, 0x3feea47eb03a5585,
    0x3feea09e667f3bcd, 0x3fee9f75e8ec5f74, 0x3feea11473eb0187, 0x3feea589994cce13,
    0x3feeace5422aa0db, 0x3feeb737b0cdc5e5, 0x3feec49182a3f090, 0x3feed503b23e255d,
    0x3feee89f995ad3ad, 0x3feeff76f2fb5e47, 0x3fef199bdd85529c, 0x3fef3720dcef9069,
    0x3fef5818dcfba487, 0x3fef7c97337b9b5f, 0x3fefa4afa2a490da, 0x3fefd0765b6e4540,
};

// The table in memory, for any thread.
struct MemoryPowers {
  CUFLASH_DEVICE uint64_t operator()(int i) const { return exp2_table[i & 31]; }
};

// The table in the registers of a warp: no memory is read, but all lanes call it together. (D47)
struct LanePowers {
  uint32_t low, high;  // halves of this lane's entry

  CUFLASH_DEVICE explicit LanePowers(int lane)
      : low(static_cast<uint32_t>(exp2_table[lane])),
        high(static_cast<uint32_t>(exp2_table[lane] >> 32)) {}

  // The shuffle uses only the lower five bits of i.
  CUFLASH_DEVICE uint64_t operator()(int i) const {
    return static_cast<uint64_t>(__shfl_sync(0xffffffff, high, i)) << 32 |
           __shfl_sync(0xffffffff, low, i);
  }
};

constexpr double to_32nds = 0x1.8p47;  // added to x, it leaves x in 32nds in the lower bits

// 2^(i / 32 + r), which is wrong unless it is a normal number: callers check.
template <typename Powers>
CUFLASH_DEVICE double exp2_of_parts(int i, double r, const Powers& powers) {
  // Interpolates (2^r - 1) / r at the zeros of the Chebyshev polynomial of degree 6.
  double q = 0x1.4309557c7947ap-13;
  q = fma(q, r, 0x1.5d885e6ef14a6p-10);
  q = fma(q, r, 0x1.3b2ab6fb9eab1p-7);
  q = fma(q, r, 0x1.c6b08d70380ddp-5);
  q = fma(q, r, 0x1.ebfbdff82c58fp-3);
  q = fma(q, r, 0x1.62e42fefa39efp-1);

  const uint64_t entry = powers(i);
  const int high = static_cast<int>(entry >> 32) + static_cast<int>(static_cast<uint32_t>(i) << 15);
  const double power = __hiloint2double(high, static_cast<int>(entry));
  return fma(power, q * r, power);
}

// 2^x for x up to 1023. Results below the least normal number are 0, also 2^-inf. NaN and +inf give
// NaN. 2^0 is exactly 1.
template <typename Powers>
CUFLASH_DEVICE double exp2_float64(double x, const Powers& powers) {
  const double shifted = x + to_32nds;
  const double r = x - (shifted - to_32nds);
  const double result = exp2_of_parts(__double2loint(shifted), r, powers);

  // Is x below -1022 and no negative NaN? Integers are compared off the float64 pipe. (D48)
  constexpr uint32_t least = 0xc08ff000, negative_nan = 0xfff80000;
  const uint32_t beyond = static_cast<uint32_t>(__double2hiint(x)) - (least + 1);
  return beyond < negative_nan - (least + 1) ? 0.0 : result;
}

// 2^(a b - reference), where `shift` is to_32nds - reference, which is exact because the reference
// is a multiple of 1/32 below 2^46. a b is rounded once, after its 32nds are subtracted. Exponents
// and results are as above, but a NaN must have no sign.
template <typename Powers>
CUFLASH_DEVICE double exp2_of_product(double a, double b, double shift, const Powers& powers) {
  const double shifted = fma(a, b, shift);
  const double r = fma(a, b, shift - shifted);
  const double result = exp2_of_parts(__double2loint(shifted), r, powers);

  // The bits of to_32nds - 1022. Negative numbers are less as signed integers.
  constexpr int64_t least = 0x42e8000000000000 - 32 * 1022;
  return __double_as_longlong(shifted) < least ? 0.0 : result;
}

}  // namespace cuflash
