// Where a forward leaves out and lse: in the caller's arrays or, of a part of the keys, in the
// workspace or in shared memory of its thread block.
#pragma once

#include "schedule/tiles.cuh"
#include "tile/store.cuh"

namespace cuflash {

// What a thread block of a cluster found for its part of the keys, in place of their tiles.
struct PartResults {
  Real out[Config::block_m][Config::head_dim_v];
  Real lse[Config::block_m];

  CUFLASH_DEVICE static PartResults& of_this_block() {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    return *reinterpret_cast<PartResults*>(smem_bytes);
  }
};

// Row `first_q` of the arrays is row 0 here.
struct ForwardTarget {
  static constexpr Dtype real = sizeof(Real) == 8 ? Dtype::float64 : Dtype::float32;
  using Rows = RowsOf<Config::split_keys ? real : Config::out_dtype>;

  Rows out;
  Real* lse;  // null where nobody asked for it
  int64_t lse_step;

  CUFLASH_DEVICE static ForwardTarget of_this_block(const ForwardParams& params,
                                                    const BatchIndex& entry, int first_q) {
    if constexpr (Config::in_cluster) {
      PartResults& part = PartResults::of_this_block();
      const int first_row = RowTile::of_this_block(params).first_row;
      return {{part.out[0] - first_row * Config::head_dim_v, params.head_dim_v, Config::head_dim_v},
              part.lse - first_row,
              1};
    } else {
      const KeyPart part = KeyPart::of_this_block(params);
      Real* lse = params.lse + entry * params.lse_layout.batch + first_q * params.lse_layout.row +
                  part.index;
      return {{part.out(params), params.out_layout, entry, first_q, params.head_dim_v,
               Config::head_dim_v},
              params.lse == nullptr ? nullptr : lse,
              params.lse_layout.row};
    }
  }
};

}  // namespace cuflash
