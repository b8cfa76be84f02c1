// Blocks that run together, for g++, in the place of include/elman/dense_ptx.cuh: every thread is a fiber. Lanes of a warp meet at each
// collective operation, threads of a block and of a cluster at its barriers. A word of shared memory is at block << 24 | offset.
#pragma once

#include <elman/portable.h>
#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

using std::max;
using std::min;
struct uint4 {
  unsigned x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulated {

constexpr int kThreads = 256, kStack = 64 << 10;
using Words = unsigned[6];

struct Meeting {
  int arrived = 0;
  unsigned generation = 0;
};
struct Counter {  // an mbarrier
  int arrivals, pending;
  long bytes = 0;
  unsigned phase = 0;
  void changed() {
    if (pending == 0 && bytes == 0) phase++, pending = arrivals;
  }
};
struct Warp {
  Meeting meeting;
  Words slots[2][32];
};
struct Block {
  std::vector<char> shared;
  Warp warps[kThreads / 32];
  Meeting meeting;
};
struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStack);
  int block, index;
  unsigned calls = 0;
  bool done = false;
};
inline std::vector<Block> blocks;
inline std::vector<Thread> threads;
inline std::vector<Meeting> clusters;
inline int cluster_blocks;
inline long long clocks;
inline ucontext_t scheduler;
inline Thread* self;
inline unsigned group;
inline std::function<void()> kernel;

inline void yield() { swapcontext(&self->context, &scheduler); }
inline void meet(Meeting& m, int count) {
  const unsigned mine = m.generation;
  if (++m.arrived == count) m.arrived = 0, m.generation++;
  while (m.generation == mine) yield();
}
inline void enter() {
  kernel();
  self->done = true;
  yield();
}
// Groups of `width` blocks (blockIdx.y) one after another; the threads of one in turns, from the first to the last or, if `backwards`,
// from the last to the first. `each`: blocks of a cluster.
inline void launch(int width, int each, int groups, std::size_t bytes, bool backwards, std::function<void()> function) {
  kernel = function, cluster_blocks = each;
  for (group = 0; group < unsigned(groups); ++group) {
    blocks.assign(width, {}), threads.assign(width * kThreads, {}), clusters.assign(width / each, {});
    for (Block& b : blocks) b.shared.assign(bytes, char(0xff));
    for (std::size_t i = 0; i < threads.size(); ++i) {
      Thread& t = threads[i];
      t.block = i / kThreads, t.index = i % kThreads;
      getcontext(&t.context);
      t.context.uc_stack.ss_sp = t.stack.data(), t.context.uc_stack.ss_size = t.stack.size(), t.context.uc_link = nullptr;
      makecontext(&t.context, enter, 0);
    }
    if (backwards) std::reverse(threads.begin(), threads.end());
    for (bool left = true; left;) {
      left = false;
      for (Thread& t : threads)
        if (!t.done) left = true, self = &t, swapcontext(&scheduler, &t.context);
    }
  }
}
inline const Words* exchange(const void* mine, int bytes) {
  Warp& warp = blocks[self->block].warps[self->index / 32];
  Words* slots = warp.slots[self->calls++ % 2];
  std::memcpy(slots[self->index % 32], mine, bytes);
  meet(warp.meeting, 32);
  return slots;
}
inline char* at(unsigned address) { return blocks[address >> 24].shared.data() + (address & 0xffffff); }

struct ThreadIndex {
  struct {
    operator int() const { return self->index; }
  } x;
};
struct BlockIndex {
  struct {
    operator int() const { return self->block; }
  } x;
  struct {
    operator int() const { return group; }
  } y;
};
inline ThreadIndex thread_index;
inline BlockIndex block_index;

}  // namespace emulated

#define threadIdx emulated::thread_index
#define blockIdx emulated::block_index

