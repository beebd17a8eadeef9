// Attention forward in float32 for Hopper: wgmma on TF32 parts of the operands.
//
//   for each tile of block_m rows of q:                       one thread block
//     m = -inf, l = 0, o = 0
//     for each block of block_n keys that some row sees:
//       s = q k^T;  s = score(s)                              64 rows per warpgroup
//       m' = max(m, rowmax s);  p = exp(s - m');  l = l exp(m - m') + rowsum p
//       o = o exp(m - m') + dropout(p) v                      p is split in registers
//     out = o / l,  lse = m + log l                         a sink joins m and l here
//
// Warpgroups 0 and 1 are producers: warpgroup 0 loads k, warpgroup 1 loads v. They split every
// element into its TF32 parts once, and write k as rows and v transposed, because wgmma sums
// float32 only along the rows of both operands. The other warpgroups are consumers. q stays in
// float32: the lanes that multiply with it split it. If one product of TF32 is enough, q is read as
// an operand from shared memory. (D40, D41, D42)
#include "portable/forward_rows.cuh"
#include "sm90_tf32/roles.cuh"

namespace cuflash {

struct alignas(1024) SharedMemory {
  using QTile = SmemTile<Config::block_m, Config::head_dim>;
  using KTile = SmemTile<Config::block_n, Config::head_dim>;
  using TransposedV = SmemTile<Config::head_dim_v, Config::block_n>;

