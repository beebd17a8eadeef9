// Which rows, or keys, and which batch entries are a thread block's. A tile is worked out anew as
// often as it is asked for.
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

// Blocks of queries as they are numbered among all of a batch entry.
struct QueryBlocks {
  int first;  // of a packed sequence
  int count;  // of all sequences, as many as there may be

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
  CUFLASH_DEVICE static RowTile of_this_block(const Params& params) {
    const Tile tile = tile_of(params.grid, tile_index());
    const int rank =
        ScoreTraits::last_rows_see_most ? params.grid.num_blocks - 1 - tile.block : tile.block;
    const Place place = place_of<Config::block_m>(Packing::of_queries(params.score), rank);
    return {{tile.owner, place.sequence}, place.block * Config::block_m};
  }
};

// The keys of a thread block: all, or where a tile's keys are split among several, of a cluster or
// not, a part of whole blocks, part_keys long. Of packed sequences, which differ in length, parts
// are doubled until num_splits of them hold the sequence. The extents of the arrays alone decide
// where parts lie.
template <bool split>
struct PartOfTile {
  static constexpr int index = 0;
  static constexpr Range keys{0, 1 << 30};

  CUFLASH_DEVICE static PartOfTile of_this_block(const ForwardParams&) { return {}; }
  CUFLASH_DEVICE static int owner(const ForwardParams&, int owner) { return owner; }
  CUFLASH_DEVICE static void* out(const ForwardParams& params) { return params.out; }
};
template <>
struct PartOfTile<true> {
  int index;
  Range keys;

  CUFLASH_DEVICE static PartOfTile of_this_block(const ForwardParams& params) {
    const int index = part_index(params);
    int keys = params.part_keys;
    if constexpr (Config::cu_seqlens != Dtype::none) {
      const int sequence = RowTile::of_this_block(params).sequence;
      const int length = Packing::of_keys(params.score).rows(sequence);
#pragma unroll 1
      while (static_cast<int64_t>(keys) * params.num_splits < length) keys *= 2;
    }
    return {index, {index * keys, (index + 1) * keys}};
  }
  CUFLASH_DEVICE static int owner(const ForwardParams& params, int owner) {
    return Config::clusters ? owner : owner / params.num_splits;
  }
  // Of a row there are the results of all parts, one after the other.
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

// Called by a kernel whose parts forward_combine.cu adds up, which may start and find its row now.
CUFLASH_DEVICE void let_combine_start() {
  if constexpr (Config::overlaps) ptx::launch_dependents();
}

struct KeyTile : OwnedTile {
  int first_key;
  int part;  // of an entry's blocks of queries, where they are split

  CUFLASH_DEVICE static KeyTile of_this_block(const BackwardParams& params) {
    return at(params, tile_index());
  }
  CUFLASH_DEVICE static KeyTile at(const BackwardParams& params, int index) {
    const Tile tile = tile_of(params.grid, index);
    // Under a causal bound the first keys are seen by the most queries.
    const Place place = place_of<Config::block_n>(Packing::of_keys(params.score), tile.block);
    return of(params, tile.owner, place.sequence, place.block * Config::block_n);
  }
  CUFLASH_DEVICE static KeyTile of(const BackwardParams& params, int owner, int sequence,
                                   int first_key) {
    const int parts = Config::split_rows ? params.row_parts : 1;
    return {{owner / parts, sequence}, first_key, owner % parts};
  }

  // How many entries it walks. Parts of one entry's queries are of no other.
  CUFLASH_DEVICE static int entries(const BackwardParams& params) {
    return Config::split_rows ? 1 : params.grid.entries_per_owner;
  }

  CUFLASH_DEVICE int first_block(const BackwardParams& params) const {
    return part * params.part_blocks;
  }

  // Where they are split: the blocks of queries that are this thread block's. Extents of arrays
  // alone decide which.
  CUFLASH_DEVICE BlockRanges own(BlockRanges blocks, const BackwardParams& params) const {
    if constexpr (Config::split_rows) {
      blocks.begin = max(blocks.begin, first_block(params));
      blocks.end = min(blocks.end, first_block(params) + params.part_blocks);
    }
    return blocks;
  }
};

}  // namespace cuflash