inline void __syncthreads() { emulated::meet(emulated::blocks[emulated::self->block].meeting, emulated::kThreads); }
inline void __syncwarp() { emulated::exchange("", 1); }
template <class T>
T __shfl_sync(unsigned, T x, int lane) {
  const emulated::Words* all = emulated::exchange(&x, sizeof x);
  std::memcpy(&x, all[lane], sizeof x);
  return x;
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return __shfl_sync(0, x, threadIdx.x % 32 ^ mask);
}
template <class T>
T __shfl_down_sync(unsigned, T x, int by) {
  return __shfl_sync(0, x, min(threadIdx.x % 32 + by, 31));
}
inline bool __any_sync(unsigned, bool x) {
  const emulated::Words* all = emulated::exchange(&x, sizeof x);
  return std::any_of(all, all + 32, [](const emulated::Words& w) { return *reinterpret_cast<const bool*>(w); });
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T x) {
  *p = x;
}
inline long long clock64() { return emulated::clocks += 1000; }
inline unsigned __float_as_uint(float x) {
  unsigned y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline float __uint_as_float(unsigned x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline float __int_as_float(int x) { return __uint_as_float(x); }
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }

struct __nv_bfloat16 {
  unsigned short bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {
    const unsigned y = __float_as_uint(x);
    bits = static_cast<unsigned short>(x != x ? 0x7fff : (y + 0x7fff + ((y >> 16) & 1)) >> 16);
  }
  explicit operator float() const { return __uint_as_float(unsigned(bits) << 16); }
};

namespace elman {

template <class Elem>
struct Storage;
template <>
struct Storage<__nv_bfloat16> {
  static constexpr int per_word = 2;
  using Math = Fast;
  static unsigned pack(const float* x) { return __nv_bfloat16(x[0]).bits | unsigned(__nv_bfloat16(x[1]).bits) << 16; }
  static void unpack(unsigned v, float* x) { x[0] = __uint_as_float(v << 16), x[1] = __uint_as_float(v & 0xffff0000u); }
};
template <>
struct Storage<float> {
  static constexpr int per_word = 1;
  using Math = Exact;
  static unsigned pack(const float* x) { return __float_as_uint(x[0]); }
};

namespace ptx {

template <class Elem>
void mma_16x8x16(float* c, const unsigned* a, unsigned b0, unsigned b1) {
  const unsigned mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const emulated::Words* all = emulated::exchange(mine, sizeof mine);
  const int lane = threadIdx.x % 32;
  auto half = [](unsigned word, int upper) { return __uint_as_float(upper ? word & 0xffff0000u : word << 16); };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double sum = 0;
    for (int k = 0; k < 16; ++k)
      sum += double(half(all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2)) *
             half(all[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
    c[i] += static_cast<float>(sum);
  }
}
inline char* dynamic_shared() { return emulated::blocks[emulated::self->block].shared.data(); }
inline unsigned shared_address(const void* p) {
  return unsigned(emulated::self->block) << 24 | unsigned(static_cast<const char*>(p) - dynamic_shared());
}
inline void store_shared(unsigned to, float v) { std::memcpy(emulated::at(to), &v, 4); }
template <int n>
void store_shared(unsigned to, const float (&v)[n]) {
  std::memcpy(emulated::at(to), v, sizeof v);
}
template <int n>
void load_shared(float (&v)[n], unsigned from) {
  std::memcpy(v, emulated::at(from), sizeof v);
}
inline void load_relaxed(uint4& v, const void* p, unsigned wanted = 1) {
  if (wanted) std::memcpy(&v, p, sizeof v);
}
inline void store_relaxed(void* p, unsigned v) { std::memcpy(p, &v, sizeof v); }
inline void fence() {}
template <class T>
void pin(T&) {}
template <class T>
void hold(T&) {}
inline int first_of_cluster() { return emulated::self->block / emulated::cluster_blocks * emulated::cluster_blocks; }
inline unsigned in_block(unsigned address, int rank) { return (address & 0xffffff) | unsigned(first_of_cluster() + rank) << 24; }
inline emulated::Counter& counter(unsigned barrier) { return **reinterpret_cast<emulated::Counter**>(emulated::at(barrier)); }
inline void barrier_init(unsigned barrier, int arrivals) {
  auto* const made = new emulated::Counter{arrivals, arrivals};
  std::memcpy(emulated::at(barrier), &made, sizeof made);
}
inline void barrier_expect(unsigned barrier, int bytes) {
  auto& c = counter(barrier);
  c.bytes += bytes, c.pending--;
  c.changed();
}
inline void store_async(unsigned to, uint4 v, unsigned barrier) {
  if (to % 16) std::fprintf(stderr, "a piece at %u is not aligned\n", to), std::abort();
  std::memcpy(emulated::at(to), &v, 16);
  auto& c = counter(barrier);
  c.bytes -= 16;
  c.changed();
}
inline bool barrier_passed(unsigned barrier, unsigned parity) {
  const bool passed = counter(barrier).phase % 2 != parity;
  if (!passed) emulated::yield();
  return passed;
}
inline void cluster_sync() {
  emulated::meet(emulated::clusters[first_of_cluster() / emulated::cluster_blocks], emulated::cluster_blocks * emulated::kThreads);
}
inline unsigned long long nanoseconds() { return 0; }

}  // namespace ptx
}  // namespace elman
