// Draws a class from logits: penalty, temperature, top-k, top-p, and a race of exponentials. One block per row, several threads
// per class. The place of a class is the number of classes before it; top-k and top-p use the scores in this order.
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
  float best[32];
  int index[32], wrong;
};

// Returns the number of classes before `mine`: the more likely ones, and of equal ones the later. Each thread counts a part.
template <int parts>
__device__ __forceinline__ int place_of(const float* scores, float score, int mine) {
  int place = 0;
#pragma unroll 4
  for (int j = threadIdx.x % parts * 4; j < kMostClasses; j += 4 * parts) {
    const float4 v = *reinterpret_cast<const float4*>(scores + j);
    if (j > mine) {
      place += (v.x >= score) + (v.y >= score) + (v.z >= score) + (v.w >= score);
    } else {
      place += (v.x > score) + (v.y > score) + (v.z > score) + (v.w > score);
      if (mine - j < 4) place += (mine < j + 1 && v.y == score) + (mine < j + 2 && v.z == score) + (mine < j + 3 && v.w == score);
    }
  }
#pragma unroll
  for (int by = 1; by < parts; by *= 2) place += __shfl_xor_sync(0xffffffffu, place, by);
  return place;
}
// to[i] = x[i] + x[i + 1] + … by one warp.
__device__ __forceinline__ void sums_to_end(const float* x, float* to) {
  constexpr int each = kMostClasses / 32;
  const int lane = threadIdx.x % 32;
  float own[each], sum = 0.f, behind = 0.f;
#pragma unroll
  for (int i = each - 1; i >= 0; --i) own[i] = sum += x[lane * each + i];
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, sum, by);
    if ((lane & by) == 0) behind += other;
    sum += other;
  }
#pragma unroll
  for (int i = 0; i < each; ++i) to[lane * each + i] = own[i] + behind;
}

// Returns the drawn class to all threads of a block of parts * kMostClasses; a thread's class is threadIdx.x / parts. For
// non-finite logits it sets `shared.wrong` and returns class 0.
template <int parts, class Settings>
__device__ __forceinline__ int drawn_class(const Settings& g, DrawShared& shared, float score, float wait, bool had) {
  constexpr int warps = parts * kMostClasses / 32;
  const int mine = threadIdx.x / parts;
  const bool inside = mine < g.classes, writes = threadIdx.x % parts == 0;
  if (threadIdx.x == 0) shared.wrong = 0;
  __syncthreads();
  if (inside && !(fabsf(score) < INFINITY)) shared.wrong = 1;
  if (had) score = score < 0.f ? score * g.penalty : score / g.penalty;
  if (g.temperature > 0.f) score /= g.temperature;
  if (writes) shared.score[mine] = score;
  __syncthreads();

  float value = score;
  if (g.temperature > 0.f) {
    const int place = place_of<parts>(shared.score, score, mine);
    if (writes) shared.share[place] = score;
    __syncthreads();
    const bool kept = g.top_k <= 0 || g.top_k > kMostClasses || score >= shared.share[g.top_k - 1];
    float share = kept ? expf(score - shared.share[0]) : 0.f;
    if (g.below >= 0.f) {
      if (writes) shared.score[place] = share;
      __syncthreads();
      if (threadIdx.x < 32) sums_to_end(shared.score, shared.share);
      __syncthreads();
      if (place > 0 && shared.share[place] / shared.share[0] <= g.below) share = 0.f;  // the most likely class always stays
    }
    value = share > 0.f ? share / wait : 0.f;
  }

  int best = mine;  // the first of the largest values
  const auto compare = [&](int by) {
    const float other = __shfl_xor_sync(0xffffffffu, value, by);
    const int there = __shfl_xor_sync(0xffffffffu, best, by);
    if (other > value || (other == value && there < best)) value = other, best = there;
  };
#pragma unroll
  for (int by = parts; by < 32; by *= 2) compare(by);
  if (threadIdx.x % 32 == 0) shared.best[threadIdx.x / 32] = value, shared.index[threadIdx.x / 32] = best;
  __syncthreads();
  value = shared.best[threadIdx.x % warps], best = shared.index[threadIdx.x % warps];
#pragma unroll
  for (int by = 1; by < warps; by *= 2) compare(by);
  return shared.wrong ? 0 : best;
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
  if (drawn_class<kParts>(g, shared, score, wait, had) != mine || threadIdx.x % kParts != 0) return;
  g.drawn[row] = mine;
  g.shown[row] = shared.wrong ? -1 : mine;
  if (g.penalty != 1.f) g.seen[at] = 1;
}

}  // namespace elman::decode
