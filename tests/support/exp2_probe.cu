// Evaluates 2^x in float64 with the table in memory and in a warp's registers, and 2^(x * factor -
// reference) with the table in registers.
#include "score/exp64.cuh"

namespace cuflash {

// Arrays have `count` elements, and a thread block has whole warps.
struct Exp2Probe {
  const double* x;
  double* by_memory;
  double* by_lanes;
  double* of_products;
  double factor, reference;
  int count;
};

}  // namespace cuflash

extern "C" __global__ void probe(const cuflash::Exp2Probe probed) {
  const cuflash::LanePowers lanes(threadIdx.x % 32);
  const int warps = probed.count / 32;
  for (int warp = threadIdx.x / 32; warp < warps; ++warp) {
    const int at = 32 * warp + threadIdx.x % 32;
    probed.by_memory[at] = cuflash::exp2_float64(probed.x[at], cuflash::MemoryPowers());
    probed.by_lanes[at] = cuflash::exp2_float64(probed.x[at], lanes);
    probed.of_products[at] = cuflash::exp2_of_product(probed.x[at], probed.factor,
                                                      cuflash::to_32nds - probed.reference, lanes);
  }
}
