// Slopes of a full block on one side of the diagonal: what they add from key to key is one more
// step of q k^T. The columns of a q hold the slope, over the scale, and those of a k its number.
//
//   q k^T + [high middle low] [n n n]^T       high + middle + low = slope / scale, 16 bits each
//
// What is left of |q + offset - k| is the same for all keys of a row: RowExponents::shift.
#pragma once

#include "score/score.cuh"
#include "sm90/matmul.cuh"

namespace cuflash {

// Even where other options leave no registers for their use.
constexpr bool numbers_keys = Score::has_slopes && Config::head_dim <= 128;

// Numbers of a block's keys in rows that are summed, 0 in all but three; and of each warpgroup the
// columns of q, alike in all of its rows: eight serve for 64.
template <bool are_there>
struct SlopeTiles {
  using Numbers = PanelTile<16, Config::block_n>;
  using Columns = PanelTile<8, 64>;
  static_assert(Config::block_n <= 256, "numbers that bfloat16 has");

  Numbers numbers;
  Columns columns[Config::block_m / 64];

  // By a warp, before wgmma reads them.
  CUFLASH_DEVICE void write_numbers() {
    constexpr int pairs = Numbers::num_panels * 32;  // of a row
    for (int i = lane_index(); i < 16 * pairs; i += 32) {
      const int row = i / pairs, n = i % pairs * 2, column = n % 64;
      auto* const panel = reinterpret_cast<unsigned char*>(numbers.data[n / 64]);
      auto* const to = panel + Numbers::chunk_offset(row, column / 8) + column % 8 * 2;
      *reinterpret_cast<uint32_t*>(to) = row < 3 ? pack<Config::dtype>(n, n + 1) : 0;
    }
    ptx::fence_async_proxy();
  }

  // By eight lanes: 16 columns for keys before what slopes count from, and 16 for keys behind it.
  CUFLASH_DEVICE void write_columns(int warpgroup, int row, const Score& score) {
    const auto rounded = [](float x) { return to_real<Config::dtype>(pack<Config::dtype>(x, 0)); };
    const float step = score.slope / score.scale();
    const float high = rounded(step), middle = rounded(step - high), low = step - high - middle;
    auto* const panel = reinterpret_cast<unsigned char*>(columns[warpgroup].data);
    const auto put = [&](int chunk, uint32_t first, uint32_t second) {
      *reinterpret_cast<uint4*>(panel + Columns::chunk_offset(row, chunk)) = {first, second, 0, 0};
    };
    put(0, pack<Config::dtype>(high, middle), pack<Config::dtype>(low, 0));
    put(1, 0, 0);
    put(2, pack<Config::dtype>(-high, -middle), pack<Config::dtype>(-low, 0));
    put(3, 0, 0);
    ptx::fence_async_proxy();
  }

  // Starts acc += slopes.
  template <int tiles>
  CUFLASH_DEVICE void start_product(float (&acc)[1][tiles][4], int warpgroup,
                                    bool are_before) const {
    constexpr uint64_t row_groups = 0x3fffull << 32;  // their distance: 0, all are one
    const uint64_t a = (columns[warpgroup].k_major() & ~row_groups) + (are_before ? 0 : 2);
    ptx::wgmma_group(flat(acc), [&] {
      ptx::wgmma_ss<Major::k, Major::mn>(flat(acc), a, numbers.mn_major(), 1);
    });
  }
};
template <>
struct SlopeTiles<false> {
  CUFLASH_DEVICE void write_numbers() {}
  CUFLASH_DEVICE void write_columns(int, int, const Score&) {}
  template <int tiles>
  CUFLASH_DEVICE void start_product(float (&)[1][tiles][4], int, bool) const {}
};

}  // namespace cuflash
