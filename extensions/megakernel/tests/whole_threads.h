// For test_megakernel_threads.py, which puts it in the place of elman/whole.cuh: the functions that a program calls, for one
// thread after another. They compute nothing, and note which thread of which block reads and writes which number between two
// barriers.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <unordered_map>
#include <utility>

#define __device__
#define __forceinline__

constexpr int kOperands = 16, kWarps = 15, kThreads = 32 * kWarps;

enum Space { kMemory, kNow, kNext, kStates, kConstants };
constexpr const char* kNames[] = {"memory", "now", "next", "states", "constants"};
struct Seen {
  int writer = -1, reader = -1;  // threads; -2: several
};
inline int sizes[5], blocks, block, thread, barriers, skipped, met, faults;
inline bool row_of_warp;  // lanes of a warp meet between its rows, so its states are the warp's
inline std::unordered_map<long long, Seen> touched;  // by barriers so far, space and place
inline std::unordered_map<int, std::pair<int, bool>> owners;  // of states: the block, whether it writes

inline void fault(const char* what, Space space, int at) {
  if (faults++ == 0)
    std::printf("%s: %s[%d], thread %d of block %d, after %d barriers\n", what, kNames[space], at, thread, block, barriers);
}
// A number, for which the program may take either side of a condition.
inline float touch(Space space, int at, bool writes) {
  static unsigned random = 1;
  random = random * 1664525u + 1013904223u;
  if (at < 0 || at >= sizes[space]) fault("outside", space, at);
  if (space == kConstants) return static_cast<float>(random >> 31);
  const int me = row_of_warp && space == kStates ? thread / 32 * 32 : thread;
  Seen& seen = touched[(barriers * 8LL + space) << 32 | at];
  if (seen.writer >= 0 && seen.writer != me) fault(writes ? "written twice" : "read before a barrier", space, at);
  if (writes && seen.reader != -1 && seen.reader != me) fault("written before a barrier", space, at);
  if (writes) seen.writer = me;
  else seen.reader = seen.reader == -1 || seen.reader == me ? me : -2;
  if (space == kStates) {
    auto& [owner, wrote] = owners.try_emplace(at, block, writes).first->second;
    if (owner != block && (wrote || writes)) fault("of two blocks", space, at);
    wrote |= writes;
  }
  return static_cast<float>(random >> 31);
}
struct Numbers {
  Space space;
  int from = 0;
  Numbers operator+(int i) const { return {space, from + i}; }
  float operator[](int i) const { return touch(space, from + i, false); }
  void put(int i) const { touch(space, from + i, true); }
};
inline float sigmoid(float x) { return x; }
inline float softplus(float x) { return x; }
inline float rsqrtf(float x) { return x; }
inline int within(int i, int size) { return i < 0 ? 0 : i < size ? i : size - 1; }
inline int part(long long count, int of) { return static_cast<int>(count * of / blocks); }

struct Block {
  const Numbers constants{kConstants}, memory{kMemory}, states{kStates}, now{kNow}, next{kNext};
  const int warp = thread / 32, lane = thread % 32;

  void meet() { barriers += met++ != skipped; }
  float embedding(int) const { return 1.f; }
  void keep(int at, float) const {
    if (lane == 0) states.put(at);
  }
  template <int count, class F>
  void each(Numbers to, F&& f) {
    for (int i = thread; i < count; i += kThreads) f(i), to.put(i);
  }
  template <int count, int over, bool most, class F>
  float total(Numbers to, F&& f) {
    const bool together = count == 1 ? over > 64 : count < kWarps / 2 && over > 512;
    if (over <= 16) {
      for (int o = thread; o < count; o += kThreads) {
        for (int k = 0; k < over; ++k) f(o, k);
        to.put(o);
      }
    } else if (!together) {
      for (int o = warp; o < count; o += kWarps) {
        for (int k = lane; k < over; k += 32) f(o, k);
        if (lane == 0) to.put(o);
      }
    } else {
      for (int o = 0; o < count; ++o)
        for (int k = thread; k < over; k += kThreads) f(o, k);
      meet();
      if (thread < count) to.put(thread);
    }
    return 1.f;
  }
  // f(o, k) for this thread's share of a large state
  template <int width, class F>
  void share(int count, int over, F&& f) {
    const int units = (count + width - 1) / width, end = part(units, block + 1), step = width == 1 ? 32 : kThreads / width;
    for (int unit = part(units, block) + (width == 1 ? warp : 0); unit < end; unit += width == 1 ? kWarps : 1)
      if (const int o = unit * width + thread % width; o < count)
        for (int k = width == 1 ? lane : thread / width; k < over; k += step) f(o, k);
  }
  template <int width, class F>
  void columns(int count, int over, int, F&& f) {
    share<width>(count, over, f);
  }
  template <int width, class At, class F>
  void update(int count, int over, At&& place, F&& f) {
    share<width>(count, over, [&](int o, int k) { f(o, k), states.put(place(o, k)); });
  }
  template <class P>
  void product(const int* job, const int* n) {
    const int end = part(job[0], block + 1);
    for (int row = part(job[0], block) + warp; row < end; row += kWarps) {
      const int x = job[2] + (job[5] < job[0] ? row / job[5] * job[1] : 0);
      for (int k = lane; k < job[1] * job[4]; k += 32) memory[x + k];
      float operands[kOperands] = {};
      row_of_warp = true;
      P::operands(*this, n, row, 1, operands);
      P::made(*this, n, row, 1, operands, 1.f);
      row_of_warp = false;
    }
  }
};

// One step. skip: a barrier that threads pass without waiting.
template <class P>
int run(int blocks_, int constants, int states, int skip) {
  const auto& t = P::tables();
  blocks = blocks_, skipped = skip;
  sizes[kMemory] = P::floats, sizes[kNow] = sizes[kNext] = P::small, sizes[kStates] = states, sizes[kConstants] = constants;
  for (block = 0; block < blocks; ++block, touched.clear())
    for (thread = 0; thread < kThreads; ++thread) {
      Block b;
      const int before = met;
      barriers = met = 0;
      for (int half = 0, job = 0; half < 2 * P::phases; ++half) {
        P::part(b, 1, t.numbers[half]);
        const int* const phase = t.phase[half / 2];
        if (half % 2 == 0)
          for (; job < phase[0]; ++job) b.product<P>(t.job[job], t.ends[job]);
        else
          for (int i = thread; i < phase[2]; i += kThreads) b.memory.put(phase[3] + i);
      }
      if (block + thread > 0 && met != before) fault("other barriers than of the thread before", kMemory, met);
    }
  std::printf("%d barriers\n", met);
  return faults > 0;
}
