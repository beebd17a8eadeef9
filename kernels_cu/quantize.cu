// Elements as 8-bit floats, in two passes over an array with rows of head_dim elements:
//
//   largest = max |x R|  of each block of rows        Config::writes is false
//   out = round(x R / scale(largest)),  scale         Config::writes is true
//
// The scale is the smallest power of two with which the largest magnitude fits. R is the identity.
// If the kernel rotates, R is random signs times a Hadamard matrix over sqrt(head_dim), in
// log2(head_dim) steps of sums and differences: the first three steps within a lane, the others
// between lanes.
//
// A lane holds 8 neighbouring elements of a row. A thread block holds up to Config::block_m rows of
// one block of rows (the rows that share a scale).
#include "params.cuh"
#include "ptx/special.cuh"
#include "tile/fragment.cuh"

namespace cuflash {

constexpr int row_lanes = Config::head_dim / 8;
constexpr int rows_at_once = Config::num_threads / row_lanes;
constexpr int rows_of_part = Config::block_m;
constexpr int steps = rows_of_part / rows_at_once;
constexpr bool to_e4m3 = Config::out_dtype == Dtype::float8_e4m3fn;
constexpr float min_normal = 0x1p-126f, most = to_e4m3 ? 448.0f : 57344.0f;
static_assert(row_lanes <= 32 && rows_of_part % rows_at_once == 0, "a warp holds whole rows");

struct SharedMemory {
  float largest[Config::num_warps];
};

struct Part {
  float x[8];
};

CUFLASH_DEVICE Part load(const void* array, int64_t index) {
  Part part;
  if constexpr (sizeof(Element) == 4) {
    const float4* at = reinterpret_cast<const float4*>(static_cast<const float*>(array) + index);
    const float4 low = at[0], high = at[1];
    const float own[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) part.x[i] = own[i];
  } else {
    const uint4 words =
        *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(array) + index);
    const uint32_t own[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      part.x[i] =
          to_real<Config::dtype>(static_cast<Storage<Config::dtype>>(own[i / 2] >> 16 * (i % 2)));
    }
  }
  return part;
}

// The Hadamard transform: for every bit of the column index, sums and differences of the elements
// whose columns differ in that bit only.
CUFLASH_DEVICE void rotate(Part& part, const uint32_t (&signs)[8]) {
  const int lane = lane_index() % row_lanes;
  const uint32_t own = signs[lane / 4] >> 8 * (lane % 4);
#pragma unroll
  for (int i = 0; i < 8; ++i) part.x[i] = own >> i & 1 ? -part.x[i] : part.x[i];
#pragma unroll
  for (int bit = 1; bit < 8; bit *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i & bit) continue;
      const float sum = part.x[i] + part.x[i | bit], difference = part.x[i] - part.x[i | bit];
      part.x[i] = sum;
      part.x[i | bit] = difference;
    }
  }
#pragma unroll
  for (int bit = 1; bit < row_lanes; bit *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float other = __shfl_xor_sync(0xffffffff, part.x[i], bit);
      part.x[i] = lane & bit ? other - part.x[i] : part.x[i] + other;
    }
  }
  const float factor = sqrtf(1.0f / Config::head_dim);
#pragma unroll
  for (int i = 0; i < 8; ++i) part.x[i] *= factor;
}

// The smallest power of two with which the largest magnitude fits. It is 1 for zeros and
// subnormals.
CUFLASH_DEVICE float scale_of(float largest) {
  const uint32_t bits = __float_as_uint(__fdiv_rn(largest, most));
  const int exponent = static_cast<int>(bits >> 23) - 127 + ((bits & 0x7fffff) != 0);
  return largest < min_normal ? 1.0f : __uint_as_float((max(exponent, -100) + 127) << 23);
}

CUFLASH_DEVICE bool is_finite(float x) { return fabsf(x) <= largest_float; }

CUFLASH_DEVICE uint2 rounded(const Part& part, float factor) {
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    y[i] = is_finite(part.x[i]) ? part.x[i] * factor : __uint_as_float(0x7fffffff);
  }
  if constexpr (to_e4m3) {
    return make_uint2(ptx::pack_e4m3(y[0], y[1], y[2], y[3]),
                      ptx::pack_e4m3(y[4], y[5], y[6], y[7]));
  } else {
    return make_uint2(ptx::pack_e5m2(y[0], y[1], y[2], y[3]),
                      ptx::pack_e5m2(y[4], y[5], y[6], y[7]));
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads)
    cuflash_quantize(const __grid_constant__ cuflash::QuantizeParams params) {
  using namespace cuflash;
  const int parts = (params.rows_of_block + rows_of_part - 1) / rows_of_part;
  const int block = blockIdx.x / parts, part = blockIdx.x % parts;
  const int matrix = block / params.blocks, of_matrix = block % params.blocks;
  const int first = of_matrix * params.rows_of_block + part * rows_of_part;
  const int end =
      min(min(first + rows_of_part, (of_matrix + 1) * params.rows_of_block), params.rows);
  const int thread_row = first + threadIdx.x / row_lanes;
  const cuflash::int64_t start =
      (static_cast<long long>(matrix) * params.rows + thread_row) * Config::head_dim +
      threadIdx.x % row_lanes * 8;
  Part own[steps];
#pragma unroll
  for (int i = 0; i < steps; ++i) {
    own[i] = Part{};
    if (thread_row + i * rows_at_once < end) {
      own[i] = load(params.x, start + i * rows_at_once * Config::head_dim);
    }
  }
  if constexpr (Config::rotates) {
#pragma unroll
    for (int i = 0; i < steps; ++i) rotate(own[i], params.signs);
  }
  if constexpr (Config::writes) {
    const float scale = scale_of(__uint_as_float(params.largest[block]));
    if (part == 0 && threadIdx.x == 0) params.scale[block] = scale;
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      if (thread_row + i * rows_at_once < end) {
        *reinterpret_cast<uint2*>(params.out + start + i * rows_at_once * Config::head_dim) =
            rounded(own[i], 1.0f / scale);
      }
    }
  } else {
    float largest = 0.0f;
    unrolled<steps, 8>([&](int i, int j) {
      const float x = own[i].x[j];
      largest = fmaxf(largest, is_finite(x) ? fabsf(x) : 0.0f);
    });
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, distance));
    }
    SharedMemory& smem = shared_memory<SharedMemory>();
    if (lane_index() == 0) smem.largest[warp_index()] = largest;
    __syncthreads();  // every warp has written its largest magnitude
    if (threadIdx.x == 0) {
#pragma unroll
      for (int warp = 1; warp < Config::num_warps; ++warp) {
        largest = fmaxf(largest, smem.largest[warp]);
      }
      // The bits of floats >= 0 are ordered like the floats.
      atomicMax(params.largest + block, __float_as_uint(largest));
    }
  }
}
