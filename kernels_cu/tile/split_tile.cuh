// A tile of float32 that is split into TF32 parts once, for all warps of a block.
#pragma once

#include "tile/matmul_sm80.cuh"

namespace cuflash {

// After the split, high parts are where the elements were, and low parts are at the same places of
// a second tile behind it.
template <int rows, int columns>
struct Tf32PairTile : SmemTile<rows, columns> {
  SmemTile<rows, columns> low;

  CUFLASH_DEVICE void clear_row(int row, int lane) {
    SmemTile<rows, columns>::clear_row(row, lane);
    low.clear_row(row, lane);
  }
};

template <int rows, int columns>
constexpr int low_distance<Tf32PairTile<rows, columns>> = sizeof(SmemTile<rows, columns>);

// Does nothing: the operand is not split, or every warp splits what it reads.
template <typename Tile>
CUFLASH_DEVICE void split(Tile&) {}

// Called by all threads. Each thread splits the elements that it copied itself (load_tile), once
// its own copies are complete. Other threads see the parts after a barrier. (D36)
template <int rows, int columns>
CUFLASH_DEVICE void split(Tf32PairTile<rows, columns>& tile) {
  using Tile = Tf32PairTile<rows, columns>;
  constexpr int row_step = Config::num_threads / Tile::row_chunks;
  constexpr int steps = (rows + row_step - 1) / row_step;
  const int chunk = ptx::thread_index() % Tile::row_chunks;
  const int thread_row = ptx::thread_index() / Tile::row_chunks;
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    const int row = thread_row + step * row_step;
    if (rows % row_step != 0 && row >= rows) break;
    auto* const at = reinterpret_cast<unsigned char*>(tile.data) + Tile::chunk_offset(row, chunk);
    float4 x[Tile::num_panels];
    unrolled<Tile::num_panels>([&](int panel) {
      x[panel] = *reinterpret_cast<const float4*>(at + panel * Tile::panel_bytes);
    });
    unrolled<Tile::num_panels>([&](int panel) {
      const float elements[4] = {x[panel].x, x[panel].y, x[panel].z, x[panel].w};
      const Tf32Pair<4> parts(elements);
      unsigned char* const to = at + panel * Tile::panel_bytes;
      *reinterpret_cast<uint4*>(to) =
          make_uint4(parts.high[0], parts.high[1], parts.high[2], parts.high[3]);
      *reinterpret_cast<uint4*>(to + low_distance<Tile>) =
          make_uint4(parts.low[0], parts.low[1], parts.low[2], parts.low[3]);
    });
  }
}

}  // namespace cuflash
