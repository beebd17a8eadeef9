// Slopes in a full block on one side of the diagonal: the term that depends on the key is one more
// step of q k^T. The columns of q in this step hold slope / scale, and the columns of k hold the
// number n of the key in its block.
//
//   q k^T + [high middle low] [n n n]^T       high + middle + low = slope / scale, 16 bits each
//
// The rest of |q + offset - k| does not depend on the key: RowExponents::shift adds it per row.
#pragma once

#include "score/score.cuh"
#include "sm90/matmul.cuh"

namespace cuflash {

// True even if other options leave no registers to use the numbers.
constexpr bool numbers_keys = Score::has_slopes && Config::head_dim <= 128;

// The operands of this step. `numbers` holds the numbers of a block's keys in three of the 16 rows
// that are summed, and 0 in the others. `columns` holds the columns of q for each warpgroup: they
// are equal in all its 64 rows, so that eight rows are enough. `columns` comes first because
// memcheck takes wgmma to read 2 KiB from there on, although the stride between its rows is 0.
template <bool enabled>
struct SlopeTiles {
  using Numbers = PanelTile<16, Config::block_n>;
  using Columns = PanelTile<8, 64>;
  static_assert(Config::block_n <= 256, "bfloat16 represents integers up to 256");

  Columns columns[Config::block_m / 64];
  Numbers numbers;

  // Called by one warp, before wgmma reads the numbers.
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

  // Called by eight lanes, one for each row: 16 columns for keys before q + offset, then 16 columns
  // for keys behind it.
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

  // Starts acc += the term of the slopes.
  template <int tiles>
  CUFLASH_DEVICE void start_product(float (&acc)[1][tiles][4], int warpgroup,
                                    bool are_before) const {
    // The descriptor's stride between groups of eight rows becomes 0: all groups read the same
    // rows.
    constexpr uint64_t row_groups = 0x3fffull << 32;
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
