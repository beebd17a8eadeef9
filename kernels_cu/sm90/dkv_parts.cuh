// Layout of the float32 sums of dk and dv where queries are split into parts: backward_sm90.cu and
// backward_pair_sm90.cu write them, backward_combine.cu adds them up.
//
// The parts of an owner are contiguous. A part has one slice for every 16 keys, and each packed
// sequence begins a new slice.
#pragma once

#include "schedule/tiles.cuh"
#include "score/seqlen.cuh"
#include "sm90/dq_accum.cuh"

namespace cuflash {

struct DkvSlice {
  DqSlice<Config::head_dim / 8> dk;
  DqSlice<Config::head_dim_v / 8> dv;
};

struct DkvParts {
  DkvSlice* sums;
  int slices;  // slices of a part
  int first;   // first slice of the sequence

  CUFLASH_DEVICE DkvParts(const BackwardParams& params, void* sums, int sequence)
      : sums(static_cast<DkvSlice*>(sums)), slices((params.score.seqlen_k + 15) / 16), first(0) {
    if constexpr (Config::cu_seqlens != Dtype::none) {
      slices = params.score.seqlen_k / 16 + params.score.num_sequences;
      first = Packing::of_keys(params.score).first_rank<16>(sequence);
    }
  }

  // `part` counts the parts of all owners.
  CUFLASH_DEVICE DkvSlice& slice(int part, int first_key) const {
    return sums[int64_t(part) * slices + first + first_key / 16];
  }
};

// The slice of a warp's 16 keys in its tile's part, or null if none of the keys exists.
CUFLASH_DEVICE DkvSlice* own_slice(const BackwardParams& params, const KeyTile& work,
                                   int first_key) {
  if (first_key >= Seqlen(params.score, work.entry(params, 0)).rows_k) return nullptr;
  const int part = Config::split_rows ? work.owner * params.row_parts + work.part : work.owner;
  return &DkvParts(params, params.dk, work.sequence).slice(part, first_key);
}

}  // namespace cuflash
