// A ring of buffers: which buffer is next, and in which phase its barriers are.
#pragma once

#include "config.cuh"

namespace cuflash {

// Producer and consumer each have a Ring and count their uses of the `stages` buffers, over all
// tiles. A buffer has two mbarriers: a phase of `full` ends whenever the buffer has been filled, a
// phase of `empty` whenever it has been released.
template <int stages>
struct Ring {
  uint32_t uses = 0;

  CUFLASH_DEVICE int stage() const { return uses % stages; }
  CUFLASH_DEVICE uint32_t full_parity() const { return uses / stages & 1; }
  // The first use waits for the phase before the first one, which counts as ended.
  CUFLASH_DEVICE uint32_t empty_parity() const { return full_parity() ^ 1; }
  CUFLASH_DEVICE void advance() { ++uses; }
};

}  // namespace cuflash
