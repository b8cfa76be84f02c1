// A GPU for g++: enough of CUDA's language to run the kernels of elman_csrc on a processor. Every thread is a fiber. Threads of a warp meet at each
// collective operation, threads of a team at each barrier; in between they run one after another. This folder replaces CUDA's own headers if the
// compiler finds it first.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "races.h"

#define __device__
#define __host__
#define __global__
#define __constant__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 threadIdx, blockIdx, gridDim, blockDim;
struct alignas(16) uint4 {  // aligned like CUDA's own
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct CUstream_st;
using cudaStream_t = CUstream_st*;
using cudaError_t = int;
constexpr int cudaSuccess = 0, cudaErrorInvalidConfiguration = 1, cudaErrorMisalignedAddress = 716;
namespace emulated {
inline char fault[256];  // why the kernel was stopped; empty if it was not
}
inline const char* cudaGetErrorString(int error) {
  return error == cudaErrorMisalignedAddress ? emulated::fault : "invalid configuration: a grid or a block larger than a GPU takes";
}
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
inline cudaError_t cudaMalloc(void** p, std::size_t bytes) {  // exactly `bytes`, so that AddressSanitizer sees accesses beyond
  *p = std::malloc(bytes);
  return *p != nullptr ? cudaSuccess : cudaErrorInvalidConfiguration;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int byte, std::size_t bytes, cudaStream_t) {
  std::memset(to, byte, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 132, cudaDevAttrMaxSharedMemoryPerBlockOptin = 227 << 10 };  // an H200's
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute;
  return cudaSuccess;
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributeNonPortableClusterSizeAllowed };
template <class Function>
cudaError_t cudaFuncSetAttribute(Function, cudaFuncAttribute, int) {
  return cudaSuccess;
}
enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension, cudaLaunchAttributeCooperative };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    dim3 clusterDim;
    int cooperative;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
template <class Function>
cudaError_t cudaOccupancyMaxActiveClusters(int* fit, Function, const cudaLaunchConfig_t* config) {
  *fit = cudaDevAttrMultiProcessorCount / config->attrs->val.clusterDim.x;
  return cudaSuccess;
}
template <class Function>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* fit, Function, int, std::size_t) {
  *fit = 1;
  return cudaSuccess;
}

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
struct Copy {  // asynchronous; the last `zeros` bytes are zeros
  void* to;
  const void* from;
  std::size_t bytes, zeros;
  unsigned group;
};
struct Thread {
  ucontext_t context;  // where the fiber begins
  jmp_buf left;  // where it continues
  bool begun = false;
  std::vector<Copy> copies;  // not waited for yet
  unsigned committed = 0;  // groups of copies
  unsigned calls = 0;  // collectives so far: chooses one of the two sets of slots
  bool done = false;
};
struct Block {
  dim3 index;
  int first;  // of its threads, counted over the blocks that run in turns
  unsigned char* shared;
  std::vector<unsigned char> own;  // shared memory, if other blocks run in turns with this one
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier named[17];  // 16: of the whole block
  jmp_buf scheduler;
  int current = 0;
  std::uint64_t progress = 0;
  void (*run)(const void*);
  const void* kernel;  // the argument of `run`
};
inline Block* block = nullptr;
inline std::vector<Block>* together = nullptr;  // the blocks that run in turns
inline std::vector<Barrier> clusters;  // of those blocks
inline int cluster_blocks = 1;
inline long long clocks = 0;
inline std::vector<char*> stacks;  // stacks of threads, reused by the next block
inline bool backwards = false;
// With EMULATED_STALLED=n, each block in turn pauses for n turns of the others, and stores into other blocks take some.
inline unsigned stalled = 0;
inline unsigned long long turn = 0;  // turns of all blocks that run together; a turn is a microsecond
struct Store {
  unsigned long long lands;
  std::function<void()> land;
};
inline std::vector<Store> on_their_way;

