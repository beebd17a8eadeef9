// Rotary embedding: each row of an array is rotated by its position. One warp computes a row.
#include "cache/rotate.cuh"

namespace cuflash {

CUFLASH_DEVICE void rotate_rows(const RotaryParams& params) {
  const Tile tile = tile_of(params.grid, ptx::block_index());
  const BatchIndex entry(params.batch, tile.owner);
  const int row = tile.block * Config::num_warps + ptx::thread_index() / 32;
  if (row >= params.num_rows) return;
  int64_t position = params.position;
  if constexpr (Config::positions != Dtype::none) {
    const Layout& layout = params.positions_layout;
    position =
        read_integer<Config::positions>(params.positions, entry * layout.batch + row * layout.row);
  }
  const Layout &from = params.x_layout, &to = params.out_layout;
  Element* const out = static_cast<Element*>(params.out) + entry * to.batch + row * to.row;
  rotate_row(StridedRow{out, to.column},
             static_cast<const Element*>(params.x) + entry * from.batch + row * from.row,
             from.column, params.head_dim, {params.frequencies, params.num_pairs},
             static_cast<double>(position) * params.sign);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads)
    cuflash_rotary(const __grid_constant__ cuflash::RotaryParams params) {
  cuflash::rotate_rows(params);
}
