// From logits to the class drawn: penalty, temperature, top-k, top-p, and a race of exponentials, a block for each row, a thread for
// each class. Nothing is sorted: whether a class is among the k most likely, how much lies at or below it and whether it wins are
// counts and sums over all classes, which every thread reads from shared memory together, in one order.
#pragma once

#include <elman/few_rows_ptx.cuh>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace elman::few {

constexpr int kMostClasses = 256;

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

// act(j, value) for all, four to a load.
template <class Act>
__device__ __forceinline__ void each_class(const float* values, Act&& act) {
#pragma unroll 8
  for (int j = 0; j < kMostClasses; j += 4) {
    const float4 v = *reinterpret_cast<const float4*>(values + j);
    act(j, v.x), act(j + 1, v.y), act(j + 2, v.z), act(j + 3, v.w);
  }
}

template <class Elem>
__device__ __forceinline__ void draw_block(const DrawArgs<Elem>& g, DrawShared& shared) {
  const int mine = threadIdx.x;
  const bool inside = mine < g.classes;
  const std::ptrdiff_t row = blockIdx.x, at = row * g.classes + mine;
  let_next_begin();
  wait_for_previous();
  float score = inside ? load_fresh(g.logits + row * g.step + mine) : -INFINITY;
  const float wait = inside && g.temperature > 0.f ? load_fresh(g.waits + at) : 1.f;
  if (mine == 0) shared.wrong = 0;
  __syncthreads();
  if (inside && !(fabsf(score) < INFINITY)) shared.wrong = 1;
  if (g.penalty != 1.f && inside && load_fresh(g.seen + at)) score = score < 0.f ? score * g.penalty : score / g.penalty;
  if (g.temperature > 0.f) score /= g.temperature;
  shared.score[mine] = score;
  __syncthreads();

  float most = -INFINITY, share = score;
  int above = 0, equal_behind = 0;
  each_class(shared.score, [&](int j, float v) {
    most = fmaxf(most, v);
    above += v > score;
    equal_behind += v == score && j > mine;
  });
  if (g.temperature > 0.f) {
    share = g.top_k > 0 && above >= g.top_k ? 0.f : expf(score - most);
    if (g.below >= 0.f) {
      shared.share[mine] = share;
      __syncthreads();
      float all = 0.f, upto = 0.f;
      each_class(shared.share, [&](int j, float v) {
        const float other = shared.score[j];
        all += v;
        upto += other < score || (other == score && j <= mine) ? v : 0.f;
      });
      if (upto / all <= g.below && above + equal_behind > 0) share = 0.f;  // the most likely always stays
      __syncthreads();
    }
    shared.share[mine] = share;
    __syncthreads();
    float all = 0.f;
    each_class(shared.share, [&](int, float v) { all += v; });
    share = share / all / wait;
    __syncthreads();
    shared.share[mine] = share;
    __syncthreads();
    above = 0;
    int equal_before = 0;
    each_class(shared.share, [&](int j, float v) {
      above += v > share;
      equal_before += v == share && j < mine;
    });
    above += equal_before;
  } else {
    int equal_before = 0;
    each_class(shared.score, [&](int j, float v) { equal_before += v == score && j < mine; });
    above += equal_before;
  }
  const bool wrong = shared.wrong;
  if (wrong ? mine != 0 : !inside || above > 0) return;
  g.drawn[row] = mine;
  g.shown[row] = wrong ? -1 : mine;
  if (g.penalty != 1.f) g.seen[at] = 1;
}

}  // namespace elman::few