  QTile q[1];  // float32 rows, or their single TF32 part
  KTile k[Config::num_stages][operand_parts];
  TransposedV v[Config::num_stages][operand_parts];
  TileBarriers k_ring, v_ring;
};
static_assert(Config::block_m == 64 * consumers, "each consumer warpgroup computes 64 rows");

// A producer warpgroup loads `pieces_ahead` pieces of `piece_rows` rows ahead, in registers. 3xTF32
// and scores that need registers leave room for fewer rows.
constexpr bool loads_far_ahead = !uses_3xtf32 && Score::leaves_registers_for_products;
constexpr int piece_rows = loads_far_ahead ? 32 : 16, pieces_ahead = 2;
// Registers of each thread. Summed over all warpgroups they equal what the block got at launch.
constexpr int producer_registers = loads_far_ahead ? 96 : 64;
constexpr int consumer_registers = 256 - producer_registers;

// Called by all threads. The queries of the tile are visible to all after the next barrier.
CUFLASH_DEVICE void load_queries(const ForwardParams& params, SharedMemory& smem) {
  const Work work = Work::of_thread_block(params);
  const Seqlen seqlen(params.score, work.entry);
  const RowSource q(params.q, params.q_layout, work.entry, seqlen.first_q, params.head_dim);
  load_tile(smem.q[0], q, work.first_row, {0, seqlen.q});
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  if constexpr (!uses_3xtf32) {
    __syncthreads();  // all rows have arrived
    for (int i = threadIdx.x; i < Config::block_m * Config::head_dim; i += Config::num_threads) {
      smem.q[0].data[i] = __uint_as_float(to_tf32_operand(smem.q[0].data[i]));
    }
    ptx::fence_async_proxy();
  }
}

// s = q k^T for the rows of the warpgroup that `warp` belongs to.
template <int tiles, typename Tile>
CUFLASH_DEVICE void multiply_queries(float (&s_acc)[1][tiles][4], const Tile (&q)[1],
                                     const SharedOperand<SharedMemory::KTile>& k, int warp) {
  if constexpr (uses_3xtf32) {
    multiply_transposed<columns_of_a_score, Score::leaves_registers_for_products>(
        s_acc, read_rows(q[0], 16 * warp), k);
  } else {
    multiply_transposed(s_acc, SharedOperand<Tile>(q, 64 * (warp / 4)), k);
  }
}

// Loads and splits all blocks of one operand: k as rows, or v transposed.
template <bool of_keys, int width, typename Tile>
CUFLASH_DEVICE void produce_operand(const ForwardParams& params,
                                    Tile (&tiles)[Config::num_stages][operand_parts],
                                    TileBarriers& barriers) {
  const TileWalk tile(params);
  VisitedBlocks<Walk::keys> visited(tile.score, tile.blocks, tile.rows);
  const int first_k = tile.score.seqlen.first_k;
  const ColumnSource<width> source(
      of_keys ? RowSource(params.k, params.k_layout, tile.work.entry, first_k, params.head_dim)
              : RowSource(params.v, params.v_layout, tile.work.entry, first_k, params.head_dim_v));
  constexpr int pieces = Config::block_n / piece_rows;
  static_assert(pieces % pieces_ahead == 0, "a piece is in the same registers in every block");
  Tf32PairColumn<width, piece_rows> held[pieces_ahead];
  const auto load = [&](int block, int piece) {
    held[piece % pieces_ahead].load(source, block * Config::block_n + piece * piece_rows,
                                    tile.keys);
  };
  int block = visited.first_from(tile.blocks.begin);
  if (block >= tile.blocks.end) return;
#pragma unroll
  for (int i = 0; i < pieces_ahead; ++i) load(block, i);
  Ring<Config::num_stages> ring;
#pragma unroll 1
  for (int next; block < tile.blocks.end; block = next) {
    next = visited.next_after(block);
    auto& to = tiles[ring.stage()];
    barriers.fill(ring, [&] {
#pragma unroll
      for (int i = 0; i < pieces; ++i) {
        if constexpr (of_keys) {
          held[i % pieces_ahead].store_rows(to, i * piece_rows);
        } else {
          held[i % pieces_ahead].store_columns(to, i * piece_rows);
        }
        const bool in_block = i + pieces_ahead < pieces;
        if (in_block) {
          load(block, i + pieces_ahead);
        } else if (next < tile.blocks.end) {
          load(next, i + pieces_ahead - pieces);
        }
      }
    });
    ring.advance();
  }
}

// At head size 128 o leaves no registers for a bias during a product.
using LookUps = If<(Config::head_dim_v > 64), RowsWhenNeeded<Config::block_n / 8>,
                   RowsAhead<1, Config::block_n / 8>>;

// Computes the softmax sums and o of a warpgroup's 64 rows, over the keys that the tile's rows see.
template <int out_tiles>
CUFLASH_DEVICE void attend(const ForwardParams& params, SharedMemory& smem, int warp,
                           OnlineSoftmax<1>& softmax, float (&o_acc)[1][out_tiles][4]) {
  const TileWalk tile(params);
  VisitedBlocks<Walk::keys> visited(tile.score, tile.blocks, tile.rows);
  const int first_row = tile.work.first_row + 16 * warp;
  const int group_row = tile.work.first_row + 64 * (warp / 4);
  const Range group_keys = tile.score.kv_range(group_row, group_row + 64);
  Ring<Config::num_stages> ring;
#pragma unroll 1
  for (int block = visited.first_from(tile.blocks.begin); block < tile.blocks.end;
       block = visited.next_after(block)) {
    const int stage = ring.stage(), first_key = block * Config::block_n;
    const bool sees = first_key < group_keys.end && group_keys.begin < first_key + Config::block_n;
    if (!warp_any(sees)) {  // only the other warpgroup sees this block (D125)
      smem.k_ring.skip(ring);
      smem.v_ring.skip(ring);
      ring.advance();
      continue;
    }
    const LookUps look_ups(tile.score, first_row, first_key);
    float s_acc[1][Config::block_n / 8][4];
    smem.k_ring.read(ring, [&] {
      multiply_queries(s_acc, smem.q, SharedOperand<SharedMemory::KTile>(smem.k[stage]), warp);
    });

    if (warp_any(tile.blocks.masked(block) || !visited.has_tile_segment(block))) {
      apply_score<true>(s_acc, tile.score, first_row, first_key, look_ups);
    } else {
      apply_score<false>(s_acc, tile.score, first_row, first_key, look_ups);
    }
    softmax.update<true>(s_acc, o_acc, tile.score);
    drop_weights(s_acc, tile.score, first_row, first_key);
    smem.v_ring.read(ring, [&] { multiply_sums<rows_of_out>(o_acc, s_acc, smem.v[stage]); });
    ring.advance();
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads, 1)
    cuflash_forward_tf32_sm90(const __grid_constant__ cuflash::ForwardParams params) {
  using namespace cuflash;
  let_combine_start();
  SharedMemory& smem = shared_memory<SharedMemory>();
  if (threadIdx.x == 0) {
    smem.k_ring.init();
    smem.v_ring.init();
  }
  load_queries(params, smem);
  __syncthreads();  // q has arrived, and all mbarriers are initialised
  const int warp = __shfl_sync(0xffffffff, warp_index(), 0);
  if (warp < 8) {
    ptx::setmaxnreg_dec<producer_registers>();
    if (warp < 4) {
      produce_operand<true, Config::head_dim>(params, smem.k, smem.k_ring);
    } else {
      produce_operand<false, Config::head_dim_v>(params, smem.v, smem.v_ring);
    }
  } else {
    ptx::setmaxnreg_inc<consumer_registers>();
    OnlineSoftmax<1> softmax;
    float o_acc[1][Config::head_dim_v / 8][4];
    clear(o_acc);
    attend(params, smem, warp - 8, softmax, o_acc);
    store_rows(params, warp - 8, softmax, o_acc, Work::of_thread_block(params));
  }
}
