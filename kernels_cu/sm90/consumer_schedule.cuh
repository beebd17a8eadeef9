// Which blocks of keys, and which halves of a block, the 64 rows of a consumer warpgroup see, and
// whether warpgroups use ping-pong.
#pragma once

#include "sm90/shared_memory.cuh"

namespace cuflash {

constexpr int s_tiles = Config::block_n / 8;
// If bounds move with the rows, every second group of 64 rows sees only half of an end block.
constexpr bool halves = Config::block_n == 128 && Score::is_plain;
constexpr bool halves_last = halves && Score::last_rows_see_most;
constexpr bool halves_first = halves && Score::masks_before_full;

// Full blocks keep the current reference of their rows: see OutWarpgroup::attend_full_block. For
// wide heads products take so long that this gains nothing, except under a softcap. (D1, D131) A
// softcap or slopes together with segments or packed sequences leave no registers for it.
constexpr bool has_registers_for_reference =
    Config::scale_in_exponent || (!Score::has_segments && Config::cu_seqlens == Dtype::none);
constexpr bool keeping_saves_time = Config::head_dim <= 128 || Score::is_capped_product;
constexpr bool keeps_reference =
    looks_up || (Score::exponent_of_product && has_registers_for_reference && !Config::dropout &&
                 keeping_saves_time);
static_assert(!loads_mask || Config::scale_in_exponent,
              "the mask sets raw products to -inf, before the scale");
constexpr bool may_cross_diagonal = Score::has_slopes;
static_assert(!keeps_reference || Score::multiplies_slopes == may_cross_diagonal,
              "exponents come from products, slopes included");
// Ping-pong: the softmax of one warpgroup runs under the products of another. With three warpgroups
// the products of a narrow block are too short for that, and ping-pong only delays them. Two
// warpgroups find this order by themselves if no maximum is formed and the products of a wide head
// take longer than a softmax.
constexpr bool alternates_without_barriers = keeps_reference && Config::scale_in_exponent &&
                                             Config::head_dim == 128 &&
                                             (is_fp8 || !Score::masks_before_last);
constexpr bool uses_pingpong =
    consumers == 2 ? !alternates_without_barriers : Config::block_n == 128;

// The keys of a block that are multiplied. The other keys are hidden from all 64 rows.
enum class Keys { all, lower_half, upper_half };

// The first of these tiles of 8 keys, and their number.
CUFLASH_DEVICE constexpr int first_tile_of(Keys keys) {
  return keys == Keys::upper_half ? s_tiles / 2 : 0;
}
CUFLASH_DEVICE constexpr int num_tiles_of(Keys keys) {
  return keys == Keys::all ? s_tiles : s_tiles / 2;
}

// The blocks of keys that a tile sees, and those that the 64 rows of this warpgroup see.
struct ConsumerRows {
  int first_row;
  BlockRanges tile, own;       // own.end is tile.begin if these rows see nothing
  bool half_first, half_last;  // is only half of the keys seen in the first or last own block?

  CUFLASH_DEVICE ConsumerRows(const Score& score, const Work& work, int warpgroup)
      : first_row(work.first_row + 64 * warpgroup),
        tile(score.kv_blocks(work.first_row, work.first_row + Config::block_m)),
        own(score.kv_blocks(first_row, first_row + 64)) {
    if (own.begin >= own.end) own = BlockRanges{tile.begin, tile.begin, tile.begin, tile.begin};
    const Range keys = score.kv_range(first_row, first_row + 64);
    constexpr int half = Config::block_n / 2;
    half_first = halves_first && warp_any(keys.begin - own.begin * Config::block_n >= half);
    half_last = halves_last && warp_any(own.end * Config::block_n - keys.end >= half);
  }
};

}  // namespace cuflash
