// How long the sequences of one batch entry are, and which diagonal is its causal one.
#pragma once

#include "numeric.cuh"
#include "scheduler.cuh"

namespace cuflash {

template <Dtype dtype>
__device__ __forceinline__ int64_t read_integer(const void* array, int64_t index) {
  return static_cast<const typename Storage<dtype>::type*>(array)[index];
}

__device__ __forceinline__ int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : (x > high ? high : x);
}

// Lengths are clamped to the arrays, so that no value an array may hold can cause a fault.
struct Seqlen {
  int q;           // rows [0, q) exist
  int k;           // keys [0, k) exist
  int64_t offset;  // key n lies on the causal diagonal of row n - offset

  __device__ __forceinline__ Seqlen(const ScoreParams& params, const BatchIndex& entry)
      : q(params.q_length), k(params.kv_length) {
    if constexpr (Config::q_lengths != Dtype::none) {
      const int64_t index = entry * params.q_lengths_strides;
      q = static_cast<int>(
          clamp(read_integer<Config::q_lengths>(params.q_lengths, index), 0, params.seqlen_q));
    }
    if constexpr (Config::kv_lengths != Dtype::none) {
      const int64_t index = entry * params.kv_lengths_strides;
      k = static_cast<int>(
          clamp(read_integer<Config::kv_lengths>(params.kv_lengths, index), 0, params.seqlen_k));
    }
    if constexpr (Config::offset == Offset::value) {
      offset = params.offset_value;
    } else if constexpr (Config::offset == Offset::lengths) {
      offset = k - q;
    } else {
      constexpr Dtype dtype = Config::offset == Offset::int32 ? Dtype::int32 : Dtype::int64;
      offset = read_integer<dtype>(params.offset, entry * params.offset_strides);
    }
  }
};

}  // namespace cuflash
