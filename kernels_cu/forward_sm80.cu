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
// Shared memory: the q tile for the whole run; one k and one v buffer, or two stages. v of a block
// arrives while q k^T is computed, k of the next block during p v. Of float32, their TF32 parts.
#include "portable/forward_tile.cuh"

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads,
                                             cuflash::Config::blocks_per_sm)
    cuflash_forward_sm80(const __grid_constant__ cuflash::ForwardParams params) {
  using namespace cuflash;
  WarpSoftmax<slices> softmax;
  Real o_acc[slices][own_columns / 8][4];
  clear(o_acc);
  attend(params, shared_memory<SharedMemory>(), softmax, o_acc);
  store_rows(params, warp_index(), softmax, o_acc);
}
