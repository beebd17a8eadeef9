// Number formats: what an element is, how it is read, rounded and stored.
#pragma once

#include "config.cuh"
#include "ptx/arithmetic.cuh"

namespace cuflash {

using Element = uint16_t;  // storage of the 16-bit operands; Config::dtype says how to read it

constexpr float log2_e = 1.4426950408889634f;
constexpr float ln_2 = 0.6931471805599453f;
constexpr float largest_float = 3.4028234663852886e38f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

template <Dtype dtype>
struct Storage {
  using type = float;
};  // of float32, and of an absent array, which is never read
template <>
struct Storage<Dtype::float16> {
  using type = uint16_t;
};
template <>
struct Storage<Dtype::bfloat16> {
  using type = uint16_t;
};
template <>
struct Storage<Dtype::float64> {
  using type = double;
};
template <>
struct Storage<Dtype::int32> {
  using type = int32_t;
};
template <>
struct Storage<Dtype::int64> {
  using type = int64_t;
};

template <Dtype dtype>
__device__ __forceinline__ float to_float(typename Storage<dtype>::type x) {
  if constexpr (dtype == Dtype::float16) {
    return ptx::float16_to_float(x);
  } else if constexpr (dtype == Dtype::bfloat16) {
    return __uint_as_float(static_cast<uint32_t>(x) << 16);
  } else {
    return static_cast<float>(x);
  }
}

// One number of an option's array. What is finite stays so.
template <Dtype dtype>
__device__ __forceinline__ float read_float(const void* array, int64_t index) {
  const auto x = static_cast<const typename Storage<dtype>::type*>(array)[index];
  const float rounded = to_float<dtype>(x);
  if constexpr (dtype == Dtype::float64) {
    const bool overflowed = fabsf(rounded) == infinity() && fabs(x) != infinity();
    return overflowed ? copysignf(largest_float, rounded) : rounded;
  } else {
    return rounded;
  }
}

// Two neighbouring 16-bit elements in one register, `low` at the lower address.
template <Dtype dtype>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  static_assert(dtype == Dtype::float16 || dtype == Dtype::bfloat16, "16-bit formats");
  if constexpr (dtype == Dtype::float16) {
    return ptx::pack_float16(low, high);
  } else {
    return ptx::pack_bfloat16(low, high);
  }
}

// Sum and maximum over the four lanes that share a row of an accumulator fragment.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

}  // namespace cuflash
