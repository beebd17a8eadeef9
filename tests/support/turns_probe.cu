// Clears the turns of one thread block of a grid, on the host.
#include "backward_delta.cu"

extern "C" void clear(const cuflash::DeltaParams* params, unsigned blocks, unsigned block) {
  gridDim.x = blocks, blockIdx.x = block;
  for (unsigned thread = 0; thread < cuflash::Config::num_threads; ++thread) {
    threadIdx.x = thread;
    cuflash::clear_turns(*params);
  }
}
