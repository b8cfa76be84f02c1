// A matrix state whose rows share one matrix. For every head, with a state S [K,V] and W [V,V],
//
//   Z_t = tanh(S_{t-1} W + k_t v_t^T)      S_t = f_t S_{t-1} + (1 - f_t) Z_t      o_t = S_t^T q_t
//
// and, walking back, with dS arriving from step t+1 and do given,
//
//   dS += q do^T    dq = S_t do    df = <dS, S_{t-1} - Z>    P = (1 - f) dS (1 - Z^2)
//   dk = P v        dv = P^T k     dW += S_{t-1}^T P         dS_{t-1} = f dS + P W^T
//
// Rows of S never meet, so they are the rows of a tensor core's tile: a warp has 16 of them for all time, a block a head of one row of the
// batch. S, W, W^T and the sum dW stay in registers. An accumulator of one product, packed, is the left operand of the next; sums over
// rows or columns and outer products are products, too, with one row or column, and but for df nothing is added up lane by lane.
// Operands are bf16: one number in bf16, hi + lo in fp16. S and dS themselves are fp32.
// Every 16 steps the state is saved in fp32; the backward replays a segment into shared memory, as the operands that it will want.
#pragma once

#include "rows_parts.cuh"

namespace elman::rows {

// Step i of a segment: s, and what it was before, as an operand.
template <class P, bool back>
__device__ __forceinline__ void advance(Tile<P>& s, Left<P> (&before)[P::C], const Segment<P, back>& in, const Marks& marks,
                                        const Right<P> (&w)[P::C][P::N], int i, Lane at) {
  const float f = marks.f[i];
  if (marks.begins[i]) {
    asm volatile("" ::: "memory");  // a branch, hardly ever taken, instead of a selection for each element
    load<P>(s, nullptr, at);
#pragma unroll
    for (int c = 0; c < P::C; c++) split<P>(before[c], s, c);
  }
  Tile<P> z = {};
  add_outer<P>(z, in.k[i], in.v[i], true, at);
#pragma unroll
  for (int c = 0; c < P::C; c++) multiply<P>(z, before[c], w[c]);
#pragma unroll
  for (int n = 0; n < P::N; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) s[n][e] = f * s[n][e] + (1 - f) * Fast::tanh(z[n][e]);
}

template <class P>
__device__ void forward(const Args<typename P::Elem>& a, Shared<P, false>& x) {
  const Lane at;
  const Place<P> place(a);
  const int segments = (a.T + kSteps - 1) / kSteps;
  Tile<P> s;
  Left<P> now[P::C];
  Right<P> w[P::C][P::N];
  load<P>(s, a.s0 ? a.s0 + place.bh * P::K * P::V : nullptr, at);
#pragma unroll
  for (int c = 0; c < P::C; c++) split<P>(now[c], s, c);
  load<P>(w, a.w + place.h * P::V * P::V, false, at);
  fetch(x.x[0], a, place, 0);
  Mark<P> mark(a, place, 0);
  for (int segment = 0; segment < segments; segment++) {
    const Segment<P, false>& in = x.x[segment % 2];
    const int first = segment * kSteps, count = min(kSteps, a.T - first);
    if (segment + 1 < segments) fetch(x.x[(segment + 1) % 2], a, place, segment + 1);
    else __pipeline_commit();
    mark.put(x.marks);
    mark = Mark<P>(a, place, segment + 1);
    __pipeline_wait_prior(1);
    __syncthreads();
    if (a.saved) store<P>(a.saved + (place.bh * segments + segment) * P::K * P::V, s, at.row0, at);
#pragma unroll 2
    for (int i = 0; i < count; i++) {
      advance<P>(s, now, in, x.marks, w, i, at);
      Left<P> q;
      Right<P> turned[P::N];
      Tile<P> o = {};
#pragma unroll
      for (int c = 0; c < P::C; c++) split<P>(now[c], s, c);
      turn<P>(turned, now);
      row<P>(q, in.q[i], at);
      multiply<P>(o, q, turned);
      store_row<P>(x.sums[at.row0 / 16][i], o, at);
    }
    __syncthreads();
    write_sums<P>(a.o, x, a, place, first);
  }
  store<P>(a.s1 + place.bh * P::K * P::V, s, at.row0, at);
}

// The states before the steps of a segment, as the backward multiplies them.
template <class P>
__device__ __forceinline__ void replay(Shared<P, true>& x, const Segment<P, true>& in, const float* from,
                                       const Right<P> (&w)[P::C][P::N], int count, Lane at) {
  Tile<P> s;
  load<P>(s, from, at);
#pragma unroll 2
  for (int i = 0; i < count; i++) {
    Left<P> before[P::C];
#pragma unroll
    for (int c = 0; c < P::C; c++) split<P>(before[c], s, c);
    advance<P>(s, before, in, x.marks, w, i, at);
#pragma unroll
    for (int j = 0; j < P::C * P::parts; j++) {
      const unsigned* part = before[j / P::parts][j % P::parts];
      x.history[i][j / P::parts][j % P::parts][threadIdx.x] = {part[0], part[1], part[2], part[3]};
    }
  }
}

// One step back. Returns the lane's share of df.
template <class P>
__device__ __forceinline__ float step_back(Tile<P>& ds, Tile<P> (&dw)[P::C], const Segment<P, true>& in, int i, bool live, float f,
                                           const Left<P> (&old)[P::C], const Right<P> (&w)[P::C][P::N],
                                           const Right<P> (&wt)[P::C][P::N], float (&keys)[4], Tile<P>& dv, Lane at) {
  Tile<P> z = {}, before, s, p;
  Left<P> operand[P::C], key;
  Right<P> value, turned[P::N];
  add_outer<P>(z, in.k[i], in.v[i], true, at);
  add_outer<P>(ds, in.q[i], in.dy[i], live, at);
#pragma unroll
  for (int c = 0; c < P::C; c++) multiply<P>(z, old[c], w[c]), join<P>(before, old[c], c);
  float df = 0;
#pragma unroll
  for (int n = 0; n < P::N; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float made = Fast::tanh(z[n][e]);
      s[n][e] = f * before[n][e] + (1 - f) * made;
      df += ds[n][e] * (before[n][e] - made);
      p[n][e] = (1 - f) * ds[n][e] * (1 - made * made);
      ds[n][e] *= f;
    }
#pragma unroll
  for (int c = 0; c < P::C; c++) {  // dq is column 0, dk column 1
    split<P>(operand[c], s, c), column<P>(value, in.dy[i], c, 0, live, at), multiply<P>(keys, operand[c], value);
    split<P>(operand[c], p, c), column<P>(value, in.v[i], c, 1, true, at), multiply<P>(keys, operand[c], value);
    multiply<P>(ds, operand[c], wt[c]);
  }
  turn<P>(turned, operand);
  row<P>(key, in.k[i], at);
  multiply<P>(dv, key, turned);
#pragma unroll
  for (int c = 0; c < P::C; c++) turn<P>(key, old[c]), multiply<P>(dw[c], key, turned);
  return df;
}

template <class P>
__device__ void backward(const Args<typename P::Elem>& a, Shared<P, true>& x) {
  using Elem = typename P::Elem;
  const Lane at;
  const Place<P> place(a);
  const int segments = (a.T + kSteps - 1) / kSteps, m = at.row0 / 16;
  Tile<P> ds, dw[P::C] = {};
  Right<P> w[P::C][P::N], wt[P::C][P::N];
  load<P>(ds, a.ds1 ? a.ds1 + place.bh * P::K * P::V : nullptr, at);
  load<P>(w, a.w + place.h * P::V * P::V, false, at), load<P>(wt, a.w + place.h * P::V * P::V, true, at);
  fetch(x.x[(segments - 1) % 2], a, place, segments - 1);
  Mark<P> mark(a, place, segments - 1);
  for (int segment = segments - 1; segment >= 0; segment--) {
    const Segment<P, true>& in = x.x[segment % 2];
    const int first = segment * kSteps, count = min(kSteps, a.T - first);
    if (segment > 0) fetch(x.x[(segment - 1) % 2], a, place, segment - 1);
    else __pipeline_commit();
    mark.put(x.marks);
    mark = Mark<P>(a, place, segment - 1);
    __pipeline_wait_prior(1);
    __syncthreads();
    replay<P>(x, in, a.saved + (place.bh * segments + segment) * P::K * P::V, w, count, at);
    for (int i = count - 1; i >= 0; i--) {
      Left<P> old[P::C];
#pragma unroll
      for (int j = 0; j < P::C * P::parts; j++) {
        const uint4 word = x.history[i][j / P::parts][j % P::parts][threadIdx.x];
        unsigned* part = old[j / P::parts][j % P::parts];
        part[0] = word.x, part[1] = word.y, part[2] = word.z, part[3] = word.w;
      }
      float keys[4] = {};
      Tile<P> dv = {};
      const float live = x.marks.live[i];
      float df = step_back<P>(ds, dw, in, i, live != 0, x.marks.f[i], old, w, wt, keys, dv, at) * live;
      if (x.marks.begins[i]) load<P>(ds, nullptr, at);
      store_row<P>(x.sums[m][i], dv, at);
      if (at.t == 0) {
        const std::int64_t to = ((place.token0 + first + i) * a.H + place.h) * P::K + at.row0 + at.g;
        a.dq[to] = decode::narrow<Elem>(keys[0]), a.dq[to + 8] = decode::narrow<Elem>(keys[2]);
        a.dk[to] = decode::narrow<Elem>(keys[1]), a.dk[to + 8] = decode::narrow<Elem>(keys[3]);
      }
#pragma unroll
      for (int bit = 16; bit > 0; bit /= 2) df += __shfl_xor_sync(~0u, df, bit);
      if (at.lane == 0) x.df[m][i] = df;
    }
    __syncthreads();
    write_sums<P>(a.dv, x, a, place, first);
    if (threadIdx.x < count) {
      float df = 0;
#pragma unroll
      for (int i = 0; i < P::M; i++) df += x.df[i][threadIdx.x];
      a.df[(place.token0 + first + threadIdx.x) * a.H + place.h] = df;
    }
  }
  store<P>(a.ds0 + place.bh * P::K * P::V, ds, at.row0, at);
#pragma unroll
  for (int c = 0; c < P::C; c++) store<P>(a.dw + (place.bh * P::M + m) * P::V * P::V, dw[c], 16 * c, at);
}

template <class P>
__global__ void __launch_bounds__(P::threads) forward_kernel(const __grid_constant__ Args<typename P::Elem> a) {
  forward<P>(a, *reinterpret_cast<Shared<P, false>*>(dynamic_shared()));
}
template <class P>
__global__ void __launch_bounds__(P::threads) backward_kernel(const __grid_constant__ Args<typename P::Elem> a) {
  backward<P>(a, *reinterpret_cast<Shared<P, true>*>(dynamic_shared()));
}

}  // namespace elman::rows
