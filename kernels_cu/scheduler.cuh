// Which tile of which batch entry a block of threads computes, and where that entry's arrays start.
#pragma once

#include "params.cuh"

namespace cuflash {

struct BatchIndex {
  int axis[max_batch_axes];

  __device__ __forceinline__ BatchIndex(const BatchAxes& axes, int flat) {
#pragma unroll
    for (int i = max_batch_axes - 1; i > 0; --i) {
      axis[i] = 0;
      if (i < axes.num_axes) {
        const int rest = flat / axes.extent[i];
        axis[i] = flat - rest * axes.extent[i];
        flat = rest;
      }
    }
    axis[0] = flat;
  }

  // Offset in elements of this entry.
  __device__ __forceinline__ int64_t operator*(const BatchStrides& strides) const {
    int64_t offset = 0;
#pragma unroll
    for (int i = 0; i < max_batch_axes; ++i) offset += axis[i] * strides.axis[i];
    return offset;
  }
};

struct Tile {
  int block;  // rank of the tile within its owner, heaviest first
  int owner;
};

// Owners are taken in sections whose streamed operands fit the L2 cache together. Within a section
// the rank of the tile changes slowest, so that the heaviest tiles of all its owners start first;
// sections of one owner keep the tiles that stream the same operands next to each other. The last
// section takes what is left, since a small one would end in a tail.
__device__ __forceinline__ Tile tile_of(const Grid& grid, int index) {
  const int section_tiles = grid.owners_per_section * grid.num_blocks;
  const int last_section = grid.num_owners / grid.owners_per_section - 1;
  const int section = min(index / section_tiles, last_section);
  const int first_owner = section * grid.owners_per_section;
  const int owners =
      section == last_section ? grid.num_owners - first_owner : grid.owners_per_section;
  index -= section * section_tiles;
  const int block = index / owners;
  return {block, first_owner + index - block * owners};
}

}  // namespace cuflash
