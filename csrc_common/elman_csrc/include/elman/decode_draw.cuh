// Draws a class from logits: penalty, temperature, top-k, top-p, and a race of exponentials. One block per row, four threads per class. Nothing is sorted:
// whether a class is among the k most likely, how much probability lies at or below it and whether it wins are counts and sums over all classes. A thread
// takes a quarter of the classes, the same quarter for every class, so all threads find the same sum.
#pragma once

#include <elman/decode_ptx.cuh>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace elman::decode {

constexpr int kMostClasses = 256, kParts = 4, kDrawThreads = kMostClasses * kParts;

template <class Elem>
struct DrawArgs {
  const Elem* logits;
  const float* waits;
  unsigned char* seen;
  std::int64_t *drawn, *shown;
  std::ptrdiff_t step;
  int classes, top_k;
  float penalty, temperature, below;
};

struct DrawShared {
  alignas(16) float score[kMostClasses], share[kMostClasses];
  int wrong;
};

// Calls act(j, value) for one of `parts` shares of all classes, four per load.
template <int parts, class Act>
__device__ __forceinline__ void each_class(const float* values, Act&& act) {
#pragma unroll 4
  for (int j = threadIdx.x % parts * 4; j < kMostClasses; j += 4 * parts) {
    const float4 v = *reinterpret_cast<const float4*>(values + j);
    act(j, v.x), act(j + 1, v.y), act(j + 2, v.z), act(j + 3, v.w);
  }
}
// Sum of the shares. Counts are floats because they are small.
template <int parts>
__device__ __forceinline__ float together(float x) {
#pragma unroll
  for (int by = 1; by < parts; by *= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
  return x;
}
template <int parts>
__device__ __forceinline__ float largest(float x) {
#pragma unroll
  for (int by = 1; by < parts; by *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, by));
  return x;
}

// Whether this thread's class, threadIdx.x / parts, is drawn, true for one thread of a block of parts * kMostClasses. With logits that are not finite,
// `shared.wrong` is set after it and class 0 is drawn.
template <int parts, class Settings>
__device__ __forceinline__ bool wins(const Settings& g, DrawShared& shared, float score, float wait, bool had) {
  const int mine = threadIdx.x / parts;
  const bool inside = mine < g.classes, writes = threadIdx.x % parts == 0;
  if (threadIdx.x == 0) shared.wrong = 0;
  __syncthreads();
  if (inside && !(fabsf(score) < INFINITY)) shared.wrong = 1;
  if (had) score = score < 0.f ? score * g.penalty : score / g.penalty;
  if (g.temperature > 0.f) score /= g.temperature;
  if (writes) shared.score[mine] = score;
  __syncthreads();

  float most = -INFINITY, above = 0.f, before = 0.f, behind = 0.f;  // before, behind: equal ones on either side
  each_class<parts>(shared.score, [&](int j, float v) {
    most = fmaxf(most, v);
    above += v > score ? 1.f : 0.f;
    before += v == score && j < mine ? 1.f : 0.f;
    behind += v == score && j > mine ? 1.f : 0.f;
  });
  most = largest<parts>(most), above = together<parts>(above), before = together<parts>(before), behind = together<parts>(behind);
  if (g.temperature > 0.f) {
    float share = g.top_k > 0 && above >= g.top_k ? 0.f : expf(score - most);
    if (writes) shared.share[mine] = share;
    __syncthreads();
    float all = 0.f, upto = 0.f;
    each_class<parts>(shared.share, [&](int, float v) { all += v; });
    all = together<parts>(all);
    if (g.below >= 0.f) {
      each_class<parts>(shared.score,
                        [&](int j, float v) { upto += v < score || (v == score && j <= mine) ? shared.share[j] : 0.f; });
      if (together<parts>(upto) / all <= g.below && above + behind > 0.f) share = 0.f;  // the most likely always stays
      __syncthreads();
      if (writes) shared.share[mine] = share;
      __syncthreads();
      all = 0.f;
      each_class<parts>(shared.share, [&](int, float v) { all += v; });
      all = together<parts>(all);
    }
    share = share / all / wait;
    __syncthreads();
    if (writes) shared.share[mine] = share;
    __syncthreads();
    above = before = 0.f;
    each_class<parts>(shared.share, [&](int j, float v) {
      above += v > share ? 1.f : 0.f;
      before += v == share && j < mine ? 1.f : 0.f;
    });
    above = together<parts>(above), before = together<parts>(before);
  }
  return writes && (shared.wrong ? mine == 0 : inside && above + before == 0.f);
}

template <class Elem>
__device__ __forceinline__ void draw_block(const DrawArgs<Elem>& g, DrawShared& shared) {
  const int mine = threadIdx.x / kParts;
  const bool inside = mine < g.classes;
  const std::ptrdiff_t row = blockIdx.x, at = row * g.classes + mine;
  let_next_begin();
  wait_for_previous();
  const float score = inside ? load_fresh(g.logits + row * g.step + mine) : -INFINITY;
  const float wait = inside && g.temperature > 0.f ? load_fresh(g.waits + at) : 1.f;
  const bool had = g.penalty != 1.f && inside && load_fresh(g.seen + at);
  if (!wins<kParts>(g, shared, score, wait, had)) return;
  g.drawn[row] = mine;
  g.shown[row] = shared.wrong ? -1 : mine;
  if (g.penalty != 1.f) g.seen[at] = 1;
}

}  // namespace elman::decode
