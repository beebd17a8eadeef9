// One warp multiplies matrices of small integers through the tiles, readers and fragments that the
// kernels use: s = a b^T and o = (s as an operand) v, stored where fragment.cuh says they belong.
#include "config.cuh"
#include "params.cuh"
#include "numeric.cuh"
#include "tile/fragment.cuh"
#include "tile/load.cuh"
#include "tile/matmul_sm80.cuh"

namespace cuflash {

constexpr int slices = Config::block_m / 16;

struct SharedMemory {
  SmemTile<Config::block_m, Config::head_dim> a;
  SmemTile<Config::block_n, Config::head_dim> b;
  SmemTile<Config::block_n, Config::head_dim_v> v;
};

struct ProbeParams {
  const void* a;
  const void* b;
  const void* v;
  float* s;
  float* o;
  int32_t columns;  // true widths; the rest of a tile is zero
  int32_t columns_v;
  int32_t first_valid;  // rows of b and v outside are zero
  int32_t last_valid;
};

template <int tiles>
__device__ void store(float* to, const float (&acc)[slices][tiles][4]) {
  for (int s = 0; s < slices; ++s) {
    for (int t = 0; t < tiles; ++t) {
      for (int i = 0; i < 4; ++i) {
        to[fragment_row(s, i) * 8 * tiles + fragment_column(t, i)] = acc[s][t][i];
      }
    }
  }
}

}  // namespace cuflash

extern "C" __global__ void probe(const cuflash::ProbeParams params) {
  using namespace cuflash;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  SharedMemory& smem = *reinterpret_cast<SharedMemory*>(smem_bytes);
  const BatchAxes axes{0, {1, 1, 1, 1, 1, 1}};
  const BatchIndex entry(axes, 0);
  const Layout rows{{}, params.columns, 1};
  const Layout rows_v{{}, params.columns_v, 1};
  const Range valid{params.first_valid, params.last_valid};
  load_tile(smem.a, RowSource(params.a, rows, entry, 0, params.columns), 0, {0, Config::block_m});
  load_tile(smem.b, RowSource(params.b, rows, entry, 0, params.columns), 0, valid);
  load_tile(smem.v, RowSource(params.v, rows_v, entry, 0, params.columns_v), 0, valid);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();  // a, b and v are complete

  float s_acc[slices][Config::block_n / 8][4];
  float o_acc[slices][Config::head_dim_v / 8][4];
  Register s_frag[slices][Config::block_n / 16][operand_registers];
  clear(s_acc);
  clear(o_acc);
  multiply_transposed(s_acc, read_rows(smem.a), read_columns(smem.b));
  to_operand(s_frag, s_acc);
  multiply(o_acc, s_frag, read_sums(smem.v));
  store(params.s, s_acc);
  store(params.o, o_acc);
}
