// Which keys a row sees, among the columns of a block that a lane holds.
#pragma once

#include "score/score.cuh"

namespace cuflash {

// A row sees all keys of a block that is not `masked`.
template <bool masked, int tiles>
struct SeenColumns {
  const Score& score;
  const int q_idx, first_key;  // first_key: of the lane's first column
  const Range keys;            // relative to first_key: columns are compared as constants
  ColumnBits seen;

  // Called by a whole warp.
  CUFLASH_DEVICE SeenColumns(const Score& score, int q_idx, int first_key)
      : score(score),
        q_idx(q_idx),
        first_key(first_key),
        keys(score.kv_range(q_idx, q_idx + 1).relative_to(first_key)) {
    if constexpr (masked) seen = score.seen_of_row<tiles>(q_idx, first_key, keys);
  }

  CUFLASH_DEVICE bool contains(int t, int i) const {
    return !masked || (keys.contains(8 * t + i) && seen.contains(t, i) &&
                       score.formula_shows(q_idx, first_key + 8 * t + i));
  }
};

}  // namespace cuflash
