// The operations of dense_ptx.cuh, lane by lane. A word of shared memory is at block << 24 | offset.
#pragma once

#include <elman/portable.h>

#include "matrix_state_ptx.cuh"

namespace elman {

template <class Elem>
struct Storage;
template <>
struct Storage<__nv_bfloat16> {
  static constexpr int per_word = 2;
  using Math = Fast;
  static void unpack(unsigned v, float* x) { x[0] = __uint_as_float(v << 16), x[1] = __uint_as_float(v & 0xffff0000u); }
  static unsigned pack(const float* x) { return __float2bfloat16(x[0]).bits | unsigned(__float2bfloat16(x[1]).bits) << 16; }
};
template <>
struct Storage<__half> {
  static constexpr int per_word = 2;
  using Math = Fast;
  static void unpack(unsigned v, float* x) { x[0] = matrix::Half::of(v, 0), x[1] = matrix::Half::of(v, 1); }
  static unsigned pack(const float* x) {
    const __half2 both = __floats2half2_rn(x[0], x[1]);
    unsigned v;
    std::memcpy(&v, &both, 4);
    return v;
  }
};
template <>
struct Storage<float> {
  static constexpr int per_word = 1;
  using Math = Exact;
  static void unpack(unsigned v, float* x) { x[0] = __uint_as_float(v); }
  static unsigned pack(const float* x) {
    const unsigned v = __float_as_uint(x[0]);
    return v == 0xffffffffu ? 0x7fffffffu : v;
  }
};

namespace ptx {

struct Counter {  // an mbarrier
  signed char arrivals, pending;
  unsigned short phase = 0;
  int bytes = 0;
  EMULATED_UNSEEN void changed() {
    if (pending != 0 || bytes != 0) return;
    phase++, pending = arrivals;
    emulated::races::phase_ends(this);
  }
};
static_assert(sizeof(Counter) == 8);

template <class Elem>
void mma_16x8x16(float* c, const unsigned* a, unsigned b0, unsigned b1) {
  matrix::mma_16x8x16<Elem>(*reinterpret_cast<float (*)[4]>(c), *reinterpret_cast<const unsigned (*)[4]>(a), b0, b1);
}
inline char* dynamic_shared() { return reinterpret_cast<char*>(emulated::block->shared); }
inline char* at(unsigned address) {
  return reinterpret_cast<char*>((*emulated::together)[address >> 24].shared) + (address & 0xffffff);
}
inline unsigned shared_address(const void* p) {
  return emulated::block->index.x << 24 | unsigned(static_cast<const char*>(p) - dynamic_shared());
}
inline void store_shared(unsigned to, float v) { std::memcpy(emulated::aligned(at(to), 4), &v, 4); }
template <int n>
void store_shared(unsigned to, const float (&v)[n]) {
  std::memcpy(emulated::aligned(at(to), n == 4 ? 16 : 4), v, sizeof v);
}
template <int n>
void load_shared(float (&v)[n], unsigned from) {
  std::memcpy(v, emulated::aligned(at(from), n == 3 ? 4 : sizeof v), sizeof v);
}
inline void load_relaxed(uint4& v, const void* p, unsigned wanted = 1) {
  if (wanted) std::memcpy(&v, emulated::aligned(p, sizeof v), sizeof v);
}
inline void store_relaxed(void* p, unsigned v) { std::memcpy(emulated::aligned(p, sizeof v), &v, sizeof v); }
inline void fence() {}
template <class T>
void hold(T&) {}
inline unsigned first_of_cluster() { return emulated::block->index.x / emulated::cluster_blocks * emulated::cluster_blocks; }
inline unsigned in_block(unsigned address, int rank) { return (address & 0xffffff) | (first_of_cluster() + rank) << 24; }
inline Counter& counter(unsigned barrier) { return *reinterpret_cast<Counter*>(emulated::aligned(at(barrier), 8)); }
inline EMULATED_UNSEEN void barrier_init(unsigned barrier, int arrivals) {
  emulated::races::init(at(barrier));
  counter(barrier) = {static_cast<signed char>(arrivals), static_cast<signed char>(arrivals)};
}
inline EMULATED_UNSEEN void barrier_expect(unsigned barrier, int bytes) {
  emulated::races::arm(at(barrier));
  Counter& c = counter(barrier);
  if (c.pending == 0) emulated::fail("a barrier is armed twice");
  c.bytes += bytes, c.pending--;
  c.changed();
  emulated::block->progress++;
}
inline EMULATED_UNSEEN void store_async(unsigned to, uint4 v, unsigned barrier) {
  emulated::races::send(emulated::aligned(at(to), 16), 16, at(barrier));
  const auto land = [=]() EMULATED_UNSEEN {
    emulated::Block& there = (*emulated::together)[to >> 24];
    if (std::all_of(there.threads.begin(), there.threads.end(), [](const auto& thread) { return thread.done; }))
      emulated::fail("a store reaches a block that has left");
    std::memcpy(at(to), &v, 16);
    Counter& c = counter(barrier);
    c.bytes -= 16;
    if (c.bytes < -(1 << 20)) emulated::fail("a barrier counts more bytes than it can");
    c.changed();
    there.progress++;
  };
  emulated::block->progress++;
  if (emulated::stalled) emulated::on_their_way.push_back({emulated::turn + 5, land});
  else land();
}
inline EMULATED_UNSEEN bool barrier_passed(unsigned barrier, unsigned parity) {
  const bool passed = counter(barrier).phase % 2 != parity;
  if (passed) emulated::races::pass(at(barrier)), emulated::block->progress++;
  else emulated::yield();
  return passed;
}
inline void cluster_sync() {
  const unsigned each = emulated::cluster_blocks;
  emulated::wait(emulated::clusters[emulated::block->index.x / each], int(each * blockDim.x));
}
inline unsigned long long nanoseconds() {
  emulated::block->progress++;
  emulated::yield();
  return emulated::turn * 1000;
}

}  // namespace ptx
}  // namespace elman
