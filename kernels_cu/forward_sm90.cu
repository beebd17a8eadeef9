// Attention forward for Hopper: TMA and warp-specialised wgmma. FlashAttention-3, but buffers of k
// are released early.
//
//   for each tile of block_m rows of q:                       persistent thread blocks
//     m = -inf, l = 0, o = 0
//     for each block of block_n keys that some row sees, last first:
//       s = q k^T;  s = score(s);  m' = max(m, rowmax s)      64 rows per warpgroup
//       p = exp(s - m');  l = l exp(m - m') + rowsum p;  o = o exp(m - m') + p v
//     out = o / l,  lse = m + log l                         a sink joins m and l here
//
// Warpgroup 0 is the producer. Warp 0 draws tiles and loads. Warp 1 stores results. Warp 2 clears
// rows that belong to no packed sequence. Warps 2 and 3 load a mask or a bias, if these go through
// shared memory. The other warpgroups are consumers, with 64 rows of the tile each. A consumer
// starts s of a block together with p v of the previous block, so that the softmax runs while p v
// is in flight. m' keeps the old maximum of a row unless the maximum grew by more than a factor of
// 2^8. If keys are split, a thread block computes one part of one tile. docs/forward-sm90.md draws
// the schedule.
//
// Shared memory: q[num_q_stages], k[num_stages] and v[num_stages], each tile in panels of 64
// columns. out is staged in q if there are two buffers of q. sm90/shared_memory.cuh lists the
// mbarriers.
#include "sm90/producer.cuh"
#include "sm90/look_up_loader.cuh"
#include "sm90/consumer.cuh"
#include "sm90/rows_outside_sequences.cuh"

namespace cuflash {

// Registers of each thread. Summed over all warpgroups they equal what the block got at launch.
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
  __syncthreads();  // all mbarriers are initialised
  if (warp < 4) {
    ptx::setmaxnreg_dec<producer_registers>();
    if (warp == 0) producer.run();
    if (stages_out && warp == 1) send_tiles(params, smem);
    if (is_packed && warp == 2) clear_rows_outside_sequences(params);
    if (looks_up && warp >= 2) LookUpLoader{params, warp - 2}.run(smem);
  } else {
    ptx::setmaxnreg_inc<consumer_registers>();
    Consumer{{params, smem, warp / 4 - 1}}.run();
  }
}
