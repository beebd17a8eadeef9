// Number formats: what an element is, how it is read, rounded and stored.
#pragma once

#include "score/exp64.cuh"
#include "ptx/arithmetic.cuh"

namespace cuflash {

// Type of one number in memory. Absent arrays, which are never read, count as float32.
template <Dtype dtype>
using Storage =
    If<dtype == Dtype::float16 || dtype == Dtype::bfloat16, uint16_t,
       If<dtype == Dtype::float8_e4m3fn || dtype == Dtype::float8_e5m2, uint8_t,
          If<dtype == Dtype::float64, double,
             If<dtype == Dtype::int32, int32_t, If<dtype == Dtype::int64, int64_t, float>>>>>;

// Type of q, k and v. Elements of 8 and 16 bits are raw bits, which Config::dtype interprets.
using Element = Storage<Config::dtype>;
// Keys and values of 8 bits beside q of 16 bits. Read as operands, they become float16.
constexpr bool has_8_bit_keys = Config::kv_dtype != Dtype::none;
constexpr Dtype key_dtype = has_8_bit_keys ? Config::kv_dtype : Config::dtype;
constexpr Dtype operand_dtype = has_8_bit_keys ? Dtype::float16 : Config::dtype;
// Are the operands of bfloat16 queries float16? Its range is smaller: see tile/float16_rows.cuh.
constexpr bool narrows_range = has_8_bit_keys && Config::dtype == Dtype::bfloat16;
constexpr bool is_fp8 = Config::dtype == Dtype::float8_e4m3fn;

// Type of scores, statistics and sums: float32, or float64 for float64 inputs.
constexpr bool is_double = Config::dtype == Dtype::float64;
using Real = If<is_double, double, float>;

constexpr Real log2_e = static_cast<Real>(1.4426950408889634);
constexpr Real ln_2 = static_cast<Real>(0.6931471805599453);
constexpr float largest_float = 3.4028234663852886e38f;

// A row is far from 0 if |log2| of its exponentials reaches this bound: a unit in the last place of
// its scores is then 2^-6 or more (in float32 2^-4).
constexpr Real far_from_0 = is_double ? 0x1p46 : 0x1p20;

CUFLASH_DEVICE float infinity() { return __int_as_float(0x7f800000); }

// A NaN that arithmetic made or passed on. The test uses no float64 instruction.
CUFLASH_DEVICE bool is_quiet_nan(float x) {
  return (__float_as_uint(x) & 0x7fc00000) == 0x7fc00000;
}
CUFLASH_DEVICE bool is_quiet_nan(double x) {
  return (__double2hiint(x) & 0x7ff80000) == 0x7ff80000;
}

// 2^x, for any thread.
CUFLASH_DEVICE float power_of_two(float x) { return ptx::exp2_approx(x); }
CUFLASH_DEVICE double power_of_two(double x) { return exp2_float64(x, MemoryPowers{}); }

// 2^x for a warp whose lanes all call together. In float64 each lane holds one entry of a table.
struct FloatPowers {
  CUFLASH_DEVICE float operator()(float x) const { return ptx::exp2_approx(x); }
};

struct DoublePowers {
  LanePowers entries{static_cast<int>(threadIdx.x % 32)};

  CUFLASH_DEVICE double operator()(double x) const { return exp2_float64(x, entries); }

  // 2^(a b - reference), where `shift` encodes the reference.
  CUFLASH_DEVICE double of_product(double a, double b, double shift) const {
    return exp2_of_product(a, b, shift, entries);
  }
};

using WarpPowers = If<is_double, DoublePowers, FloatPowers>;

template <Dtype dtype>
CUFLASH_DEVICE Real to_real(Storage<dtype> x) {
  if constexpr (dtype == Dtype::float16) {
    return ptx::float16_to_float(x);
  } else if constexpr (dtype == Dtype::bfloat16) {
    return __uint_as_float(static_cast<uint32_t>(x) << 16);
  } else if constexpr (dtype == Dtype::float8_e4m3fn) {
    const uint32_t rest = x & 0x7f;  // 4 bits of exponent, biased by 7, and 3 of mantissa
    const float normal = __uint_as_float((rest << 20) + (120u << 23));
    const float size = rest < 8       ? rest * 0x1p-9f
                       : rest == 0x7f ? __uint_as_float(0x7fffffff)
                                      : normal;
    return x & 0x80 ? -size : size;
  } else if constexpr (dtype == Dtype::float8_e5m2) {  // the upper byte of a float16
    return ptx::float16_to_float(static_cast<uint16_t>(x << 8));
  } else {
    return static_cast<Real>(x);
  }
}

// One number of an option's array. A finite number stays finite.
template <Dtype dtype>
CUFLASH_DEVICE Real finite_real(Storage<dtype> x) {
  const Real rounded = to_real<dtype>(x);
  if constexpr (dtype == Dtype::float64 && !is_double) {
    const bool overflowed = fabsf(rounded) == infinity() && fabs(x) != infinity();
    return overflowed ? copysignf(largest_float, rounded) : rounded;
  } else {
    return rounded;
  }
}

template <Dtype dtype>
CUFLASH_DEVICE Real read_real(const void* array, int64_t index) {
  return finite_real<dtype>(static_cast<const Storage<dtype>*>(array)[index]);
}

// A scale of elements, or 1 if there is no array of scales.
template <Dtype dtype>
CUFLASH_DEVICE Real read_scale(const void* array, int64_t index) {
  if constexpr (dtype == Dtype::none) return 1;
  return read_real<dtype>(array, index);
}

// The 16-bit format of weights in p v, and of results staged in shared memory.
constexpr Dtype half_dtype =
    Config::out_dtype == Dtype::float32 ? Config::dtype : Config::out_dtype;

// The first (half 0) or last two of four 8-bit elements of k or v in float16, which has them all.
CUFLASH_DEVICE uint32_t to_two_float16(uint32_t four, int half) {
  return key_dtype == Dtype::float8_e5m2 ? __byte_perm(four, 0, half == 0 ? 0x1404 : 0x3424)
                                         : ptx::e4m3_to_float16(half == 0 ? four : four >> 16);
}

// Two neighbouring 16-bit elements in one register, `low` at the lower address.
template <Dtype dtype>
CUFLASH_DEVICE uint32_t pack(float low, float high) {
  static_assert(dtype == Dtype::float16 || dtype == Dtype::bfloat16, "float16 or bfloat16");
  if constexpr (dtype == Dtype::float16) {
    return ptx::pack_float16(low, high);
  } else {
    return ptx::pack_bfloat16(low, high);
  }
}

// Sum and maximum over the quad: the four lanes that share a row of an accumulator fragment.
template <typename Value>
CUFLASH_DEVICE Value quad_sum(Value x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

template <typename Value>
CUFLASH_DEVICE Value quad_max(Value x) {
  x = fmax(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmax(x, __shfl_xor_sync(0xffffffff, x, 2));
}

}  // namespace cuflash
