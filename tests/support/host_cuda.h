// The few words of CUDA that the index arithmetic of kernels_cu uses, for a host compiler.
#pragma once

#include <cmath>

#define __device__
#define __forceinline__ inline
#define __shared__
#define __align__(n) __attribute__((aligned(n)))

struct uint4 {
  unsigned x, y, z, w;
};
struct {
  unsigned x;
} static threadIdx, blockIdx;

template <typename T>
constexpr T min(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __double2loint(double x) { return static_cast<int>(__builtin_bit_cast(long long, x)); }
inline long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }
inline int __double2hiint(double x) {
  return static_cast<int>(__builtin_bit_cast(long long, x) >> 32);
}
inline double __hiloint2double(int high, int low) {
  return __builtin_bit_cast(
      double, static_cast<unsigned long long>(high) << 32 | static_cast<unsigned>(low));
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = a | static_cast<unsigned long long>(b) << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<unsigned>(both >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  }
  return result;
}
inline bool __any_sync(unsigned, bool vote) { return vote; }
template <typename T>
T __shfl_sync(unsigned, T x, int, int = 32) {
  return x;
}
template <typename T>
T __shfl_xor_sync(unsigned, T x, int) {
  return x;
}
