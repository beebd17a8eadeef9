// Which rows, or keys, and which batch entries a thread block computes. A tile is computed again at
// each call, so that it occupies no registers in between.
#pragma once

#include "ptx/dependents.cuh"
#include "schedule/scheduler.cuh"
#include "score/ranges.cuh"
#include "score/traits.cuh"

namespace cuflash {

struct OwnedTile {
  int owner;
  int sequence;

  // The `index`-th batch entry of the owner.
  CUFLASH_DEVICE BatchIndex entry(const BackwardParams& params, int index) const {
    return {params.batch, owner * params.grid.entries_per_owner + index, sequence};
  }
};

// The numbers that blocks of queries have among all blocks of a batch entry.
struct QueryBlocks {
  int first;  // number of the sequence's first block
  int count;  // blocks of all sequences together, at most

  CUFLASH_DEVICE QueryBlocks(const ScoreParams& params, int sequence) {
    if constexpr (Config::cu_seqlens == Dtype::none) {
      first = 0;
      count = (params.seqlen_q + Config::block_m - 1) / Config::block_m;
    } else {
      first = Packing::of_queries(params).first_rank<Config::block_m>(sequence);
      count = params.seqlen_q / Config::block_m + params.num_sequences;
    }
  }
};

struct RowTile : OwnedTile {
  int first_row;

  template <typename Params>
  CUFLASH_DEVICE static RowTile of_thread_block(const Params& params) {
    const Tile tile = tile_of(params.grid, tile_index());
    const int rank =
        ScoreTraits::last_rows_see_most ? params.grid.num_blocks - 1 - tile.block : tile.block;
    const Place place = place_of<Config::block_m>(Packing::of_queries(params.score), rank);
    return {{tile.owner, place.sequence}, place.block * Config::block_m};
  }
};

// The keys of a thread block: all keys, or one part of them where the keys of a tile are split
// among several thread blocks, in a cluster or not. A part has part_keys keys, in whole blocks.
// Packed sequences differ in length: their parts are doubled until num_splits parts hold the
// sequence. Where a part begins depends only on the extents of arrays and of packed sequences.
template <bool split>
struct PartOfTile {
  static constexpr int index = 0;
  static constexpr Range keys{0, 1 << 30};

  CUFLASH_DEVICE static PartOfTile of_thread_block(const ForwardParams&) { return {}; }
  CUFLASH_DEVICE static int owner(const ForwardParams&, int owner) { return owner; }
  CUFLASH_DEVICE static void* out(const ForwardParams& params) { return params.out; }
};
template <>
struct PartOfTile<true> {
  int index;
  Range keys;

  CUFLASH_DEVICE static PartOfTile of_thread_block(const ForwardParams& params) {
    const int index = part_index(params);
    int keys = params.part_keys;
    if constexpr (Config::cu_seqlens != Dtype::none) {
      const int sequence = RowTile::of_thread_block(params).sequence;
      const int length = Packing::of_keys(params.score).rows(sequence);
#pragma unroll 1
      while (static_cast<int64_t>(keys) * params.num_splits < length) keys *= 2;
    }
    return {index, {index * keys, (index + 1) * keys}};
  }
  CUFLASH_DEVICE static int owner(const ForwardParams& params, int owner) {
    return Config::clusters ? owner : owner / params.num_splits;
  }
  // The results of all parts of a row are stored one after the other.
  CUFLASH_DEVICE void* out(const ForwardParams& params) const {
    return static_cast<Real*>(params.out) + index * params.head_dim_v;
  }

 private:
  CUFLASH_DEVICE static int part_index(const ForwardParams& params) {
    if constexpr (Config::clusters) return ptx::cluster_rank();
    return tile_of(params.grid, tile_index()).owner % params.num_splits;
  }
};
using KeyPart = PartOfTile<Config::split_keys>;

// Called by a kernel whose parts forward_combine.cu combines. The combining kernel may then start,
// find its row and wait.
CUFLASH_DEVICE void let_combine_start() {
  if constexpr (Config::overlaps) ptx::launch_dependents();
}

struct KeyTile : OwnedTile {
  int first_key;
  int part;  // which part of an entry's blocks of queries, where they are split

  CUFLASH_DEVICE static KeyTile of_thread_block(const BackwardParams& params) {
    return at(params, tile_index());
  }
  CUFLASH_DEVICE static KeyTile at(const BackwardParams& params, int index) {
    const Tile tile = tile_of(params.grid, index);
    // Under a causal bound the first keys are seen by the most queries: ranks are in order.
    const Place place = place_of<Config::block_n>(Packing::of_keys(params.score), tile.block);
    return of(params, tile.owner, place.sequence, place.block * Config::block_n);
  }
  CUFLASH_DEVICE static KeyTile of(const BackwardParams& params, int owner, int sequence,
                                   int first_key) {
    const int parts = Config::split_rows ? params.row_parts : 1;
    return {{owner / parts, sequence}, first_key, owner % parts};
  }

  // The number of batch entries that this tile sums over: one if it has a part of one entry's
  // queries.
  CUFLASH_DEVICE static int entries(const BackwardParams& params) {
    return Config::split_rows ? 1 : params.grid.entries_per_owner;
  }

  CUFLASH_DEVICE int first_block(const BackwardParams& params) const {
    return part * params.part_blocks;
  }

  // Restricts the blocks of queries to this thread block's part, where they are split. The part
  // depends only on the extents of arrays.
  CUFLASH_DEVICE BlockRanges own_blocks(BlockRanges blocks, const BackwardParams& params) const {
    if constexpr (Config::split_rows) {
      blocks.begin = max(blocks.begin, first_block(params));
      blocks.end = min(blocks.end, first_block(params) + params.part_blocks);
    }
    return blocks;
  }
};

}  // namespace cuflash
