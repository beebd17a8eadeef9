// Which tile of which batch entry a thread block computes, and where that entry's arrays start.
#pragma once

#include "params.cuh"
#include "ptx/special.cuh"

namespace cuflash {

struct BatchIndex {
  int axis[max_batch_axes];

  BatchIndex() = default;
  CUFLASH_DEVICE BatchIndex(const BatchAxes& axes, int flat, int sequence = 0) {
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
    if constexpr (Config::cu_seqlens != Dtype::none) axis[max_batch_axes - 1] = sequence;
  }

  CUFLASH_DEVICE int sequence() const { return axis[max_batch_axes - 1]; }

  // The offset in an array of this entry's matrix, in elements.
  CUFLASH_DEVICE int64_t operator*(const BatchStrides& strides) const {
    int64_t offset = 0;
#pragma unroll
    for (int i = 0; i < max_batch_axes; ++i) offset += axis[i] * strides.axis[i];
    return offset;
  }
};

// The index of this thread block's tile. split_columns thread blocks share a tile, and `partners`
// warps of a block share its rows. Each has its own columns of the result, and the columns of
// partners follow each other.
CUFLASH_DEVICE int tile_index() {
  if constexpr (Config::clusters) return ptx::cluster_index();
  return ptx::block_index() / Config::split_columns;
}

constexpr int own_parts = Config::split_columns * Config::partners;

CUFLASH_DEVICE int partner_index() {
  if constexpr (Config::partners == 1) return 0;
  return ptx::thread_index() / (Config::num_threads / Config::partners);
}

CUFLASH_DEVICE int first_own_column(int width) {
  if constexpr (own_parts == 1) return 0;
  const int part = ptx::block_index() % Config::split_columns * Config::partners + partner_index();
  return part * (width / own_parts);
}

struct Tile {
  int block;  // rank of the tile within its owner, heaviest first
  int owner;  // number of the owner: batch entries that share one result
};

template <Dtype dtype>
CUFLASH_DEVICE int64_t read_integer(const void* array, int64_t index) {
  return static_cast<const Storage<dtype>*>(array)[index];
}

CUFLASH_DEVICE int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : (x > high ? high : x);
}

// Where packed sequences of queries or of keys begin and end. Whatever the array holds, rows are
// clamped to `total`.
struct Packing {
  const void* ends;
  int num_sequences;
  int total;

  CUFLASH_DEVICE static Packing of_queries(const ScoreParams& params) {
    return {params.cu_seqlens_q, params.num_sequences, params.seqlen_q};
  }
  CUFLASH_DEVICE static Packing of_keys(const ScoreParams& params) {
    return {params.cu_seqlens_k, params.num_sequences, params.seqlen_k};
  }

  // The first row of a sequence, which is the end of the sequence before.
  CUFLASH_DEVICE int begin(int sequence) const {
    return static_cast<int>(clamp(read_integer<Config::cu_seqlens>(ends, sequence), 0, total));
  }

  CUFLASH_DEVICE int rows(int sequence) const {
    return max(begin(sequence + 1) - begin(sequence), 0);
  }

  // Tiles of packed sequences have ranks, numbered so that the host need not know where sequences
  // end. The ranks of sequence i begin at (rows before it) / block + i and end where those of the
  // next sequence begin. They are as many as the sequence has tiles, or one more. Whatever the
  // array holds, all tiles of a sequence have ranks from 0 up to total / block + num_sequences.
  template <int block>
  CUFLASH_DEVICE int first_rank(int sequence) const {
    return max(begin(sequence) - begin(0), 0) / block + sequence;
  }

  // Does one of the sequences first, first + step, ... end before it begins?
  CUFLASH_DEVICE bool any_decreases(int first, int step) const {
    bool found = false;
#pragma unroll 1
    for (int i = first; i < num_sequences; i += step) found |= begin(i + 1) < begin(i);
    return found;
  }
};

// The sequence of a tile, and the number of the tile's block of rows in it. Without packing the
// whole array is sequence 0.
struct Place {
  int sequence;
  int block;
};

// The place of a rank. All rows of the last rank of a sequence may lie past the sequence's end.
template <int block>
CUFLASH_DEVICE Place place_of(const Packing& packing, int rank) {
  if constexpr (Config::cu_seqlens == Dtype::none) {
    return {0, rank};
  } else {
    int low = 0, high = packing.num_sequences - 1;
#pragma unroll 1
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (packing.first_rank<block>(middle) <= rank) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return {low, max(rank - packing.first_rank<block>(low), 0)};
  }
}

// The tile of an index. Owners are grouped in sections whose streamed operands fit in the L2 cache
// together. Within a section the rank of the tile changes slowest, so that the heaviest tiles of
// all its owners start first. A section of one owner keeps the tiles that stream the same operands
// next to each other. The last section also takes the owners that are left over, since a small
// section would end in a tail.
CUFLASH_DEVICE Tile tile_of(const Grid& grid, int index) {
  // In some calls of few queries a division takes longer than the work of an SM.
  if (Config::clusters && grid.num_blocks == 1) return {0, index};
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