[[noreturn]] inline void fail(const char* what) { std::fprintf(stderr, "%s\n", what), std::abort(); }

// Ends the running kernel: its launch returns an error, which says `why`.
[[noreturn]] inline void stop(const char* why) {
  if (block == nullptr) fail(why);
  std::strncpy(fault, why, sizeof fault - 1);
  _longjmp(block->scheduler, 1);
}
// swapcontext would set the signal mask by a system call each time, which takes longer than a thread's work in between.
inline void yield() {
  if (!_setjmp(block->threads[block->current].left)) _longjmp(block->scheduler, 1);
}
inline void go_on(Thread& thread) {
  if (_setjmp(block->scheduler)) return;
  if (thread.begun) _longjmp(thread.left, 1);
  thread.begun = true;
  setcontext(&thread.context);
}
// orders: whether the barrier orders the accesses before it and after it.
inline void arrive(Barrier& b, int count, bool orders) {
  block->progress++;
  if (++b.arrived < count) return;
  b.arrived = 0, b.generation++;
  races::complete(&b, orders);
}
inline void wait(Barrier& b, int count, bool orders = true) {
  const unsigned mine = b.generation;
  races::arrive(&b);
  arrive(b, count, orders);
  while (b.generation == mine) yield();
}
inline void tell(Barrier& b, int count) {  // for threads that signal and continue
  races::tell(&b);
  arrive(b, count, true);
}
// Every lane gives its words and gets those of all lanes. This orders no memory accesses.
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
// Runs a warp as far as it gets without the others, or until it waits for the `most`-th time. Returns whether any is left.
inline bool run_warp(Block& now, int warp, int threads, int most = 1 << 30) {
  for (;;) {
    const auto before = now.progress;
    bool left = false;
    for (int i = warp * 32; i < std::min(threads, warp * 32 + 32); i++) {
      if (now.threads[i].done) continue;
      left = true, now.current = i, threadIdx.x = i;
      races::run(now.first + i);
      go_on(now.threads[i]);
      if (*fault) return false;
    }
    if (!left || now.progress == before || --most == 0) return left;
  }
}
template <class Kernel>
void prepare(Block& made, const dim3& index, int threads, unsigned char* shared, std::size_t bytes, const Kernel& kernel,
             int first = 0) {
  made.index = index, made.first = first, made.shared = shared;
  made.threads.resize(threads), made.warps.resize((threads + 31) / 32);
  made.run = [](const void* it) { (*static_cast<const Kernel*>(it))(); }, made.kernel = &kernel;
  std::memset(shared, 0xff, bytes);  // arbitrary initial contents: NaN
  while (stacks.size() < std::size_t(first + threads)) stacks.push_back(new char[kStack]);
  for (int i = 0; i < threads; i++) {
    ucontext_t& context = made.threads[i].context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks[first + i], context.uc_stack.ss_size = kStack, context.uc_link = nullptr;
    makecontext(&context, enter, 0);
  }
}
// Runs the blocks of a grid one after another. Each warp runs ahead of the later ones as far as barriers allow or, with EMULATED_BACKWARDS, ahead of the
// earlier ones. A missing barrier spoils different data in the two orders.
template <class Kernel>
cudaError_t launch(unsigned blocks, int threads, unsigned char* shared, std::size_t bytes, const Kernel& kernel) {
  backwards = std::getenv("EMULATED_BACKWARDS") != nullptr;
  gridDim = dim3(blocks), blockDim.x = threads, *fault = 0;
  for (unsigned b = 0; b < blocks && !*fault; b++) {
    Block now;
    prepare(now, dim3(b, 0, 0), threads, shared, bytes, kernel);
    block = &now, blockIdx = now.index;
    races::begin(shared, bytes, threads);
    const int warps = static_cast<int>(now.warps.size());
    for (bool left = true; left;) {
      const auto before = now.progress;
      left = false;
      for (int i = 0; i < warps && !*fault; i++) left |= run_warp(now, backwards ? warps - 1 - i : i, threads);
      if (*fault) break;
      if (left && now.progress == before) std::fprintf(stderr, "the threads of block %u wait for each other\n", b), std::abort();
    }
    races::end();
  }
  block = nullptr;
  return *fault ? cudaErrorMisalignedAddress : cudaSuccess;
}
// Runs the blocks of a grid in rows along x, one row after another. The blocks of a row take turns, because they wait for each
// other. each: blocks per cluster.
template <class Kernel>
cudaError_t launch_together(const dim3& grid, int threads, int each, std::size_t bytes, const Kernel& kernel) {
  backwards = std::getenv("EMULATED_BACKWARDS") != nullptr;
  const char* const turns = std::getenv("EMULATED_STALLED");
  stalled = turns ? unsigned(std::atoi(turns)) : 0;
  if (std::max(grid.y, grid.z) > 65535 || threads > 1024 || each > 16 || grid.x % each) return cudaErrorInvalidConfiguration;
  gridDim = grid, blockDim.x = threads, cluster_blocks = each, *fault = 0;
  for (unsigned row = 0; row < grid.y * grid.z && !*fault; row++) {
    std::vector<Block> blocks(grid.x);
    together = &blocks, clusters.assign(grid.x / each, {});
    for (unsigned b = 0; b < grid.x; b++) {
      blocks[b].own.resize(bytes);
      prepare(blocks[b], dim3(b, row % grid.y, row / grid.y), threads, blocks[b].own.data(), bytes, kernel, int(b) * threads);
      races::begin(blocks[b].shared, bytes, threads);
    }
    for (bool left = true; left; turn++) {
      bool moved = stalled;
      left = false;
      auto next = on_their_way.begin();
      while (next != on_their_way.end() && next->lands <= turn) next++->land();
      on_their_way.erase(on_their_way.begin(), next);
      for (unsigned i = 0; i < grid.x; i++) {
        Block& now = blocks[backwards ? grid.x - 1 - i : i];
        if (stalled && turn % (stalled + 1) && turn / (stalled + 1) * 5 % grid.x == now.index.x) {
          left = true;
          continue;
        }
        block = &now, blockIdx = now.index;
        const auto before = now.progress;
        const int warps = static_cast<int>(now.warps.size());
        for (int w = 0; w < warps && !*fault; w++) left |= run_warp(now, backwards ? warps - 1 - w : w, threads, 64);
        moved |= now.progress != before;
      }
      if (*fault) on_their_way.clear(), left = false;
      if (left && !moved) std::fprintf(stderr, "the blocks of row %u wait for each other\n", row), std::abort();
    }
    if (!on_their_way.empty()) fail("a store reaches a block that has left");
    races::end();
  }
  block = nullptr;
  return *fault ? cudaErrorMisalignedAddress : cudaSuccess;
}

}  // namespace emulated

#include "alignment.h"

template <class Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*function)(Args), const Args& g) {
  int each = 1;
  for (unsigned i = 0; i < config->numAttrs; i++)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) each = int(config->attrs[i].val.clusterDim.x);
  return emulated::launch_together(config->gridDim, int(config->blockDim.x), each, config->dynamicSmemBytes, [&] { function(g); });
}

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
inline float __int_as_float(int x) { return __uint_as_float(static_cast<unsigned>(x)); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T x) {
  *p = x;
}
inline long long clock64() { return emulated::clocks += 1000; }
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
  static_assert(sizeof x <= sizeof(emulated::Words));
  std::memcpy(&x, &emulated::exchange(&x, sizeof x)[lane][0], sizeof x);
  return x;
}
template <class T>
T __shfl_down_sync(unsigned, T x, int by) {
  return __shfl_sync(0, x, std::min(emulated::block->current % 32 + by, 31));
}
inline bool __any_sync(unsigned, bool x) { return __ballot_sync(0, x) != 0; }
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return __shfl_sync(0, x, emulated::block->current % 32 ^ mask);
}
