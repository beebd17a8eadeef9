// Attention forward of e4m3 operands on Hopper: the roles and the schedule of forward_sm90.cu, with
// 8-bit products.
//
//   - 8-bit products sum only along contiguous elements of both operands. p v sums over keys, so
//     warps 1 to 3 of the producer warpgroup transpose v (sm90/transposer.cuh).
//   - Weights relative to the reference of their row are multiplied by 2^8 and rounded to e4m3.
//   - Tensor cores keep about 14 bits of a sum of e4m3 products. p v of each block is therefore
//     summed separately, and added to o in float32. (D195)
//   - The scales of q and k are part of the score. The scale of v is applied at the end of a row.
//
// out has 16 bits and does not fit into the buffer of q: registers store it to global memory.
#include "sm90/producer.cuh"
#include "sm90/consumer.cuh"
#include "sm90/transposer.cuh"
#include "sm90/rows_outside_sequences.cuh"

namespace cuflash {

constexpr int producer_registers = consumers == 3 ? 32 : 40;  // of each thread
constexpr int consumer_registers = consumers == 3 ? 160 : 232;
static_assert(is_fp8 && !stages_out, "out does not fit into the 8-bit q tile");
static_assert(Score::folds_scale && !Config::dropout,
              "scores are scaled products, without dropout");

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads, 1)
    cuflash_forward_fp8_sm90(const __grid_constant__ cuflash::ForwardSm90Params params) {
  using namespace cuflash;
  SharedMemory& smem = shared_memory<SharedMemory>();
  const int warp = __shfl_sync(0xffffffff, warp_index(), 0);
  Producer producer{params, smem};
  if (warp == 0) producer.find_first_tile();
  if (warp == 1 && lane_index() == 0) init_barriers(smem);
  __syncthreads();  // all mbarriers are initialised
  if (warp < 4) {
    ptx::setmaxnreg_dec<producer_registers>();
    if (warp == 0) {
      producer.run();
    } else {
      if (is_packed && warp == 1) clear_rows_outside_sequences(params);
      transpose_values(params, smem, warp - 1);
    }
  } else {
    ptx::setmaxnreg_inc<consumer_registers>();
    Consumer{{params, smem, warp / 4 - 1}}.run();
  }
}
