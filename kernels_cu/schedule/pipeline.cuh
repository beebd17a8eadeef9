// Which buffer of a ring is next, and which phase of its barriers.
#pragma once

#include "config.cuh"

namespace cuflash {

// Producer and consumer each count their uses of `stages` buffers, over all tiles. A buffer has two
// barriers: `full` ends a phase with every filling, `empty` with every release.
template <int stages>
struct Ring {
  uint32_t uses = 0;

  CUFLASH_DEVICE int stage() const { return uses % stages; }
  CUFLASH_DEVICE uint32_t full_parity() const { return uses / stages & 1; }
  // The first use waits for a phase before the first, which counts as over.
  CUFLASH_DEVICE uint32_t empty_parity() const { return full_parity() ^ 1; }
  CUFLASH_DEVICE void advance() { ++uses; }
};

}  // namespace cuflash
