// The instructions of kernels_cu/ptx that the portable kernels use, on the host.
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

inline int block_index() { return blockIdx.x; }
inline int thread_index() { return threadIdx.x; }
inline int cluster_index() { return blockIdx.x / host::cluster_blocks; }
inline uint32_t cluster_rank() { return blockIdx.x % host::cluster_blocks; }
inline int cluster_size() { return host::cluster_blocks; }
inline void launch_dependents() {}
inline void wait_for_previous_kernel() {}
inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - smem_bytes);
}

inline uint4 load_once(const void* from) { return *static_cast<const uint4*>(from); }
inline void store_once(void* to, uint4 x) { *static_cast<uint4*>(to) = x; }
inline void discard_line(void* line) { std::memset(line, 0xa5, 128); }

inline float computed(float x) { return x; }
inline float exp2_approx(float x) { return exp2f(x); }

inline float max_or_nan(float x, float y) { return x > y || x != x ? x : y; }

inline uint32_t spread_high_bits(uint32_t x) {
  return (x >> 31 ? 0xffff0000u : 0) | (x >> 15 & 1 ? 0xffffu : 0);
}
template <typename Function>
inline uint32_t of_halves(uint32_t x, uint32_t y, Function function) {
  const uint16_t low = function(static_cast<uint16_t>(x), static_cast<uint16_t>(y));
  const uint16_t high = function(static_cast<uint16_t>(x >> 16), static_cast<uint16_t>(y >> 16));
  return low | static_cast<uint32_t>(high) << 16;
}
inline uint32_t min_of_halves(uint32_t x, uint32_t y) {
  return of_halves(x, y, [](uint16_t a, uint16_t b) { return std::min(a, b); });
}
inline uint32_t sum_of_halves(uint32_t x, uint32_t y) {
  return of_halves(x, y, [](uint16_t a, uint16_t b) { return a + b; });
}
inline uint32_t signed_max_of_halves(uint32_t x, uint32_t y) {
  return of_halves(x, y, [](int16_t a, int16_t b) { return std::max(a, b); });
}
inline uint32_t and_not_xor(uint32_t x, uint32_t y, uint32_t z) { return x & ~(y ^ z); }
inline float float16_to_float(uint16_t bits) {
  return static_cast<float>(std::bit_cast<_Float16>(bits));
}
inline uint16_t float16_bits(float x) { return std::bit_cast<uint16_t>(static_cast<_Float16>(x)); }
inline uint16_t bfloat16_bits(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (x != x) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint32_t pack_float16(float low, float high) {
  return float16_bits(low) | static_cast<uint32_t>(float16_bits(high)) << 16;
}
inline uint32_t pack_bfloat16(float low, float high) {
  return bfloat16_bits(low) | static_cast<uint32_t>(bfloat16_bits(high)) << 16;
}

// An 8-bit float with so many bits of mantissa, to nearest even; what is too large is `most`.
template <int mantissa>
inline uint32_t float8_bits(float x, float most) {
  if (x != x) return 0x7f;
  const int bias = mantissa == 3 ? 7 : 15;
  const float size = std::fmin(std::fabs(x), most);
  const int exponent = std::max(size == 0 ? 1 - bias : std::ilogb(size), 1 - bias);
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(size, mantissa - exponent)));
  const uint32_t code = steps + ((exponent + bias - 1) << mantissa);
  return (std::signbit(x) ? 0x80 : 0) | code;
}
inline uint32_t pack_e4m3(float a, float b, float c, float d) {
  const auto bits = [](float x) { return float8_bits<3>(x, 448.0f); };
  return bits(a) | bits(b) << 8 | bits(c) << 16 | bits(d) << 24;
}
inline uint32_t pack_e5m2(float a, float b, float c, float d) {
  const auto bits = [](float x) { return float8_bits<2>(x, 57344.0f); };
  return bits(a) | bits(b) << 8 | bits(c) << 16 | bits(d) << 24;
}

inline float e4m3_value(uint32_t code) {
  const int rest = code & 0x7f;
  const float size = rest == 0x7f ? NAN
                     : rest < 8   ? std::ldexp(float(rest), -9)
                                  : std::ldexp(float(8 + rest % 8), rest / 8 - 10);
  return code & 0x80 ? -size : size;
}
inline uint32_t e4m3_to_float16(uint32_t pair) {
  return pack_float16(e4m3_value(pair & 0xff), e4m3_value(pair >> 8 & 0xff));
}
inline float2 load_shared_pair(uint32_t smem) {
  float2 pair;
  std::memcpy(&pair, smem_bytes + smem, 8);
  return pair;
}

