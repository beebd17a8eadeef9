// Combines the results of parts of the keys where the thread blocks of a tile are a cluster:
//
//   block i of n:  out_i, lse_i of row r of the tile              to block r % n
//   block r % n:   lse = log sum exp lse_i,  out = sum exp(lse_i - lse) out_i
//
// The sums are those of forward_combine.cu, in the same order. Rows are sent directly to the shared
// memory of the block that combines them, whose mbarrier counts their bytes. So no thread block
// waits for another one to read.
#pragma once

#include "portable/forward_rows.cuh"
#include "portable/part_sums.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

namespace cuflash {

constexpr int max_cluster_parts = 8;  // every device with clusters runs clusters of 8

// What a thread block receives: for each of its rows the results of all parts, one after the other.
template <bool clusters>
struct ReceivedRows {};
template <>
struct alignas(128) ReceivedRows<true> {
  static constexpr int size = Config::block_m + max_cluster_parts - 1;

  Real out[size][Config::head_dim_v];
  Real lse[size];
  uint64_t arrived;
};
using Received = ReceivedRows<true>;

// How the cluster shares out the rows of its tile, and where this thread block stores results.
template <bool clusters>
struct ClusterRows {
  CUFLASH_DEVICE void init(const ForwardParams&, const Work&, const Seqlen&) {}
};
template <>
struct ClusterRows<true> {
  Work work;
  int num_rows;  // rows of the tile
  int part, parts;
  int per_part;  // about 2^16 / parts: rows are few, and a product replaces a division
  RowTarget::Value* out;
  Real* lse;  // may be null

  CUFLASH_DEVICE void init(const ForwardParams& params, const Work& own, const Seqlen& seqlen) {
    work = own;
    const RowTarget to(params.out, params.out_layout, work.entry, seqlen.first_q, params.head_dim_v,
                       Config::head_dim_v);
    num_rows = min(seqlen.rows_q - work.first_row, Config::block_m);
    part = ptx::cluster_rank();
    parts = ptx::cluster_size();
    per_part = (1 << 16) / parts + 1;
    out = to.data;
    lse = params.lse;
    if (lse != nullptr) {
      lse += work.entry * params.lse_layout.batch + seqlen.first_q * params.lse_layout.row;
    }
  }

  // The slot of a row in block `row % parts`, which combines it: row / parts.
  CUFLASH_DEVICE int slot_of(int row) const { return row * per_part >> 16; }
  CUFLASH_DEVICE int own() const { return slot_of(max(num_rows - part + parts - 1, 0)); }
};

constexpr int sent_bytes = sizeof(Real) * (Config::head_dim_v + 1);  // a row of out and its lse

// Sends each row once to the thread block that combines it, whose mbarrier counts the bytes.
struct SentRows {
  Received& received;
  const ClusterRows<true>& rows;

  struct Place {
    uint32_t out, lse, barrier;
  };

  CUFLASH_DEVICE Place place_of(int q_idx) const {
    const int row = q_idx - rows.work.first_row, slot = rows.slot_of(row);
    const int rank = row - slot * rows.parts, at = slot * rows.parts + rows.part;
    const auto remote_address = [&](const void* own) {
      return ptx::shared_address_of(rank, ptx::shared_address(own));
    };
    return {remote_address(received.out[at]), remote_address(&received.lse[at]),
            remote_address(&received.arrived)};
  }

  CUFLASH_DEVICE const SentRows& pairs(const ForwardParams&, const BatchIndex&, int) const {
    return *this;
  }

  CUFLASH_DEVICE void store_pair(int q_idx, int column, Real first, Real second) const {
    const Place place = place_of(q_idx);
    ptx::send_in_cluster(place.out + sizeof(Real) * column, place.barrier, first, second);
  }

  CUFLASH_DEVICE void store_lse(const ForwardParams&, const BatchIndex&, int, int q_idx,
                                Real lse) const {
    const Place place = place_of(q_idx);
    ptx::send_in_cluster(place.lse, place.barrier, lse);
  }

