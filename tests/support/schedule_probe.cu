// Calls schedule/scheduler.cuh for all tiles of a grid, and for all ranks of packed sequences, on
// the host.
#include "schedule/scheduler.cuh"

extern "C" void probe(const cuflash::Grid* grid, int* block, int* owner) {
  for (int index = 0; index < grid->num_blocks * grid->num_owners; ++index) {
    const cuflash::Tile tile = cuflash::tile_of(*grid, index);
    block[index] = tile.block;
    owner[index] = tile.owner;
  }
}

extern "C" void places(const void* ends, int num_sequences, int total, int num_ranks, int* sequence,
                       int* block) {
  const cuflash::Packing packing{ends, num_sequences, total};
  for (int rank = 0; rank < num_ranks; ++rank) {
    const cuflash::Place place = cuflash::place_of<cuflash::Config::block_m>(packing, rank);
    sequence[rank] = place.sequence;
    block[rank] = place.block;
  }
}

// The first rank of each sequence. Returns whether ends decrease, as `step` threads find together.
extern "C" bool first_ranks(const void* ends, int num_sequences, int total, int step, int* ranks) {
  const cuflash::Packing packing{ends, num_sequences, total};
  for (int i = 0; i < num_sequences; ++i) {
    ranks[i] = packing.first_rank<cuflash::Config::block_m>(i);
  }
  bool found = false;
  for (int thread = 0; thread < step; ++thread) found |= packing.any_decreases(thread, step);
  return found;
}
