// Which blocks of keys, and which halves of a block, the 64 rows of a consumer warpgroup see; and
// whether warpgroups take turns.
#pragma once

#include "sm90/shared_memory.cuh"

namespace cuflash {

constexpr int s_tiles = Config::block_n / 8;
// Bounds that move with the rows leave 64 of them half a block at an end, every other time.
constexpr bool halves = Config::block_n == 128 && Score::is_plain;
constexpr bool halves_last = halves && Score::last_rows_see_most;
constexpr bool halves_first = halves && Score::masks_before_full;

// Full blocks are weighed against the rows' reference as it is: see Consumer::next_full_block. At
// wide heads products take so long that it gains nothing but under a softcap. (D1, D131) A softcap
// or slopes beside segments or packed sequences leave no registers for it.
constexpr bool is_light_enough =
    Config::scale_in_exponent || (!Score::has_segments && Config::cu_seqlens == Dtype::none);
constexpr bool is_worth_it = Config::head_dim <= 128 || Score::is_capped_product;
constexpr bool keeps_reference =
    looks_up || (Score::exponent_of_product && is_light_enough && !Config::dropout && is_worth_it);
static_assert(!loads_mask || Config::scale_in_exponent, "hidden is what is -inf before its scale");
constexpr bool may_bend = Score::has_slopes;
static_assert(!keeps_reference || Score::multiplies_slopes == may_bend, "exponents of products");
// The softmax of one warpgroup runs under the products of another. Where there are three, those
// of a narrow block are too short for that, and the order only delays them. Two find their order
// alone where no maximum is formed and products of a wide head take longer than a softmax.
constexpr bool finds_order = keeps_reference && Config::scale_in_exponent &&
                             Config::head_dim == 128 && (is_fp8 || !Score::masks_before_last);
constexpr bool uses_pingpong = consumers == 2 ? !finds_order : Config::block_n == 128;

// Which keys of a block are multiplied with. The others are hidden from all 64 rows.
enum class Keys { all, lower_half, upper_half };

// Tiles of 8 keys.
CUFLASH_DEVICE constexpr int first_of(Keys keys) {
  return keys == Keys::upper_half ? s_tiles / 2 : 0;
}
CUFLASH_DEVICE constexpr int count_of(Keys keys) {
  return keys == Keys::all ? s_tiles : s_tiles / 2;
}

// The key blocks of a tile, and of the rows that this warpgroup has of it.
struct ConsumerRows {
  int first_row;
  BlockRanges tile, own;       // own.end is tile.begin where these rows see nothing
  bool half_first, half_last;  // is only half of the keys seen in the first or last own block?

  CUFLASH_DEVICE ConsumerRows(const Score& score, const Work& work, int warpgroup)
      : first_row(work.first_row + 64 * warpgroup),
        tile(score.kv_blocks(work.first_row, work.first_row + Config::block_m)),
        own(score.kv_blocks(first_row, first_row + 64)) {
    if (own.begin >= own.end) own = BlockRanges{tile.begin, tile.begin, tile.begin, tile.begin};
    const Range keys = score.kv_range(first_row, first_row + 64);
    constexpr int half = Config::block_n / 2;
    half_first = halves_first && warp_agrees(keys.begin - own.begin * Config::block_n >= half);
    half_last = halves_last && warp_agrees(own.end * Config::block_n - keys.end >= half);
  }
};

}  // namespace cuflash
