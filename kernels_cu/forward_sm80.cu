// Attention forward for tensor cores of sm_80 and later (mma.sync), FlashAttention-2.
//
//   for each tile of block_m rows of q:                       one thread block
//     m = -inf, l = 0, o = 0
//     for each block of block_n keys that some row sees:
//       s = q k^T;  s = score(s)                              registers, 16 rows per warp and slice
//       m' = max(m, rowmax s);  p = exp(s - m');  l = l exp(m - m') + rowsum p
//       o = o exp(m - m') + dropout(p) v                      p is reused in registers
//     out = o / l,  lse = m + log l                         a sink joins m and l here
//
// If keys are split, each thread block computes one part of them. The thread blocks of a cluster
// also combine their parts.
//
// Shared memory holds the tile of q, and one or two stages of k and v (in float32 as TF32 parts).
// With one stage v arrives while q k^T is computed, and k of the next block during p v. If keys lie
// in pages, shared memory also holds the places (offsets) of the rows of two blocks. Keys of 8 bits
// stay so in shared memory; products with them are in float16.
#include "tile/matmul.cuh"
#include "portable/cluster_rows.cuh"

namespace cuflash {

constexpr int own_columns = Config::head_dim_v / Config::split_columns;
static_assert(own_columns % 16 == 0, "one product has 16 columns");
static_assert(!Config::clusters || Config::split_columns == 1, "a cluster has all columns");

struct SharedMemory : BlockPlaces<Config::paged>, ReceivedRows<Config::clusters> {
  using QTile = OperandTile<Config::block_m, Config::head_dim>;
  using KTile = StreamedTile<Config::block_n, Config::head_dim>;
  using VTile = StreamedTile<Config::block_n, own_columns>;

  QTile q;
  KTile k[Config::num_stages];
  VTile v[Config::num_stages];
};

constexpr int slices = Config::block_m / (16 * Config::num_warps);
static_assert(slices * 16 * Config::num_warps == Config::block_m, "every warp owns whole slices");

// Computes the softmax sums and o of this warp's rows, over the keys that the tile's rows see.
template <int out_tiles>
CUFLASH_DEVICE void attend(const ForwardParams& params, SharedMemory& smem,
                           ClusterRows<Config::clusters>& own_rows, WarpSoftmax<slices>& softmax,
                           Real (&o_acc)[slices][out_tiles][4]) {
  const Work work = Work::of_thread_block(params);
  const Score score(params.score, work.entry, KeyPart::of_thread_block(params).keys);
  const int warp_row = warp_index() * 16 * slices;
  const Range keys = score.kv_range(work.first_row, work.first_row + Config::block_m);
  const Range rows{work.first_row, work.first_row + Config::block_m};
  const BlockRanges blocks = score.kv_blocks(rows.begin, rows.end);
  VisitedBlocks<Walk::keys> visited(score, blocks, rows);
  int n_block = visited.first_from(blocks.begin);
  if (n_block >= blocks.end) return own_rows.init(params, work, score.seqlen);

  const int first_q = score.seqlen.first_q, first_k = score.seqlen.first_k;
  const RowSource q(params.q, params.q_layout, work.entry, first_q, params.head_dim);
  const KeyRows k(params.k, params.k_layout, work.entry, first_k, params.head_dim);
  const KeyRows v(params.v, params.v_layout, work.entry, first_k, params.head_dim_v,
                  first_own_column(Config::head_dim_v));

  load_tile(smem.q, q, work.first_row, {0, score.seqlen.q});
  if constexpr (has_8_bit_keys) ptx::cp_async_commit();  // q is waited for before k and v
  smem.begin(params, work.entry);
  smem.look_up(0, params, n_block * Config::block_n, keys);
  if constexpr (Config::paged) __syncthreads();  // the places of the rows are written
  load_tile(smem.k[0], smem.of_k(k, 0), n_block * Config::block_n, keys);
  if constexpr (Config::num_stages == 2) {
    load_tile(smem.v[0], smem.of_v(v, 0), n_block * Config::block_n, keys);
  }
  ptx::cp_async_commit();
  own_rows.init(params, work, score.seqlen);  // while the copies are in flight
  Float16Rows<slices> float16_rows;
  Queries<SharedMemory::QTile, slices> queries;
  if constexpr (has_8_bit_keys) {
    ptx::cp_async_wait<1>();
    __syncthreads();  // q has arrived
    float16_rows.convert(smem.q, warp_row);
    queries.read(smem.q, warp_row);
  }

  int stage = 0, places = 0;
#pragma unroll 1
  for (int next; n_block < blocks.end; n_block = next) {
    const int first_key = n_block * Config::block_n;
    const bool one_segment = visited.has_tile_segment(n_block);
    next = visited.next_after(n_block);
    // Overwrites the places of a block that every warp has finished.
    if (next < blocks.end) {
      smem.look_up(next_places(places), params, next * Config::block_n, keys);
    }
    ptx::cp_async_wait<0>();
    split(smem.k[stage]);
    if constexpr (Config::num_stages == 2) split(smem.v[stage]);
    __syncthreads();  // this stage has arrived, and every warp has read the other
    if constexpr (Config::num_stages == 1) {
      load_tile(smem.v[0], smem.of_v(v, places), first_key, keys);
    } else if (next < blocks.end) {
      load_tile(smem.k[stage ^ 1], smem.of_k(k, next_places(places)), next * Config::block_n, keys);
      load_tile(smem.v[stage ^ 1], smem.of_v(v, next_places(places)), next * Config::block_n, keys);
    }
    ptx::cp_async_commit();

    Real s_acc[slices][Config::block_n / 8][4];
    clear(s_acc);
    multiply_transposed(s_acc, queries.operand(smem.q, warp_row), read_columns(smem.k[stage]));
    float16_rows.undo(s_acc);
    if (blocks.masked(n_block) || !one_segment) {
      apply_score<true>(s_acc, score, work.first_row + warp_row, first_key);
    } else {
      apply_score<false>(s_acc, score, work.first_row + warp_row, first_key);
    }

    softmax.update(s_acc, o_acc, score);
    drop_weights(s_acc, score, work.first_row + warp_row, first_key);
    Register p_frag[slices][Config::block_n / 16][operand_registers];
    to_operand(p_frag, s_acc);
    if constexpr (Config::num_stages == 1) {
      ptx::cp_async_wait<0>();
      split(smem.v[0]);
      __syncthreads();  // v has arrived, and every warp has read k
      if (next < blocks.end) {
        load_tile(smem.k[0], smem.of_k(k, next_places(places)), next * Config::block_n, keys);
      }
      ptx::cp_async_commit();
    }
    places = next_places(places);
    multiply(o_acc, p_frag, read_sums(smem.v[stage]));
    if constexpr (Config::num_stages == 2) stage ^= 1;
  }
  float16_rows.mark(softmax.row_sum);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads,
                                             cuflash::Config::blocks_per_sm)
    cuflash_forward_sm80(const __grid_constant__ cuflash::ForwardParams params) {
  using namespace cuflash;
  let_combine_start();
  SharedMemory& smem = shared_memory<SharedMemory>();
  begin_cluster(smem);
  WarpSoftmax<slices> softmax;
  Real o_acc[slices][own_columns / 8][4];
  clear(o_acc);
  ClusterRows<Config::clusters> rows;
  attend(params, smem, rows, softmax, o_acc);
  if constexpr (has_8_bit_keys) sort_columns(o_acc);
  finish_rows(params, smem, rows, softmax, o_acc);
}