template <int bytes>
inline void cp_async(uint32_t smem, const void* source, bool valid) {
  if (valid) {
    host::copied_bytes += bytes;
    std::memcpy(smem_bytes + smem, source, bytes);
  } else {
    std::memset(smem_bytes + smem, 0, bytes);
  }
}
inline void cp_async_commit() {}
template <int pending>
inline void cp_async_wait() {}

// Lanes 8 i to 8 i + 7 hold the addresses of the rows of matrix i.
template <bool transposed>
inline void ldmatrix(uint32_t (&fragment)[4], uint32_t smem) {
  host::gather(smem, [&](const auto& rows) {
    const int lane = host::current % 32;
    for (int i = 0; i < 4; ++i) {
      uint16_t pair[2];
      for (int j = 0; j < 2; ++j) {
        const int row = transposed ? 2 * (lane % 4) + j : lane / 4;
        const int column = transposed ? lane / 4 : 2 * (lane % 4) + j;
        std::memcpy(&pair[j], smem_bytes + rows[8 * i + row] + 2 * column, 2);
      }
      fragment[i] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
    }
    return 0;
  });
}
inline void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t smem) { ldmatrix<false>(fragment, smem); }
inline void ldmatrix_x4_trans(uint32_t (&fragment)[4], uint32_t smem) {
  ldmatrix<true>(fragment, smem);
}

template <Dtype dtype>
inline float half_of(uint32_t packed, int i) {
  const uint16_t bits = static_cast<uint16_t>(packed >> (16 * i));
  if (dtype == Dtype::float16) return float16_to_float(bits);
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

template <Dtype dtype>
inline void mma_m16n8k16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Operands {
    uint32_t a[4], b[2];
  };
  const Operands own{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  host::gather(own, [&](const auto& lanes) {
    const int lane = host::current % 32;
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
      double sum = acc[i];
      for (int k = 0; k < 16; ++k) {
        const uint32_t left = lanes[row % 8 * 4 + k % 8 / 2].a[row / 8 + 2 * (k / 8)];
        const uint32_t right = lanes[column * 4 + k % 8 / 2].b[k / 8];
        sum += static_cast<double>(half_of<dtype>(left, k % 2)) * half_of<dtype>(right, k % 2);
      }
      acc[i] = static_cast<float>(sum);
    }
    return 0;
  });
}

inline void mma_m16n8k16_float16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0,
                                 uint32_t b1) {
  mma_m16n8k16<Dtype::float16>(acc, a, b0, b1);
}

// acc (16x8) += a (16x8) . b (8x8): lane t has rows t/4 and t/4 + 8 and columns t%4 and t%4 + 4 of
// a, the same rows and column t/4 of b.
inline void mma_m16n8k8_tf32(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Operands {
    uint32_t a[4], b[2];
  };
  const auto value = [](uint32_t bits) {
    return static_cast<double>(std::bit_cast<float>(bits & 0xffffe000));
  };
  const Operands own{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  host::gather(own, [&](const auto& lanes) {
    const int lane = host::current % 32;
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
      double sum = acc[i];
      for (int k = 0; k < 8; ++k) {
        sum += value(lanes[row % 8 * 4 + k % 4].a[row / 8 + 2 * (k / 4)]) *
               value(lanes[column * 4 + k % 4].b[k / 4]);
      }
      acc[i] = static_cast<float>(sum);
    }
    return 0;
  });
}
// Of sm_90, where the host is an sm_80.
void mma_m16n8k16_float64(double (&acc)[4], const double (&a)[8], const double* b);
// acc (8x8) += a (8x4) . b (4x8).
inline void mma_m8n8k4_float64(double& acc0, double& acc1, double a, double b) {
  struct Operands {
    double a, b;
  };
  host::gather(Operands{a, b}, [&](const auto& lanes) {
    const int lane = host::current % 32;
    for (int k = 0; k < 4; ++k) {
      acc0 += lanes[lane / 4 * 4 + k].a * lanes[lane % 4 * 8 + k].b;
      acc1 += lanes[lane / 4 * 4 + k].a * lanes[lane % 4 * 8 + 4 + k].b;
    }
    return 0;
  });
}

template <typename Value>
inline Value load_shared(uint32_t smem) {
  Value x;
  std::memcpy(&x, smem_bytes + smem, sizeof x);
  return x;
}
inline void load_shared(double& first, double& second, uint32_t smem) {
  first = load_shared<double>(smem);
  second = load_shared<double>(smem + 8);
}

// No tensor map is used here: who asks for a box hears of it.
struct TensorMap {
  alignas(64) unsigned char bytes[128];
};
inline std::function<void(uint32_t, int, int, const int (&)[3])> on_load;
inline void tma_load(uint32_t smem, const TensorMap&, uint32_t, int column, int row,
                     const int (&batch)[3]) {
  on_load(smem, column, row, batch);
}

}  // namespace cuflash::ptx
