// Stores of out: staged in shared memory and stored by TMA, or straight from registers.
#pragma once

#include "ptx/stmatrix.cuh"
#include "ptx/sync.cuh"
#include "sm90/load.cuh"
#include "sm90/shared_memory.cuh"

namespace cuflash {

constexpr int o_tiles = Config::head_dim_v / 8;
using OutElement = Storage<Config::out_dtype>;

// ------------------------------------------------------------------------------------ by TMA
// A row of the tile in which results are staged.
struct StagedRow : CallersRows {
  SharedMemory::QTile& tile;
  int row;

  CUFLASH_DEVICE StagedRow(SharedMemory::QTile& to, int row_of_tile) : tile(to), row(row_of_tile) {}

  CUFLASH_DEVICE void store(const ForwardParams&, const BatchIndex&, int, const VColumns& o,
                            float factor) const {
#pragma unroll
    for (int i = 0; i < VColumns::count; ++i) {
      const int column = lane_index() + 32 * i, panel_column = column % 64;
      const int offset = tile.chunk_offset(row, panel_column / 8) + 2 * (panel_column % 8);
      Element* panel = tile.data[column / 64][0];
      panel[offset / sizeof(Element)] = RowTarget::rounded(o.value[i] * factor);
    }
  }
};

// Stages 16 rows of a warp from `first_row` of the tile on. Rows in the bit mask
// `rows_to_recompute` are computed again, and for rows in `without_lse` also lse.
CUFLASH_DEVICE void stage_rows(const ForwardSm90Params& params, const Work& work,
                               SharedMemory::QTile& tile, int first_row,
                               const float (&o_acc)[1][o_tiles][4], uint32_t rows_to_recompute,
                               uint32_t without_lse) {
  const int lane = lane_index(), row = first_row + lane % 16;
#pragma unroll
  for (int t = 0; t < o_tiles; t += 2) {
    const auto& o = o_acc[0];
    ptx::stmatrix_x4(
        ptx::shared_address(tile.data[t / 8]) + tile.chunk_offset(row, t % 8 + lane / 16),
        pack<half_dtype>(o[t][0], o[t][1]), pack<half_dtype>(o[t][2], o[t][3]),
        pack<half_dtype>(o[t + 1][0], o[t + 1][1]), pack<half_dtype>(o[t + 1][2], o[t + 1][3]));
  }
  __syncwarp();  // four lanes staged each row, and the warp may overwrite it below
  for_each_bit(rows_to_recompute, [&](int bit) {
    const int q_idx = work.first_row + first_row + bit;
    recompute_out(params, work.entry, q_idx, without_lse >> bit & 1,
                  StagedRow{tile, first_row + bit});
  });
  ptx::fence_async_proxy();  // TMA will read what this thread wrote
}

// Writes rows of a box that also holds rows of the next packed sequence. Called by a warp.
CUFLASH_DEVICE void write_rows(const ForwardSm90Params& params, const BatchIndex& entry,
                               const SharedMemory::QTile& tile, int tile_row, int out_row,
                               int num_rows) {
  const int lane = lane_index(), chunk = lane % 8;
  OutElement* out =
      static_cast<OutElement*>(params.out) + entry * params.out_layout.batch + 8 * chunk;
#pragma unroll 1
  for (int first = 0; warp_any(first < num_rows); first += 4) {
    const int row = first + lane / 8;
    OutElement* to = out + (out_row + row) * params.out_layout.row;
#pragma unroll
    for (int panel = 0; panel < SharedMemory::VTile::num_panels; ++panel) {
      const int offset = tile.chunk_offset(tile_row + row, chunk);
      if (row < num_rows && 64 * panel + 8 * chunk < params.head_dim_v) {
        *reinterpret_cast<uint4*>(to + 64 * panel) =
            *reinterpret_cast<const uint4*>(tile.data[panel][0] + offset / 2);
      }
    }
    __syncwarp();
  }
}

// The store warp: stores the staged rows of each warpgroup by TMA, then releases q to the producer.
CUFLASH_DEVICE void send_tiles(const ForwardSm90Params& params, SharedMemory& smem) {
  int batch[3];
#pragma unroll 1
  for (uint32_t tiles = 0;; ++tiles) {
    const Ring<Config::num_q_stages> q_ring{tiles};
    const Work work = receive_work(smem, Ring<2>{tiles});
    if (work.first_row < 0) break;
    map_coordinates(batch, work.entry, params.out_layout);
    const Seqlen seqlen(params.score, work.entry);
    const int stage = q_ring.stage();
#pragma unroll 1
    for (int w = 0; w < consumers; ++w) {
      wait(smem.o_full[stage][w], q_ring.full_parity());
      __syncwarp();  // all lanes are past their wait: see sm90/barrier.cuh
      const int q_idx = work.first_row + 64 * w, out_row = seqlen.first_q + q_idx;
      if constexpr (is_packed) {
        const int num_rows = seqlen.rows_q - q_idx;
        if (warp_any(num_rows < 64)) {
          write_rows(params, work.entry, smem.q[stage], 64 * w, out_row, num_rows);
          continue;
        }
      }
      if (lane_index() != 0) continue;
#pragma unroll
      for (int panel = 0; panel < SharedMemory::VTile::num_panels; ++panel) {
        ptx::tma_store(params.out_map, ptx::shared_address(smem.q[stage].data[panel][64 * w]),
                       64 * panel, out_row, batch);
      }
      ptx::tma_store_commit();
    }
    if (lane_index() == 0) ptx::tma_store_wait_read();
    arrive_as_warp(smem.q_empty[stage]);
  }
}

// ----------------------------------------------------------------------------- from registers
// Writes 16 rows of a warp from `first_row` of the matrix on. The four lanes of a quad exchange
// registers, so that each lane stores eight neighbouring columns.
CUFLASH_DEVICE void store_chunks(const ForwardSm90Params& params, const BatchIndex& entry,
                                 const Seqlen& seqlen, int first_row,
                                 const float (&o_acc)[1][o_tiles][4]) {
  const int quad_lane = lane_index() % 4;
  OutElement* out = static_cast<OutElement*>(params.out) + entry * params.out_layout.batch +
                    seqlen.first_q * params.out_layout.row;
#pragma unroll
  for (int t = 0; t < o_tiles; t += 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = pack<half_dtype>(o_acc[0][t + i][2 * half], o_acc[0][t + i][2 * half + 1]);
      }
      transpose_quad(x);
      const int q_idx = first_row + fragment_row(0, 2 * half);
      const int column = 8 * (t + quad_lane);
      if (q_idx < seqlen.rows_q && column < params.head_dim_v) {
        *reinterpret_cast<uint4*>(out + q_idx * params.out_layout.row + column) =
            make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
  }
}

// Writes 16 rows of a warp in float32: rows of out begin at multiples of 16 bytes.
CUFLASH_DEVICE void store_floats(const ForwardSm90Params& params, const BatchIndex& entry,
                                 const Seqlen& seqlen, int first_row,
                                 const float (&o_acc)[1][o_tiles][4]) {
  float* out = static_cast<float*>(KeyPart::of_thread_block(params).out(params)) +
               entry * params.out_layout.batch + seqlen.first_q * params.out_layout.row;
  const int lane = ptx::thread_index() % 32;  // read here: no register holds it before (D85)
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int q_idx = first_row + fragment_row(0, 2 * half, lane);
    float* row = out + q_idx * params.out_layout.row;
#pragma unroll
    for (int t = 0; t < o_tiles; t += 2) {
      const auto& o = o_acc[0];
      const float4 two_tiles = make_float4(o[t][2 * half], o[t][2 * half + 1], o[t + 1][2 * half],
                                           o[t + 1][2 * half + 1]);
      const float4 four = exchange_halves(two_tiles, lane);
      const int column = column_of_four(t, lane);
      if (q_idx < seqlen.rows_q && column < params.head_dim_v) {
        __stcs(reinterpret_cast<float4*>(row + column), four);
      }
    }
  }
}

// Writes 16 rows of a warp in 16 bits or in float32. Rows in `rows_to_recompute` are computed
// again.
CUFLASH_DEVICE void store_rows(const ForwardSm90Params& params, const BatchIndex& entry,
                               const Seqlen& seqlen, int first_row,
                               const float (&o_acc)[1][o_tiles][4], uint32_t rows_to_recompute,
                               uint32_t without_lse) {
  if constexpr (Config::out_dtype == Dtype::float32) {
    store_floats(params, entry, seqlen, first_row, o_acc);
  } else {
    store_chunks(params, entry, seqlen, first_row, o_acc);
  }
  __syncwarp();  // four lanes wrote each row, and the warp may overwrite it below
  for_each_bit(rows_to_recompute, [&](int bit) {
    recompute_out(params, entry, first_row + bit, without_lse >> bit & 1);
  });
}

}  // namespace cuflash
