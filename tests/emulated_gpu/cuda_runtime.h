// A GPU for g++: enough of CUDA's language to run the matrix-state kernels of elman_csrc on a processor, one block at a time, every
// thread a fiber. Threads of a warp meet at each collective operation, threads of a team at each barrier; between those they run one
// after another. Found before CUDA's own headers, this folder replaces them.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "races.h"

#define __device__
#define __host__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
struct float2 {
  float x, y;
};
struct uint2 {
  unsigned x, y;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct CUstream_st;
using cudaStream_t = CUstream_st*;
using cudaError_t = int;
constexpr int cudaSuccess = 0, cudaErrorInvalidConfiguration = 1;
inline const char* cudaGetErrorString(int) { return "more shared memory than a block may have"; }
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
inline cudaError_t cudaMalloc(void** p, std::size_t bytes) {  // exactly so many: AddressSanitizer sees what lies beyond
  *p = std::malloc(bytes);
  return *p != nullptr ? cudaSuccess : cudaErrorInvalidConfiguration;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

using std::max;
using std::min;

namespace emulated {

constexpr int kStack = 256 << 10, kWord = 16;
using Words = unsigned[kWord];

struct Barrier {
  int arrived = 0;
  unsigned generation = 0;
};
struct Warp {
  Barrier barrier;
  Words slots[2][32];
};
struct Copy {  // asynchronous; its last `zeros` bytes are zeros
  void* to;
  const void* from;
  std::size_t bytes, zeros;
  unsigned group;
};
struct Thread {
  ucontext_t context;  // where it begins
  jmp_buf left;  // where it goes on
  bool begun = false;
  std::vector<Copy> copies;  // not waited for yet
  unsigned committed = 0;  // groups of them
  unsigned calls = 0;  // collectives so far: which of the two sets of slots is in use
  bool done = false;
};
struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier named[17];  // 16: of the whole block
  jmp_buf scheduler;
  int current = 0;
  std::uint64_t progress = 0;
  void (*run)(const void*);
  const void* kernel;  // what `run` takes
};
inline Block* block = nullptr;
inline std::vector<char*> stacks;  // of threads, used again by the next block
inline bool backwards = false;
inline Dim3 thread_index, block_index, grid_size, block_size;

// swapcontext would ask the system to set the mask of signals each time, which takes longer than what a thread computes meanwhile.
inline void yield() {
  if (!_setjmp(block->threads[block->current].left)) _longjmp(block->scheduler, 1);
}
inline void go_on(Thread& thread) {
  if (_setjmp(block->scheduler)) return;
  if (thread.begun) _longjmp(thread.left, 1);
  thread.begun = true;
  setcontext(&thread.context);
}
// orders: what threads did before it happens before what they do after it.
inline void arrive(Barrier& b, int count, bool orders) {
  block->progress++;
  if (++b.arrived < count) return;
  b.arrived = 0, b.generation++;
  if (orders) races::complete(&b);
}
inline void wait(Barrier& b, int count, bool orders = true) {
  const unsigned mine = b.generation;
  if (orders) races::arrive(&b);
  arrive(b, count, orders);
  while (b.generation == mine) yield();
}
inline void tell(Barrier& b, int count) {  // those who wait, and go on
  races::tell(&b);
  arrive(b, count, true);
}
// Every lane gives its words and sees those of all lanes, which orders no access to memory.
inline const Words* exchange(const void* mine, int bytes) {
  Thread& thread = block->threads[block->current];
  Warp& warp = block->warps[block->current / 32];
  Words* slots = warp.slots[thread.calls++ % 2];
  std::memcpy(slots[block->current % 32], mine, bytes);
  wait(warp.barrier, 32, false);
  return slots;
}
inline void make(const Copy& copy) {
  std::memcpy(copy.to, copy.from, copy.bytes - copy.zeros);
  std::memset(static_cast<char*>(copy.to) + copy.bytes - copy.zeros, 0, copy.zeros);
}
inline void finish_copies(Thread& thread, unsigned groups) {
  auto& copies = thread.copies;
  auto late = copies.begin();
  for (; late != copies.end() && late->group < groups; ++late) {
    races::copy_ends(late->to, late->bytes);
    if (backwards) make(*late);
  }
  copies.erase(copies.begin(), late);
}
inline void enter() {
  block->run(block->kernel);
  finish_copies(block->threads[block->current], ~0u);
  block->threads[block->current].done = true;
  block->progress++;
  yield();
}
// A warp as far as it gets without the others; whether any of it is left.
inline bool run_warp(Block& now, int warp, int threads) {
  for (;;) {
    const auto before = now.progress;
    bool left = false;
    for (int i = warp * 32; i < std::min(threads, warp * 32 + 32); i++) {
      if (now.threads[i].done) continue;
      left = true, now.current = i, thread_index.x = i;
      races::run(i);
      go_on(now.threads[i]);
    }
    if (!left || now.progress == before) return left;
  }
}
// The blocks of a grid, one after another. Each warp runs ahead of the later ones as far as barriers let it, or, with
// EMULATED_BACKWARDS, of the earlier ones: what a barrier too few would spoil differs between the two. Shared memory holds anything at the start: 0xff bytes, which are NaN.
template <class Kernel>
void launch(unsigned blocks, int threads, unsigned char* shared, std::size_t bytes, const Kernel& kernel) {
  backwards = std::getenv("EMULATED_BACKWARDS") != nullptr;
  grid_size.x = blocks, block_size.x = threads;
  for (unsigned b = 0; b < blocks; b++) {
    Block now;
    now.threads.resize(threads), now.warps.resize((threads + 31) / 32);
    now.run = [](const void* it) { (*static_cast<const Kernel*>(it))(); }, now.kernel = &kernel;
    block = &now, block_index.x = b;
    std::memset(shared, 0xff, bytes);
    races::begin(shared, bytes, threads);
    while (stacks.size() < now.threads.size()) stacks.push_back(new char[kStack]);
    for (int i = 0; i < threads; i++) {
      ucontext_t& context = now.threads[i].context;
      getcontext(&context);
      context.uc_stack.ss_sp = stacks[i], context.uc_stack.ss_size = kStack, context.uc_link = nullptr;
      makecontext(&context, enter, 0);
    }
    const int warps = static_cast<int>(now.warps.size());
    for (bool left = true; left;) {
      const auto before = now.progress;
      left = false;
      for (int i = 0; i < warps; i++) left |= run_warp(now, backwards ? warps - 1 - i : i, threads);
      if (left && now.progress == before) std::fprintf(stderr, "the threads of block %u wait for each other\n", b), std::abort();
    }
    races::end();
  }
}

}  // namespace emulated

#define threadIdx emulated::thread_index
#define blockIdx emulated::block_index
#define gridDim emulated::grid_size
#define blockDim emulated::block_size

inline unsigned __float_as_uint(float x) {
  unsigned y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
inline float __uint_as_float(unsigned x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }

inline void __syncwarp() { emulated::wait(emulated::block->warps[emulated::block->current / 32].barrier, 32); }
inline void __syncthreads() { emulated::wait(emulated::block->named[16], static_cast<int>(blockDim.x)); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline unsigned __ballot_sync(unsigned, int yes) {
  const emulated::Words* all = emulated::exchange(&yes, 4);
  unsigned found = 0;
  for (int i = 0; i < 32; i++) found |= unsigned(all[i][0] != 0) << i;
  return found;
}
template <class T>
T __shfl_sync(unsigned, T x, int lane) {
  static_assert(sizeof x == 4);
  std::memcpy(&x, &emulated::exchange(&x, 4)[lane][0], 4);
  return x;
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return __shfl_sync(0, x, emulated::block->current % 32 ^ mask);
}
