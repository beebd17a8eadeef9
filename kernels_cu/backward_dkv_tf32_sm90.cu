// dk and dv (or one of them) in float32 for Hopper: wgmma on TF32 parts of the operands. Every sum
// has a fixed order.
//
//   for each tile of block_n keys:                            one thread block
//     dk = 0, dv = 0
//     for each batch entry that shares these keys:            heads of a group, broadcast axes
//       for each block of block_m queries that see some key:
//         s^T = k q^T;  p^T = exp(score(s^T) - lse)           64 keys per warpgroup
//         dp^T = dropout(v dout^T)
//         ds^T = p^T (dp^T - delta) score'(s^T)
//         dv += dropout(p^T) dout;  dk += ds^T q              p^T, ds^T split in registers
//     dk *= scale
//
// Warpgroup 0 is the producer: it splits q and dout once for each block. It writes them as rows for
// s^T and dp^T, and transposed for dk and dv, because wgmma sums float32 only along the rows of
// both operands. The other warpgroups are consumers. k and v of the tile stay in float32: the lanes
// that multiply with them split them. (D38)
#include "portable/dkv_rows.cuh"
#include "sm90_tf32/roles.cuh"

namespace cuflash {

using KTile = SmemTile<Config::block_n, Config::head_dim>;
using VTile = SmemTile<Config::block_n, Config::head_dim_v>;
using QTile = SmemTile<Config::block_m, Config::head_dim>;
using DoutTile = SmemTile<Config::block_m, Config::head_dim_v>;
using TransposedQ = SmemTile<Config::head_dim, Config::block_m>;
using TransposedDout = SmemTile<Config::head_dim_v, Config::block_m>;

// Tiles that only dk or only dv needs take no shared memory in the other pass.
template <bool needed>
struct TilesOfDk {
  VTile v;
  DoutTile dout[Config::num_stages][operand_parts];
  TransposedQ summed_q[Config::num_stages][operand_parts];
};
template <>
struct TilesOfDk<false> {};

template <bool needed>
struct TilesOfDv {
  TransposedDout summed_dout[Config::num_stages][operand_parts];
};
template <>
struct TilesOfDv<false> {};

struct alignas(1024) SharedMemory : TilesOfDk<Config::grad_k>, TilesOfDv<Config::grad_v> {
  KTile k;
  QTile q[Config::num_stages][operand_parts];
  RowStatistics rows[Config::num_stages][Config::block_m];
  TileBarriers q_ring, rows_ring, dout_ring, summed_q_ring, summed_dout_ring;
};
static_assert(Config::smem_bytes == 0 || sizeof(SharedMemory) == Config::smem_bytes,
              "BackwardKVTf32Sm90Config.smem_bytes counts this struct");
static_assert(Config::block_n == 64 * consumers, "each consumer warpgroup computes 64 keys");
static_assert(Config::block_m <= 128, "a thread of the producer copies the statistics of one row");
static_assert(Config::shared_keys,
              "all batch entries of an owner share k and v, which are loaded once");
static_assert(!Score::may_hide_rows || Config::block_m == 32,
              "a 32-bit mask has one bit per row of a block");

// Registers of each thread. Summed over all warpgroups they equal what the block got at launch.
constexpr int producer_registers = 136, consumer_registers = 184;

// Copies the statistics of a block. Rows outside `valid` occur only in masked blocks, where they
// see no key.
CUFLASH_DEVICE void store_statistics(RowStatistics (&to)[Config::block_m],
                                     const RowStatistics* from, int first_row, Range valid) {
  const int row = ptx::thread_index();
  if (row < Config::block_m) {
    to[row] = valid.contains(first_row + row) ? from[first_row + row] : RowStatistics{0, 0};
  }
}

// Returns a bit mask of the rows within `valid` that a mask or a bias hides from every key. Their
// lse is +inf here, and nothing that they hold may reach a product.
CUFLASH_DEVICE uint32_t hidden_rows(const RowStatistics* statistics, int first_row, Range valid) {
  if constexpr (!Score::may_hide_rows) return 0;
  const int row = first_row + lane_index();
  return __ballot_sync(0xffffffff, valid.contains(row) && statistics[row].lse == infinity());
}

template <typename Shared>
CUFLASH_DEVICE void produce_entry(const BackwardParams& params, Shared& smem, int index,
                                  Ring<Config::num_stages>& ring) {
  const TileWalk tile(params, index);
  VisitedBlocks<Walk::queries> visited(tile.score, tile.blocks, tile.keys);
  const int first_q = tile.score.seqlen.first_q;
  const ColumnSource<Config::head_dim> q(
      RowSource(params.q, params.q_layout, tile.entry, first_q, params.head_dim));
  const ColumnSource<Config::head_dim_v> dout(
      RowSource(params.dout, params.dout_layout, tile.entry, first_q, params.head_dim_v));
  const RowStatistics* statistics = params.rows + tile.entry * params.rows_layout.batch + first_q;
  Tf32PairColumn<Config::head_dim, Config::block_m> q_column;
  Tf32PairColumn<Config::head_dim_v, Config::block_m> dout_column;
  const auto load = [&](auto& column, const auto& source, int block) {
    const int first_row = block * Config::block_m;
    column.load(source, first_row, tile.rows, hidden_rows(statistics, first_row, tile.rows));
  };
  int block = visited.first_from(tile.blocks.begin);
  if (block >= tile.blocks.end) return;
  load(dout_column, dout, block);
#pragma unroll 1
  for (int next; block < tile.blocks.end; block = next) {
    const int stage = ring.stage();
    next = visited.next_after(block);
    load(q_column, q, block);
    smem.q_ring.fill(ring, [&] { q_column.store_rows(smem.q[stage]); });
    smem.rows_ring.fill(ring, [&] {
      store_statistics(smem.rows[stage], statistics, block * Config::block_m, tile.rows);
    });
    if constexpr (Config::grad_k) {
      smem.dout_ring.fill(ring, [&] { dout_column.store_rows(smem.dout[stage]); });
    }
    if constexpr (Config::grad_v) {
      smem.summed_dout_ring.fill(ring, [&] { dout_column.store_columns(smem.summed_dout[stage]); });
    }
    if (next < tile.blocks.end) load(dout_column, dout, next);
    if constexpr (Config::grad_k) {
      smem.summed_q_ring.fill(ring, [&] { q_column.store_columns(smem.summed_q[stage]); });
    }
    ring.advance();
  }
}

// Adds to dk and dv of a warpgroup's 64 keys, over the queries of a batch entry that see the tile.
template <typename Shared>
CUFLASH_DEVICE void add_entry(const BackwardParams& params, Shared& smem, int warp, int index,
                              Ring<Config::num_stages>& ring, Gradients<1>& acc) {
  const TileWalk tile(params, index);
  VisitedBlocks<Walk::queries> visited(tile.score, tile.blocks, tile.keys);
  const int first_key = tile.work.first_key + 16 * warp;
#pragma unroll 1
  for (int block = visited.first_from(tile.blocks.begin); block < tile.blocks.end;
       block = visited.next_after(block)) {
    const int stage = ring.stage(), first_row = block * Config::block_m;
    const KeysAhead<1, Config::block_m / 8> look_ups(tile.score, first_row, first_key);
    float s_acc[1][Config::block_m / 8][4], dp_acc[1][Config::block_m / 8][4];
    smem.q_ring.read(ring, [&] {
      multiply_transposed<columns_of_a_score, Score::leaves_registers_for_products>(
          s_acc, read_rows(smem.k, 16 * warp), SharedOperand<QTile>(smem.q[stage]));
    });
    if constexpr (Config::grad_k) {
      smem.dout_ring.read(ring, [&] {
        multiply_transposed<columns_of_dp, Score::leaves_registers_for_products>(
            dp_acc, read_rows(smem.v, 16 * warp), SharedOperand<DoutTile>(smem.dout[stage]));
      });
    }
    smem.rows_ring.wait_full(ring);
    if (warp_any(tile.blocks.masked(block) || !visited.has_tile_segment(block))) {
      compute_p_ds<true>(s_acc, dp_acc, smem.rows[stage], tile.score, first_row, first_key,
                         look_ups);
    } else {
      compute_p_ds<false>(s_acc, dp_acc, smem.rows[stage], tile.score, first_row, first_key,
                          look_ups);
    }
    smem.rows_ring.release_as_reader(ring);
    if constexpr (Config::grad_v) {
      smem.summed_dout_ring.read(ring,
                                 [&] { multiply_sums(acc.dv, s_acc, smem.summed_dout[stage]); });
    }
    if constexpr (Config::grad_k) {
      smem.summed_q_ring.read(ring, [&] { multiply_sums(acc.dk, dp_acc, smem.summed_q[stage]); });
    }
    ring.advance();
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads, 1)
    cuflash_backward_dkv_tf32_sm90(const __grid_constant__ cuflash::BackwardParams params) {
  using namespace cuflash;
  // shared_memory() is not used: the compiler would not know that stores to the tiles of a base
  // class stay within that base class.
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  SharedMemory& smem = *reinterpret_cast<SharedMemory*>(smem_bytes);
  if (threadIdx.x == 0) {
    smem.q_ring.init();
    smem.rows_ring.init(reader_releases);
    smem.dout_ring.init();
    smem.summed_q_ring.init();
    smem.summed_dout_ring.init();
  }
  const Work work = Work::of_thread_block(params);
  load_keys(params, smem, work.entry(params, 0), work.first_key);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();  // keys and values have arrived, and all mbarriers are initialised
  const int warp = __shfl_sync(0xffffffff, warp_index(), 0);
  Ring<Config::num_stages> ring;
  if (warp < 4) {
    ptx::setmaxnreg_dec<producer_registers>();
#pragma unroll 1
    for (int index = 0; index < params.grid.entries_per_owner; ++index) {
      produce_entry(params, smem, index, ring);
    }
  } else {
    ptx::setmaxnreg_inc<consumer_registers>();
    Gradients<1> acc;
    clear(acc.dk);
    clear(acc.dv);
#pragma unroll 1
    for (int index = 0; index < params.grid.entries_per_owner; ++index) {
      add_entry(params, smem, warp - 4, index, ring, acc);
    }
    store_gradients(params, warp - 4, acc);
  }
}