  // Sends a whole row. Called by one warp.
  CUFLASH_DEVICE void store(const ForwardParams&, const BatchIndex&, int q_idx, const VColumns& o,
                            Real factor) const {
    const Place place = place_of(q_idx);
#pragma unroll
    for (int i = 0; i < VColumns::count; ++i) {
      const int column = lane_index() + 32 * i;
      if (column >= Config::head_dim_v) continue;
      ptx::send_in_cluster(place.out + sizeof(Real) * column, place.barrier, o.value[i] * factor);
    }
  }
};

// Called by all threads, before anything is sent.
CUFLASH_DEVICE void begin_cluster(ReceivedRows<false>&) {}
CUFLASH_DEVICE void begin_cluster(Received& received) {
  if (ptx::thread_index() == 0) {
    ptx::mbarrier_init(ptx::shared_address(&received.arrived), 1);
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_arrive();
}

// Computes out and lse of the rows that this thread block receives, one warp for each row.
CUFLASH_DEVICE void combine_received_rows(const ForwardParams& params, Received& received,
                                          const ClusterRows<true>& rows) {
  const int own = rows.own(), width = params.head_dim_v, lane = lane_index();
  if (own == 0) return;
  const uint32_t barrier = ptx::shared_address(&received.arrived);
  if (ptx::thread_index() == 0) {  // some bytes may have arrived already
    ptx::mbarrier_arrive_expect(barrier, own * rows.parts * sent_bytes);
  }
  ptx::mbarrier_wait(barrier, 0);
#pragma unroll 1
  for (int slot = warp_index(); slot < own; slot += Config::num_warps) {
    const int q_idx = rows.work.first_row + slot * rows.parts + rows.part,
              first = slot * rows.parts;
    Real lse[max_cluster_parts], sum[VColumns::count] = {};
#pragma unroll
    for (int i = 0; i < max_cluster_parts; ++i) {
      lse[i] = i < rows.parts ? received.lse[first + i] : -infinity();
    }
    const PartSums sums(lse);
    // One division in each lane instead of one for each part.
    const Real own_share = sums.share(lane < rows.parts ? received.lse[first + lane] : -infinity());
#pragma unroll
    for (int i = 0; i < max_cluster_parts; ++i) {
      const Real share = __shfl_sync(0xffffffff, own_share, i);
#pragma unroll
      for (int c = 0; c < VColumns::count; ++c) {
        const int column = lane + 32 * c;
        const bool seen = lse[i] != -infinity() && column < width;
        sum[c] += seen ? share * received.out[first + i][column] : 0;
      }
    }
    RowTarget::Value* to = rows.out + q_idx * params.out_layout.row;
#pragma unroll
    for (int c = 0; c < VColumns::count; ++c) {
      const int column = lane + 32 * c;
      if (column < width) to[column * params.out_layout.column] = RowTarget::rounded(sum[c]);
    }
    if (rows.lse != nullptr && lane == 0) rows.lse[q_idx * params.lse_layout.row] = sums.lse();
  }
}

// Stores out and lse from registers, in the caller's arrays or in those of parts.
template <int slices, int out_tiles>
CUFLASH_DEVICE void finish_rows(const ForwardParams& params, ReceivedRows<false>&,
                                const ClusterRows<false>&, WarpSoftmax<slices>& softmax,
                                const Real (&o_acc)[slices][out_tiles][4]) {
  store_rows(params, warp_index(), softmax, o_acc, Work::of_thread_block(params));
}
// The same for a cluster, which combines its parts.
template <int slices, int out_tiles>
CUFLASH_DEVICE void finish_rows(const ForwardParams& params, Received& received,
                                const ClusterRows<true>& rows, WarpSoftmax<slices>& softmax,
                                const Real (&o_acc)[slices][out_tiles][4]) {
  ptx::cluster_wait();  // every mbarrier is initialised
  store_rows(params, warp_index(), softmax, o_acc, rows.work, SentRows{received, rows});
  combine_received_rows(params, received, rows);
}

}  // namespace cuflash
