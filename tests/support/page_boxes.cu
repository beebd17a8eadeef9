// Records which boxes sm90/load_pages.cuh loads by TMA, lane by lane, on the host.
#include "sm90/load_pages.cuh"

namespace cuflash {

struct KeyBlock {
  static constexpr int rows = Config::block_n, panel_columns = 64;
  static constexpr int num_panels = Config::head_dim / 64;
  Element data[num_panels][rows][panel_columns];
};

}  // namespace cuflash

// Six numbers for each box: its offset in the tile in bytes, column, row and three batch indices.
extern "C" int boxes(const cuflash::ForwardParams* params, int flat, int first_key, int* found) {
  using namespace cuflash;
  static KeyBlock tile;
  static cuflash::uint64_t full;
  const BatchIndex entry(params->batch, flat);
  int count = 0;
  ptx::on_load = [&](uint32_t smem, int column, int row, const int (&batch)[3]) {
    int* const own = found + 6 * count++;
    own[0] = smem - ptx::shared_address(&tile);
    own[1] = column;
    own[2] = row;
    for (int i = 0; i < 3; ++i) own[3 + i] = batch[i];
  };
  for (int lane = 0; lane < 32; ++lane) {
    threadIdx.x = lane;
    const KeyPages<true> pages(*params, entry);
    const KeyPages<true>::Box box = pages.look_up(*params, first_key);
    start_load_of_pages(tile, {}, pages.k_axes, *params, box, full);
  }
  return count;
}
