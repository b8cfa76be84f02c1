// A matrix state whose rows share one matrix. For every head, with a state S [K,V] and W [V,V],
//
//   Z_t = tanh(S_{t-1} W + k_t v_t^T)      S_t = f_t S_{t-1} + (1 - f_t) Z_t      o_t = S_t^T q_t
//
// and, walking back, with dS arriving from step t+1 and do given,
//
//   dS += q do^T    dq = S_t do    df = <dS, S_{t-1} - Z>    P = (1 - f) dS (1 - Z^2)
//   dk = P v        dv = P^T k     dW += S_{t-1}^T P         dS_{t-1} = f dS + P W^T
//
// Rows of S never meet, so they are the rows of a tensor core's tile. One warp has a head of one row of the batch for all time, with S, W, W^T
// and the sum dW in registers: an accumulator of one product, packed, is the left operand of the next, and nothing crosses lanes.
// Operands are bf16 in parts, x = hi + lo: two parts of S and P carry 16 digits, W has as many parts as its storage needs.
// Every 16 steps the state is saved in fp32; the backward replays a segment into shared memory, as the operands that it will want.
#pragma once

#include "rows_parts.cuh"

namespace elman::rows {

// S = f S + (1 - f) Z, where S comes in parts, too.
template <class P, int parts>
__device__ __forceinline__ void step(Tile<P>& s, const Operand<parts> (&a)[P::C], const Weights<P>& w, const float (&k)[2],
                                     const float (&v)[P::N][2], float f) {
  Tile<P> z;
  outer<P>(z, k, v);
#pragma unroll
  for (int c = 0; c < P::C; c++) multiply(z, a[c], w.b[c]);
#pragma unroll
  for (int n = 0; n < P::N; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) s[n][e] = f * s[n][e] + (1 - f) * Fast::tanh(z[n][e]);
}

// Step i of a segment. use(m, before): after it, of 16 rows, with what they were before it, in parts.
template <class P, class Inputs, class Use>
__device__ __forceinline__ void advance(Tile<P> (&s)[P::M], const Inputs& in, const Marks& marks, const Weights<P>& w, int i,
                                        Lane at, Use use) {
  float v[P::N][2];
  columns<P>(v, in.v[i], at);
  if (marks.begins[i]) load<P>(s, nullptr, at);
#pragma unroll
  for (int m = 0; m < P::M; m++) {
    float k[2];
    rows_of<P>(k, in.k[i], m, at);
    Operand<kParts> before[P::C];
#pragma unroll
    for (int c = 0; c < P::C; c++) split(before[c], s[m], c);
    step<P>(s[m], before, w, k, v, marks.f[i]);
    use(m, before);
  }
}

template <class P>
__device__ void forward(const Args<typename P::Elem>& a, Shared<P, false>& x) {
  const Lane at;
  const Place<P> place(a);
  const int segments = (a.T + kSteps - 1) / kSteps;
  Tile<P> s[P::M];
  Weights<P> w;
  load<P>(s, a.s0 ? a.s0 + place.bh * P::K * P::V : nullptr, at);
  w.load(a.w + place.h * P::V * P::V, false, at);
  fetch(x.x[0], a, place, 0, at.lane);
  Mark<P> mark(a, place, 0, at.lane);
  for (int segment = 0; segment < segments; segment++) {
    const Segment<P, false>& in = x.x[segment % 2];
    const int first = segment * kSteps, count = min(kSteps, a.T - first);
    if (segment + 1 < segments) fetch(x.x[(segment + 1) % 2], a, place, segment + 1, at.lane);
    else __pipeline_commit();
    mark.put(x.marks, at.lane);
    mark = Mark<P>(a, place, segment + 1, at.lane);
    __pipeline_wait_prior(1);
    __syncwarp();
    if (a.saved) store<P>(a.saved + (place.bh * segments + segment) * P::K * P::V, s, at);
    for (int i = 0; i < count; i += P::together) {
      float sums[8] = {};
#pragma unroll
      for (int j = 0; j < P::together; j++) {
        advance<P>(s, in, x.marks, w, i + j, at, [&](int m, const Operand<kParts>(&)[P::C]) {
          float q[2];
          rows_of<P>(q, in.q[i + j], m, at);
#pragma unroll
          for (int n = 0; n < P::N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[(j * P::N + n) * 2 + e % 2] += q[e / 2] * s[m][n][e];
        });
      }
      write_columns<P>(a.o, sums, a, place, first + i, at);
    }
    __syncwarp();  // before the next segment's marks and inputs come
  }
  store<P>(a.s1 + place.bh * P::K * P::V, s, at);
}

// The states before the steps of a segment, as the backward multiplies them.
template <class P>
__device__ __forceinline__ void replay(Shared<P, true>& x, const Segment<P, true>& in, const float* from, const Weights<P>& w,
                                       int count, Lane at) {
  Tile<P> s[P::M];
  load<P>(s, from, at);
  for (int i = 0; i < count; i++)
    advance<P>(s, in, x.marks, w, i, at, [&](int m, const Operand<kParts>(&before)[P::C]) {
#pragma unroll
      for (int j = 0; j < P::C * P::exact; j++) {
        const unsigned* part = before[j / P::exact][j % P::exact];
        x.history[i][m][j / P::exact][j % P::exact][at.lane] = {part[0], part[1], part[2], part[3]};
      }
    });
}

// One step back for 16 rows. sums: those over rows, of dv. Returns the lane's share of df.
template <class P>
__device__ __forceinline__ float step_back(Tile<P>& ds, Tile<P> (&dw)[P::C], float (&row_sums)[4], float* sums,
                                           const Operand<P::exact> (&old)[P::C], const Weights<P>& w, const Weights<P>& wt,
                                           const float (&q)[2], const float (&k)[2], const float (&v)[P::N][2],
                                           const float (&dy)[P::N][2], float f) {
  Tile<P> z, before, p;
  outer<P>(z, k, v);
  float df = 0;
#pragma unroll
  for (int c = 0; c < P::C; c++) multiply(z, old[c], w.b[c]), join(before, old[c], c);
#pragma unroll
  for (int n = 0; n < P::N; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float made = Fast::tanh(z[n][e]);
      ds[n][e] += q[e / 2] * dy[n][e % 2];
      row_sums[e / 2] += (f * before[n][e] + (1 - f) * made) * dy[n][e % 2];
      df += ds[n][e] * (before[n][e] - made);
      p[n][e] = (1 - f) * ds[n][e] * (1 - made * made);
      row_sums[2 + e / 2] += p[n][e] * v[n][e % 2];
      sums[2 * n + e % 2] += p[n][e] * k[e / 2];
      ds[n][e] *= f;
    }
  Operand<kParts> parts[P::C];
#pragma unroll
  for (int c = 0; c < P::C; c++) split(parts[c], p, c), multiply(ds, parts[c], wt.b[c]);
  unsigned right[P::N][P::exact][2];
#pragma unroll
  for (int i = 0; i < P::N * P::exact * 2; i++) {
    const int n = i / (2 * P::exact), part = i / 2 % P::exact, half = i % 2;
    right[n][part][half] = matrix::transposed(parts[n / 2][part][n % 2 * 2 + half]);
  }
#pragma unroll
  for (int c = 0; c < P::C; c++) {
    Operand<P::exact> left;
#pragma unroll
    for (int i = 0; i < 4 * P::exact; i++) left[i / 4][i % 4] = matrix::transposed(old[c][i / 4][i % 2 * 2 + i % 4 / 2]);
    multiply(dw[c], left, right);
  }
  return df;
}

template <class P>
__device__ void backward(const Args<typename P::Elem>& a, Shared<P, true>& x) {
  const Lane at;
  const Place<P> place(a);
  const int segments = (a.T + kSteps - 1) / kSteps;
  Tile<P> ds[P::M], dw[P::C] = {};
  Weights<P> w, wt;
  load<P>(ds, a.ds1 ? a.ds1 + place.bh * P::K * P::V : nullptr, at);
  w.load(a.w + place.h * P::V * P::V, false, at), wt.load(a.w + place.h * P::V * P::V, true, at);
  fetch(x.x[(segments - 1) % 2], a, place, segments - 1, at.lane);
  Mark<P> mark(a, place, segments - 1, at.lane);
  for (int segment = segments - 1; segment >= 0; segment--) {
    const Segment<P, true>& in = x.x[segment % 2];
    const int first = segment * kSteps, count = min(kSteps, (a.T - first + P::together - 1) / P::together * P::together);
    if (segment > 0) fetch(x.x[(segment - 1) % 2], a, place, segment - 1, at.lane);
    else __pipeline_commit();
    mark.put(x.marks, at.lane);
    mark = Mark<P>(a, place, segment - 1, at.lane);
    __pipeline_wait_prior(1);
    __syncwarp();
    replay(x, in, a.saved + (place.bh * segments + segment) * P::K * P::V, w, count, at);
    for (int i = count - P::together; i >= 0; i -= P::together) {
      float sums[8] = {};
#pragma unroll
      for (int j = P::together - 1; j >= 0; j--) {
        const int s = i + j;
        const std::int64_t head = (place.token0 + first + s) * a.H + place.h;
        const bool there = first + s < a.T;
        const float f = x.marks.f[s], live = x.marks.live[s];
        float v[P::N][2], dy[P::N][2], df = 0;
        columns<P>(v, in.v[s], at), columns<P>(dy, in.dy[s], at);
#pragma unroll
        for (int n = 0; n < P::N; n++) dy[n][0] *= live, dy[n][1] *= live;
#pragma unroll
        for (int m = 0; m < P::M; m++) {
          float k[2], q[2], row_sums[4] = {};
          rows_of<P>(k, in.k[s], m, at), rows_of<P>(q, in.q[s], m, at);
          Operand<P::exact> old[P::C];
#pragma unroll
          for (int c = 0; c < P::C; c++)
#pragma unroll
            for (int p = 0; p < P::exact; p++) {
              const uint4 word = x.history[s][m][c][p][at.lane];
              old[c][p][0] = word.x, old[c][p][1] = word.y, old[c][p][2] = word.z, old[c][p][3] = word.w;
            }
          df += step_back<P>(ds[m], dw, row_sums, sums + 2 * P::N * j, old, w, wt, q, k, v, dy, f);
          const float sum = add_over(row_sums, at.lane, 2);  // dq, dq 8 rows on, dk, dk 8 rows on
          if (there) (at.t < 2 ? a.dq : a.dk)[head * P::K + 16 * m + 8 * (at.t % 2) + at.g] = decode::narrow<typename P::Elem>(sum);
        }
        if (x.marks.begins[s]) load<P>(ds, nullptr, at);
        df = add_over_warp(df) * live;
        if (there && at.lane == 0) a.df[head] = df;
      }
      write_columns<P>(a.dv, sums, a, place, first + i, at);
    }
    __syncwarp();
  }
  store<P>(a.ds0 + place.bh * P::K * P::V, ds, at);
  store<P>(a.dw + place.bh * P::V * P::V, dw, at);
}

template <class P>
__global__ void __launch_bounds__(32) forward_kernel(const __grid_constant__ Args<typename P::Elem> a) {
  forward<P>(a, *reinterpret_cast<Shared<P, false>*>(dynamic_shared()));
}
template <class P>
__global__ void __launch_bounds__(32) backward_kernel(const __grid_constant__ Args<typename P::Elem> a) {
  backward<P>(a, *reinterpret_cast<Shared<P, true>*>(dynamic_shared()));
}

}  // namespace elman::rows
