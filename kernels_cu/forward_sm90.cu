// Attention forward for Hopper: TMA, warp-specialised wgmma, FlashAttention-3 with K released
// early.
//
//   for each tile of block_m rows of q:                       persistent thread blocks
//     m = -inf, l = 0, o = 0
//     for each block of block_n keys that some row sees, last first:
//       s = q k^T;  s = score(s);  m' = max(m, rowmax s)      64 rows per warpgroup
//       p = exp(s - m');  l = l exp(m - m') + rowsum p;  o = o exp(m - m') + p v
//     out = o / l,  lse = m + log l                         a sink joins m and l here
//
// Warpgroup 0 produces: warp 0 draws tiles and loads, warp 1 stores results, warp 2 clears rows
// that belong to no packed sequence, warps 2 and 3 bring a mask or a bias where these come through
// shared memory. The others consume 64 rows of the tile each; s of a block is multiplied together
// with p v of the block before, so that the softmax runs under p v. m' keeps the old maximum unless
// a row's grew by more than a factor of 2^8. Where keys are split, a thread block has one part of
// one tile. docs/forward-sm90.md draws the schedule.
//
// Shared memory: q[num_q_stages], k[num_stages], v[num_stages], every tile in panels of 64 columns;
// out is staged in q where there are two. The barriers' table is in sm90/shared_memory.cuh.
#include "sm90/producer.cuh"
#include "sm90/look_up_loader.cuh"
#include "sm90/consumer.cuh"
#include "sm90/unowned_rows.cuh"

namespace cuflash {

// Of a thread; their sum over all warpgroups is what the thread block was given at its start.
constexpr int producer_registers = consumers == 2 ? 40 : 32;
constexpr int consumer_registers = consumers == 2 ? 232 : 160;

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads, 1)
    cuflash_forward_sm90(const __grid_constant__ cuflash::ForwardSm90Params params) {
  using namespace cuflash;
  let_combine_start();
  SharedMemory& smem = shared_memory<SharedMemory>();
  const int warp = __shfl_sync(0xffffffff, warp_index(), 0);
  Producer producer{params, smem};
  if (warp == 0) producer.find_first_tile();
  if (warp == 1 && lane_index() == 0) init_barriers(smem);
  if (warp == 2) smem.slopes.write_numbers();
  __syncthreads();  // the barriers are there
  if (warp < 4) {
    ptx::setmaxnreg_dec<producer_registers>();
    if (warp == 0) producer.run();
    if (stages_out && warp == 1) send_tiles(params, smem);
    if (is_packed && warp == 2) clear_unowned_rows(params);
    if (looks_up && warp >= 2) LookUpLoader{params, warp - 2}.run(smem);
  } else {
    ptx::setmaxnreg_inc<consumer_registers>();
    Consumer{params, smem, warp / 4 - 1}.run();
  }
}
