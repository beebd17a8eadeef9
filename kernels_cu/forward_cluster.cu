// Attention of few queries over a few hundred keys, for sm_90 and later: a cluster shares a tile.
//
//   block i of a cluster:    out_i, lse_i = attention over part i of the keys
//   all blocks meet                                            results lie in shared memory
//   warp w of the cluster:   rows w, w + warps, ... of all parts become one
//   all meet again                                             nobody leaves while others read
//
// Beside two kernels, forward_sm80.cu and forward_combine.cu, this saves a launch and the way
// through memory, which is most of the time of so few keys.
#include "portable/combined_row.cuh"
#include "portable/forward_tile.cuh"
#include "ptx/cluster.cuh"

namespace cuflash {

constexpr int cluster_blocks = 8;
static_assert(sizeof(PartResults) <= sizeof(SharedMemory), "results take the place of tiles");

// A row in the shared memory of all blocks of the cluster.
struct PartsOfCluster {
  uint32_t lse_of_row, out_of_row;  // in this block

  CUFLASH_DEVICE explicit PartsOfCluster(int row)
      : lse_of_row(ptx::shared_address(&PartResults::of_this_block().lse[row])),
        out_of_row(ptx::shared_address(PartResults::of_this_block().out[row])) {}

  CUFLASH_DEVICE Real lse(int part) const { return load(part, lse_of_row); }
  CUFLASH_DEVICE Real out(int part, int column) const {
    return load(part, out_of_row + sizeof(Real) * column);
  }

 private:
  CUFLASH_DEVICE static Real load(int part, uint32_t address) {
    return __int_as_float(ptx::load_shared_of_cluster(ptx::shared_address_of(part, address)));
  }
};

CUFLASH_DEVICE void combine(const ForwardParams& params) {
  const Work work = Work::of_this_block(params);
  const Seqlen seqlen(params.score, work.entry);
  const RowTarget to(params.out, params.out_layout, work.entry, seqlen.first_q, params.head_dim_v,
                     Config::head_dim_v);
  Real* lse = params.lse + work.entry * params.lse_layout.batch;
  const int rows = min(Config::block_m, seqlen.rows_q - work.first_row);
#pragma unroll 1
  for (int row = cluster_blocks * warp_index() + ptx::cluster_rank(); row < rows;
       row += cluster_blocks * Config::num_warps) {
    const PartsOfCluster parts(row);
    const CombinedRow<PartsOfCluster> combined(parts, cluster_blocks);
    VColumns sums;
    sums.clear();
    combined.add(sums.value, 0, 1, params.head_dim_v);
    sums.store(to, work.first_row + row, 1);
    if (params.lse != nullptr && lane_index() == 0) {
      lse[(seqlen.first_q + work.first_row + row) * params.lse_layout.row] = combined.lse();
    }
  }
}

}  // namespace cuflash

extern "C" __global__ void __cluster_dims__(8, 1, 1)
    __launch_bounds__(cuflash::Config::num_threads, cuflash::Config::blocks_per_sm)
        cuflash_forward_cluster(const __grid_constant__ cuflash::ForwardParams params) {
  using namespace cuflash;
  WarpSoftmax<slices> softmax;
  Real o_acc[slices][own_columns / 8][4];
  clear(o_acc);
  attend(params, shared_memory<SharedMemory>(), softmax, o_acc);
  __syncthreads();  // every warp is done with the tiles
  store_rows(params, warp_index(), softmax, o_acc);
  ptx::cluster_sync();
  combine(params);
  ptx::cluster_sync();
}
