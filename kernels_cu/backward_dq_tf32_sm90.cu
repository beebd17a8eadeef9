// dq in float32 for Hopper: wgmma on TF32 parts of the operands. Every sum has a fixed order.
//
//   for each tile of block_m rows of q:                       one thread block
//     dq = 0
//     for each block of block_n keys that some row sees:
//       s = q k^T;  p = exp(score(s) - lse)                   64 rows per warpgroup
//       dp = dropout(dout v^T)
//       ds = p (dp - delta) score'(s)                         split in registers
//       dq += ds k
//     dq *= scale
//
// Warpgroup 0 is the producer: it splits k and v once for each block. It writes k as rows for s and
// again transposed for dq, because wgmma sums float32 only along the rows of both operands. The
// other warpgroups are consumers. q and dout of the tile stay in float32: the lanes that multiply
// with them split them. (D40)
#include "portable/dq_rows.cuh"
#include "sm90_tf32/roles.cuh"

namespace cuflash {

struct alignas(1024) SharedMemory {
  using QTile = SmemTile<Config::block_m, Config::head_dim>;
  using DoutTile = SmemTile<Config::block_m, Config::head_dim_v>;
  using KTile = SmemTile<Config::block_n, Config::head_dim>;
  using VTile = SmemTile<Config::block_n, Config::head_dim_v>;
  using TransposedK = SmemTile<Config::head_dim, Config::block_n>;

  QTile q;
  DoutTile dout;
  KTile k[Config::num_stages][operand_parts];
  VTile v[Config::num_stages][operand_parts];
  TransposedK summed_k[Config::num_stages][operand_parts];
  TileBarriers k_ring, v_ring, summed_k_ring;
};
static_assert(Config::block_m == 64 * consumers, "each consumer warpgroup computes 64 rows");

// Registers of each thread. Summed over all warpgroups they equal what the block got at launch.
constexpr int producer_registers = 136, consumer_registers = 184;

// Called by all threads. The rows of the tile are visible to all after the next barrier.
CUFLASH_DEVICE void load_rows(const BackwardParams& params, SharedMemory& smem) {
  const Work work = Work::of_thread_block(params);
  const BatchIndex entry = work.entry(params, 0);
  const Score score(params.score, entry);
  const int first_q = score.seqlen.first_q;
  const RowSource q(params.q, params.q_layout, entry, first_q, params.head_dim);
  const RowSource dout(params.dout, params.dout_layout, entry, first_q, params.head_dim_v);
  load_tile(smem.q, q, work.first_row, {0, score.seqlen.q});
  load_tile(smem.dout, dout, work.first_row, {0, score.seqlen.q});
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
}

CUFLASH_DEVICE void produce_blocks(const BackwardParams& params, SharedMemory& smem) {
  const TileWalk tile(params);
  VisitedBlocks<Walk::keys> visited(tile.score, tile.blocks, tile.rows);
  const int first_k = tile.score.seqlen.first_k;
  const ColumnSource<Config::head_dim> k(
      RowSource(params.k, params.k_layout, tile.entry, first_k, params.head_dim));
  const ColumnSource<Config::head_dim_v> v(
      RowSource(params.v, params.v_layout, tile.entry, first_k, params.head_dim_v));
  Ring<Config::num_stages> ring;
  Tf32PairColumn<Config::head_dim, Config::block_n> k_column;
  Tf32PairColumn<Config::head_dim_v, Config::block_n> v_column;
  int block = visited.first_from(tile.blocks.begin);
  if (block >= tile.blocks.end) return;
  v_column.load(v, block * Config::block_n, tile.keys);
#pragma unroll 1
  for (int next; block < tile.blocks.end; block = next) {
    const int stage = ring.stage();
    next = visited.next_after(block);
    k_column.load(k, block * Config::block_n, tile.keys);
    smem.k_ring.fill(ring, [&] { k_column.store_rows(smem.k[stage]); });
    smem.v_ring.fill(ring, [&] { v_column.store_rows(smem.v[stage]); });
    if (next < tile.blocks.end) v_column.load(v, next * Config::block_n, tile.keys);
    smem.summed_k_ring.fill(ring, [&] { k_column.store_columns(smem.summed_k[stage]); });
    ring.advance();
  }
}

// 64 keys leave no registers for a bias during a product.
using LookUps = If<(Config::block_n > 32), RowsWhenNeeded<Config::block_n / 8>,
                   RowsAhead<1, Config::block_n / 8>>;

// Adds to dq of a warpgroup's 64 rows, over the keys that the tile's rows see.
template <int dq_tiles>
CUFLASH_DEVICE void add_blocks(const BackwardParams& params, SharedMemory& smem, int warp,
                               float (&dq_acc)[1][dq_tiles][4]) {
  const TileWalk tile(params);
  VisitedBlocks<Walk::keys> visited(tile.score, tile.blocks, tile.rows);
  const int first_row = tile.work.first_row + 16 * warp;
  RowStatistics statistics[1][2];
  read_statistics(statistics, params, tile.entry, tile.score.seqlen, first_row);
  Ring<Config::num_stages> ring;
#pragma unroll 1
  for (int block = visited.first_from(tile.blocks.begin); block < tile.blocks.end;
       block = visited.next_after(block)) {
    const int stage = ring.stage(), first_key = block * Config::block_n;
    const LookUps look_ups(tile.score, first_row, first_key);
    float s_acc[1][Config::block_n / 8][4], dp_acc[1][Config::block_n / 8][4];
    smem.k_ring.read(ring, [&] {
      multiply_transposed<columns_of_a_score, Score::leaves_registers_for_products>(
          s_acc, read_rows(smem.q, 16 * warp), SharedOperand<SharedMemory::KTile>(smem.k[stage]));
    });
    smem.v_ring.read(ring, [&] {
      multiply_transposed<columns_of_dp, Score::leaves_registers_for_products>(
          dp_acc, read_rows(smem.dout, 16 * warp),
          SharedOperand<SharedMemory::VTile>(smem.v[stage]));
    });
    drop_gradients(dp_acc, tile.score, first_row, first_key);
    if (warp_any(tile.blocks.masked(block) || !visited.has_tile_segment(block))) {
      compute_ds<true>(s_acc, dp_acc, statistics, tile.score, first_row, first_key, look_ups);
    } else {
      compute_ds<false>(s_acc, dp_acc, statistics, tile.score, first_row, first_key, look_ups);
    }
    smem.summed_k_ring.read(ring, [&] { multiply_sums(dq_acc, s_acc, smem.summed_k[stage]); });
    ring.advance();
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads, 1)
    cuflash_backward_dq_tf32_sm90(const __grid_constant__ cuflash::BackwardParams params) {
  using namespace cuflash;
  SharedMemory& smem = shared_memory<SharedMemory>();
  if (threadIdx.x == 0) {
    smem.k_ring.init();
    smem.v_ring.init();
    smem.summed_k_ring.init();
  }
  load_rows(params, smem);
  __syncthreads();  // q and dout have arrived, and all mbarriers are initialised
  const int warp = __shfl_sync(0xffffffff, warp_index(), 0);
  if (warp < 4) {
    ptx::setmaxnreg_dec<producer_registers>();
    produce_blocks(params, smem);
  } else {
    ptx::setmaxnreg_inc<consumer_registers>();
    float dq_acc[1][Config::head_dim / 8][4];
    clear(dq_acc);
    add_blocks(params, smem, warp - 4, dq_acc);
    store_rows(params, warp - 4, dq_acc);
  }
}
