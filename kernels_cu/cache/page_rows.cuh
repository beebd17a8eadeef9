// Rows of the pages of a cache. New elements become 8-bit floats there if the pages have them.
#pragma once

#include "cache/rotate.cuh"

namespace cuflash {

constexpr bool rounds_to_8_bits = Config::pages_dtype != Dtype::none;
constexpr Dtype pages_dtype = rounds_to_8_bits ? Config::pages_dtype : Config::dtype;
using PageElement = Storage<pages_dtype>;

// Rounds to nearest even and saturates. Infinities and NaN become NaN.
CUFLASH_DEVICE uint8_t to_8_bits(float x) {
  constexpr bool is_e4m3 = pages_dtype == Dtype::float8_e4m3fn;
  constexpr int mantissa = is_e4m3 ? 3 : 2, bias = is_e4m3 ? 7 : 15, dropped = 23 - mantissa;
  constexpr float least = is_e4m3 ? 0x1p-6f : 0x1p-14f, most = is_e4m3 ? 448.0f : 57344.0f;
  const float size = fminf(fabsf(x), most);
  const uint32_t bits = __float_as_uint(size);
  const uint32_t rounded = bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1);
  const uint32_t normal = (rounded >> dropped) - ((127 - bias) << mantissa);
  const uint32_t subnormal = static_cast<uint32_t>(rintf(size / least * (1 << mantissa)));
  const uint32_t code = size < least ? subnormal : normal;
  const uint32_t sign = __float_as_uint(x) >> 24 & 0x80;
  return static_cast<uint8_t>(sign | (fabsf(x) <= largest_float ? code : 0x7f));
}

// A row of a page. Elements are divided by `scale` before they become 8-bit floats.
struct PageRow {
  PageElement* data;
  Real scale;

  CUFLASH_DEVICE void store(int column, Element x) const {
    if constexpr (rounds_to_8_bits) {
      data[column] = to_8_bits(__fdiv_rn(to_real<Config::dtype>(x), scale));
    } else {
      data[column] = x;
    }
  }
};

// The rows of one array of pages.
struct PageRows {
  PageElement* data;
  int num_heads, page_size, width;

  CUFLASH_DEVICE PageElement* row(int page, int head, int slot) const {
    return data + ((static_cast<int64_t>(page) * num_heads + head) * page_size + slot) * width;
  }

  // Copies a row from page to page, by one warp.
  CUFLASH_DEVICE void copy(int to, int from, int head, int slot) const {
    for (int i = ptx::thread_index() % 32; i < width; i += 32) {
      row(to, head, slot)[i] = row(from, head, slot)[i];
    }
  }
};

}  // namespace cuflash
