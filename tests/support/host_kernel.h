// A block of threads on the host, or a cluster of blocks: fibers that take turns, and meet where a
// warp or the whole block has to. Enough of CUDA for the portable kernels; tensor-core instructions
// are in host_ptx.h.
#pragma once

#undef _FORTIFY_SOURCE  // with it _longjmp refuses to leave a stack, and fibers have their own
#include <setjmp.h>
#include <ucontext.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

using std::copysign;
using std::fabs;
using std::fma;
using std::fmax;
using std::log;
using std::tanh;
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename T>
constexpr T min(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __double2loint(double x) { return static_cast<int>(std::bit_cast<uint64_t>(x)); }
inline int __double2hiint(double x) { return static_cast<int>(std::bit_cast<uint64_t>(x) >> 32); }
inline int64_t __double_as_longlong(double x) { return std::bit_cast<int64_t>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline double __hiloint2double(int high, int low) {
  return std::bit_cast<double>(static_cast<uint64_t>(high) << 32 | static_cast<uint32_t>(low));
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline unsigned atomicMax(unsigned* to, unsigned value) {
  const unsigned before = *to;
  *to = before < value ? value : before;
  return before;
}
inline unsigned atomicOr(unsigned* to, unsigned bits) {
  const unsigned before = *to;
  *to |= bits;
  return before;
}
inline int __clz(unsigned x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = a | static_cast<uint64_t>(b) << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<unsigned>(both >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  }
  return result;
}

namespace cuflash {
alignas(1024) unsigned char smem_bytes[256 << 10];
}
using cuflash::smem_bytes;

struct {
  unsigned x;
} static threadIdx, blockIdx, gridDim;

namespace host {
static long copied_bytes = 0;  // of global memory to shared memory, asynchronously

constexpr int max_threads = 1024;
constexpr int max_blocks = 8;  // of a cluster
constexpr int stack_bytes = 512 << 10;

// Where threads meet: the last to arrive lets all go on.
struct Meeting {
  int arrived = 0;
  unsigned generation = 0;
};

struct Slot {
  alignas(16) unsigned char bytes[64];
};

struct Warp {
  Meeting meeting;
  Slot slots[2][32];
};

// A fiber starts with setcontext(). From then on it takes turns by _longjmp(), which makes no
// system call.
struct Fiber {
  ucontext_t start;
  jmp_buf turn;
  bool started, done;
};

static jmp_buf scheduler;
static std::vector<Fiber> fibers(max_blocks * max_threads);  // of all blocks of a cluster
static Warp warps[max_blocks * max_threads / 32];
static Meeting meetings[max_blocks];
static int votes[2][max_blocks * max_threads];
static int num_threads, current;
static unsigned cluster_blocks = 1, arrived_in_cluster;
// What lies in shared memory of each block of a cluster while another runs.
static unsigned char waiting_smem[max_blocks][sizeof smem_bytes];

inline void yield() {
  if (_setjmp(fibers[current].turn) == 0) _longjmp(scheduler, 1);
}

// Lets the current fiber run until it yields or is done.
inline void resume(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.turn, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

inline void meet(Meeting& meeting, int participants) {
  const unsigned generation = meeting.generation;
  if (++meeting.arrived == participants) {
    meeting.arrived = 0;
    ++meeting.generation;
    return;
  }
  while (meeting.generation == generation) yield();
}

inline Warp& warp() { return warps[current / 32]; }
inline unsigned rank() { return current / num_threads; }
inline Meeting& block() { return meetings[rank()]; }

// Shared memory of a block of the cluster.
inline unsigned char* smem_of(unsigned of) { return of == rank() ? smem_bytes : waiting_smem[of]; }

// The values of all lanes of a warp.
template <typename T>
struct Lanes {
  const Slot* slots;

  const T& operator[](int lane) const { return *reinterpret_cast<const T*>(slots[lane].bytes); }
};

// Calls take(lanes) when every lane of the warp has put its value into a slot. Two sets of slots: a
// lane that is ahead fills the other.
template <typename T, typename Take>
inline auto gather(const T& value, const Take& take) {
  static_assert(sizeof(T) <= sizeof(Slot), "a lane puts its value into one slot");
  Warp& own = warp();
  Slot(&slots)[32] = own.slots[own.meeting.generation % 2];
  std::memcpy(slots[current % 32].bytes, &value, sizeof(T));
  meet(own.meeting, 32);
  return take(Lanes<T>{slots});
}

// Runs every cluster of `cluster` blocks, one after the other.
template <typename Kernel>
void run(unsigned blocks, int threads, unsigned cluster, const Kernel& kernel) {
  static const Kernel* running;
  running = &kernel;
  num_threads = threads;
  cluster_blocks = cluster;
  const int all = cluster * threads;
  // Not cleared, and given back: every kernel is a library of its own in one process.
  const std::unique_ptr<unsigned char[]> stacks(
      new unsigned char[static_cast<size_t>(all) * stack_bytes]);
  gridDim.x = blocks;
  for (unsigned first = 0; first < blocks; first += cluster) {
    std::memset(smem_bytes, 0xff, sizeof smem_bytes);  // NaN in every format
    std::memset(waiting_smem, 0xff, sizeof waiting_smem);
    arrived_in_cluster = 0;
    for (int i = 0; i < all; ++i) {
      Fiber& fiber = fibers[i];
      fiber.started = fiber.done = false;
      getcontext(&fiber.start);
      fiber.start.uc_stack.ss_sp = &stacks[static_cast<size_t>(i) * stack_bytes];
      fiber.start.uc_stack.ss_size = stack_bytes;
      fiber.start.uc_link = nullptr;
      makecontext(
          &fiber.start,
          +[] {
            (*running)();
            fibers[current].done = true;
            _longjmp(scheduler, 1);
          },
          0);
    }
    for (bool alive = true; alive;) {
      alive = false;
      for (int i = 0; i < all; ++i) {
        const unsigned of = i / threads;
        if (cluster > 1 && i % threads == 0) {
          std::memcpy(smem_bytes, waiting_smem[of], sizeof smem_bytes);
        }
        if (!fibers[i].done) {
          current = i;
          threadIdx.x = i % threads;
          blockIdx.x = first + of;
          resume(fibers[i]);
          alive |= !fibers[i].done;
        }
        if (cluster > 1 && (i + 1) % threads == 0) {
          std::memcpy(waiting_smem[of], smem_bytes, sizeof smem_bytes);
        }
      }
    }
  }
}

}  // namespace host

// Fibers never run at once: meeting is all that a barrier has to do, whatever memory it is for.
inline void __syncwarp() { host::meet(host::warp().meeting, 32); }
inline void __syncthreads() { host::meet(host::block(), host::num_threads); }  // of any memory
// Everybody's vote is there after the meeting; votes of the next but one come after all have left.
inline int __syncthreads_or(int vote) {
  int* votes = host::votes[host::block().generation % 2];
  votes[host::current] = vote;
  host::meet(host::block(), host::num_threads);
  int any = 0;
  const int first = host::rank() * host::num_threads;
  for (int i = 0; i < host::num_threads; ++i) any |= votes[first + i];
  return any;
}
template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask, int = 32) {
  return host::gather(x, [&](const auto& values) { return values[(host::current % 32) ^ mask]; });
}
template <typename T>
T __shfl_sync(unsigned, T x, int lane, int width = 32) {
  const int first = host::current % 32 & -width;  // lanes count modulo the width, negative ones too
  return host::gather(x, [&](const auto& values) { return values[first + (lane & (width - 1))]; });
}
template <typename T>
T __shfl_up_sync(unsigned, T x, int distance) {
  const int lane = host::current % 32;
  return host::gather(x, [&](const auto& values) { return values[max(lane - distance, 0)]; });
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  return host::gather(vote, [](const auto& votes) {
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(votes[lane]) << lane;
    return bits;
  });
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
