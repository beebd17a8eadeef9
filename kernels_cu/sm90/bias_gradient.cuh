// The gradient of a bias with one element for each pair, written by the kernel of all gradients. It
// is ds of a block, rounded as for the products.
//
// Shared memory holds ds^T, whose rows are keys. A warp stores 32 keys. ldmatrix gives each lane
// eight neighbouring keys of one query, which the lane stores at once. The eight rows of a panel
// that are read together lie in different banks. The pairs of keys of a lane therefore arrive in an
// order that depends on its place in the quad.
#pragma once

#include "ptx/mma_sync.cuh"
#include "ptx/once.cuh"
#include "simt/recompute_rows.cuh"

namespace cuflash {

struct BiasGradient {
  static constexpr int lane_keys = 8, warp_keys = 4 * lane_keys;
  static_assert(!Config::grad_bias || (sizeof(Element) == 2 && Score::adds_only),
                "16-bit elements, and ds is the gradient of the biased score");

  const BackwardParams& params;
  uint16_t* of_entry;

  CUFLASH_DEVICE BiasGradient(const BackwardParams& params, const BatchIndex& entry)
      : params(params),
        of_entry(static_cast<uint16_t*>(params.dbias) + entry * params.dbias_layout.batch) {}

  CUFLASH_DEVICE uint16_t* at(int q_idx, int kv_idx) const {
    const Layout& layout = params.dbias_layout;
    return of_entry + q_idx * layout.row + kv_idx * layout.column;
  }

  // Stores the gradient of a block of queries by the keys of a tile. `ds` has panels of 64 queries.
  template <typename DsTile>
  CUFLASH_DEVICE void store(const DsTile& ds, int block, int first_key) const {
    const uint32_t thread = ptx::thread_index(), lane = thread % 32;
    const uint32_t pair = lane / 8 ^ lane % 8 / 2;  // among the pairs of the receiving quad lane
    const uint32_t key = own_keys(thread) + lane % 8 / 2 * lane_keys + 2 * pair + lane % 2;
    const uint32_t address = ptx::shared_address(ds.data) + DsTile::chunk_offset(key, 0);
    store_rows(block, first_key, [&](int row8, uint32_t (&words)[4]) {
      const uint32_t panel = row8 / 8 * DsTile::panel_bytes;
      ptx::ldmatrix_x4_trans(words, (address ^ (row8 % 8 << 4)) + panel);
      const bool odd = lane & 1, high = lane & 2;
      exchange_if(odd, words[0], words[1]);
      exchange_if(odd, words[2], words[3]);
      exchange_if(high, words[0], words[2]);
      exchange_if(high, words[1], words[3]);
    });
  }

  // Stores zeros for blocks of queries that see no key of a tile: all blocks of the thread block
  // but the blocks of `seen`.
  CUFLASH_DEVICE void clear_unseen(const KeyTile& work, const BlockRanges& seen) const {
    const BlockRanges all = work.own_blocks({0, 0, 0, QueryBlocks(params.score, 0).count}, params);
#pragma unroll 1
    for (int block = all.begin; block < all.end; ++block) {
      if (block >= seen.begin && block < seen.end) continue;
      store_rows(block, work.first_key, [](int, uint32_t (&words)[4]) {
#pragma unroll
        for (uint32_t& word : words) word = 0;
      });
    }
  }

 private:
  // The first key of a warp within its tile.
  CUFLASH_DEVICE static uint32_t own_keys(uint32_t thread) { return thread % 128 / 32 * warp_keys; }

  CUFLASH_DEVICE static void exchange_if(bool condition, uint32_t& a, uint32_t& b) {
    const uint32_t first = condition ? b : a;
    b = condition ? a : b;
    a = first;
  }

  // Calls words_of(row8, words) for every eight rows of a block, and stores the keys that this lane
  // holds of one of these rows.
  template <typename WordsOf>
  CUFLASH_DEVICE void store_rows(int block, int first_key, const WordsOf& words_of) const {
    const Layout& layout = params.dbias_layout;
    const uint32_t thread = ptx::thread_index(), lane = thread % 32;
    const int row = block * Config::block_m + lane / 4;
    const int key = first_key + own_keys(thread) + lane % 4 * lane_keys;
    const int num_rows = params.score.seqlen_q - row, num_keys = params.score.seqlen_k - key;
    uint16_t* to = at(row, key);
    const bool at_once = num_keys >= lane_keys && layout.column == 1 && layout.row % 8 == 0 &&
                         reinterpret_cast<uint64_t>(of_entry) % 16 == 0;
#pragma unroll 4
    for (int row8 = 0; row8 < Config::block_m / 8; ++row8, to += 8 * layout.row) {
      uint32_t words[4];
      words_of(row8, words);
      if (8 * row8 >= num_rows) continue;
      if (at_once) {
        ptx::store_once(to, make_uint4(words[0], words[1], words[2], words[3]));
      } else {
        store_each(to, num_keys, words);
      }
    }
  }

  CUFLASH_DEVICE void store_each(uint16_t* to, int num_keys, const uint32_t (&words)[4]) const {
#pragma unroll
    for (int i = 0; i < lane_keys; ++i, to += params.dbias_layout.column) {
      if (i < num_keys) *to = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
    }
  }
};

// Computes one row of the gradient of a bias again, pair by pair. A non-finite ds makes dq of its
// row non-finite, which is how such rows are found.
__device__ __noinline__ void recompute_dbias(const BackwardParams& params, const BatchIndex entry,
                                             int q_idx) {
  const Score score(params.score, entry);
  const RowSource k_rows(params.k, params.k_layout, entry, 0, params.head_dim);
  const RowSource v_rows(params.v, params.v_layout, entry, 0, params.head_dim_v);
  const ExactRow row(params, entry, q_idx);
  QkColumns q, k;
  VColumns v, dout;
  q.load(RowSource(params.q, params.q_layout, entry, 0, params.head_dim), q_idx);
  dout.load(RowSource(params.dout, params.dout_layout, entry, 0, params.head_dim_v), q_idx);
  const Range keys = score.kv_range(q_idx, q_idx + 1);
#pragma unroll 1
  for (int kv_idx = 0; kv_idx < params.score.seqlen_k; ++kv_idx) {
    const bool sees = row.lse != infinity() && kv_idx >= keys.begin && kv_idx < keys.end;
    Real gradient = 0;
    if (sees && score.sees(q_idx, kv_idx)) {
      k.load(k_rows, kv_idx);
      v.load(v_rows, kv_idx);
      gradient = ExactPair(score, row, q.dot(k), dout.dot(v), q_idx, kv_idx).dscore;
    }
    if (lane_index() == 0) {
      *BiasGradient(params, entry).at(q_idx, kv_idx) =
          static_cast<uint16_t>(pack<Config::dtype>(gradient, 0));
    }
  }
}

}  // namespace cuflash
