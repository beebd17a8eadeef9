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

  // Offset in elements of this entry.
  CUFLASH_DEVICE int64_t operator*(const BatchStrides& strides) const {
    int64_t offset = 0;
#pragma unroll
    for (int i = 0; i < max_batch_axes; ++i) offset += axis[i] * strides.axis[i];
    return offset;
  }
};

// Index of the tile of this thread block, and which of its result's columns are its own, or its
// warp's: partners' follow each other.
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
  int owner;
};

template <Dtype dtype>
CUFLASH_DEVICE int64_t read_integer(const void* array, int64_t index) {
  return static_cast<const Storage<dtype>*>(array)[index];
}

CUFLASH_DEVICE int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : (x > high ? high : x);
}

// Where the packed sequences of queries or of keys lie: whatever the array holds, within `total`
// rows.
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

  // First row of a sequence, and the end of the one before.
  CUFLASH_DEVICE int begin(int sequence) const {
    return static_cast<int>(clamp(read_integer<Config::cu_seqlens>(ends, sequence), 0, total));
  }

  CUFLASH_DEVICE int rows(int sequence) const {
    return max(begin(sequence + 1) - begin(sequence), 0);
  }

  // Ranks are dealt out so that the host need not know where sequences end: sequence i owns those
  // from (rows before it) / block + i on, up to the next's. They are as many as it has tiles, or
  // one more.
  template <int block>
  CUFLASH_DEVICE int first_rank(int sequence) const {
    return (begin(sequence) - begin(0)) / block + sequence;
  }
};

// A tile's rows of one sequence. Without packing a whole array is sequence 0.
struct Place {
  int sequence;
  int block;
};

// A sequence's last rank may be one whose rows lie past its end.
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

// Owners are taken in sections whose streamed operands fit the L2 cache together. Within a section
// the rank of the tile changes slowest, so that the heaviest tiles of all its owners start first;
// sections of one owner keep the tiles that stream the same operands next to each other. The last
// section takes what is left, since a small one would end in a tail.
CUFLASH_DEVICE Tile tile_of(const Grid& grid, int index) {
  // A division takes longer than a multiprocessor's share of some calls of few queries.
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
