// Calls scheduler.cuh for every tile of a grid, on the host.
#include "scheduler.cuh"

extern "C" void probe(const cuflash::Grid* grid, int* block, int* owner) {
  for (int index = 0; index < grid->num_blocks * grid->num_owners; ++index) {
    const cuflash::Tile tile = cuflash::tile_of(*grid, index);
    block[index] = tile.block;
    owner[index] = tile.owner;
  }
}
