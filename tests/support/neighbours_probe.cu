// A kernel like those that CuPy generates: each thread gets pointers to its elements. Python
// replaces the words in capitals.
struct bfloat16 {
  unsigned short bits;
  bfloat16() = default;
  explicit __device__ bfloat16(float x)
      : bits((__float_as_uint(x) + 0x7fff + (__float_as_uint(x) >> 16 & 1)) >> 16) {}
};
TYPES;

extern "C" __global__ void probe(PLACES) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  BODY;
}
