// A matrix state whose rows share one matrix. For every head, with a state S [K,V] and W [V,V],
//
//   Z_t = tanh(S_{t-1} W + k_t v_t^T)      S_t = f_t S_{t-1} + (1 - f_t) Z_t      o_t = S_t^T q_t
//
// and, walking back, with dS arriving from step t+1 and do given,
//
//   dS += q do^T    dq = S_t do    df = <dS, S_{t-1} - Z>    P = (1 - f) dS (1 - Z^2)
//   dk = P v        dv = P^T k     dW += S_{t-1}^T P         dS_{t-1} = f dS + P W^T
//
// Rows of S are independent, so they are the rows of a tensor-core tile: a warp has 16 of them for the whole launch, a block
// has one head of one batch row. S, W, W^T and the sum dW stay in registers. The packed accumulator of one product is the left
// operand of the next. Sums over rows or columns and outer products are products, too; only df is summed lane by lane.
// Transposes pass through shared memory. Operands are bf16: one number in bf16, hi + lo in fp16. S and dS themselves are fp32.
// The state is saved in fp32 every 16 steps; the backward replays a segment into shared memory, as operands of its products.
#pragma once

#include "rows_parts.cuh"

namespace elman::rows {

// Starts a document. Few segments have one, so the others run without the test (`packed`).
template <class P>
__device__ __forceinline__ void restart(Tile<P>& s, Left<P> (&before)[P::C], Lane at) {
  load<P>(s, nullptr, at);
#pragma unroll
  for (int c = 0; c < P::C; c++) split<P>(before[c], s, c);
}

// The chain from state to state. A warp issues instructions in order, so one that waits delays all later ones. Everything else
// that needs the state therefore reads it one step later.
template <class P>
struct Chain {
  Tile<P> s, z;  // z: the outer product of the next step
  Left<P> now[P::C];  // s as an operand
  unsigned k[2], v[P::N];  // eight steps

  template <bool back>
  __device__ __forceinline__ void load_slots(const Segment<P, back>& in, int first, Lane at) {
    slots(k, in.k + first, at.row0, at), slots(v, in.v + first, 0, at);
  }
  __device__ __forceinline__ void start(const float* from, Lane at) {
    load<P>(s, from, at);
#pragma unroll
    for (int c = 0; c < P::C; c++) split<P>(now[c], s, c);
  }
  __device__ __forceinline__ void outer(int step, Lane at) {
#pragma unroll
    for (int i = 0; i < P::N * 4; i++) z[i / 4][i % 4] = 0;
    add_outer<P>(z, k, v, slot(step, at));
  }
  // The two halves of a step: up to tanh, and after it.
  __device__ __forceinline__ void squash(const Right<P> (&w)[P::C][P::N], bool begins, Lane at) {
    if (begins) restart<P>(s, now, at);
#pragma unroll
    for (int c = 0; c < P::C; c++) multiply<P>(z, now[c], w[c]);
#pragma unroll
    for (int i = 0; i < P::N * 4; i++) z[i / 4][i % 4] = Fast::tanh(z[i / 4][i % 4]);
  }
  __device__ __forceinline__ void blend(float f, int step, Lane at) {
#pragma unroll
    for (int i = 0; i < P::N * 4; i++) {
      float& x = s[i / 4][i % 4];
      x = fmaf(1 - f, z[i / 4][i % 4], __fmul_rn(f, x));
    }
#pragma unroll
    for (int c = 0; c < P::C; c++) split<P>(now[c], s, c);
    outer((step + 1) % kGroup, at);
  }
};

// Eight steps. Step i stores the state before it and loads it transposed. Step i + 1 multiplies that state, which gives o of step i - 1.
template <bool packed, class P>
__device__ __forceinline__ void forward_steps(Chain<P>& chain, Left<P> (&turned)[P::C], Right<P> (&q)[1], float (&o)[P::C][4],
                                              Shared<P, false>& x, const Segment<P, false>& in, const Right<P> (&w)[P::C][P::N],
                                              int group, unsigned begins, Lane at) {
#pragma unroll 2
  for (int j = 0; j < kGroup; j++) {
    x.put(chain.now, j % 2, at);
    const float f = x.marks.f[group + j];
    chain.squash(w, packed && begins >> (group + j) & 1, at);
    float made[P::C][4] = {};
#pragma unroll
    for (int c = 0; c < P::C; c++) multiply<P>(made[c], turned[c], q[0]);
    __syncwarp();
#pragma unroll
    for (int c = 0; c < P::C; c++) x.turned(turned[c], j % 2, c, at);
    chain.blend(f, j, at);
    if (j == kGroup - 2) chain.load_slots(in, (group + kGroup) % kSteps, at);  // after the last group: not used
#pragma unroll
    for (int c = 0; c < P::C; c++) keep(o[c], made[c], j, slot((j + 6) % kGroup, at));
    if (j == 1) {
      if (group) store_sums<P>(x.sums(at.row0 / 16, group - kGroup), o, at);
      columns<P>(q, in.q + group, at.row0, at);
    }
  }
}

template <class P>
__device__ void forward(const Args<typename P::Elem>& a, Shared<P, false>& x) {
  const Lane at;
  const Place<P> place(a);
  const int segments = (a.T + kSteps - 1) / kSteps, m = at.row0 / 16;
  Chain<P> chain;
  Right<P> w[P::C][P::N];
  chain.start(a.s0 ? a.s0 + place.bh * P::K * P::V : nullptr, at);
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
    if (a.saved) store<P>(a.saved + (place.bh * segments + segment) * P::K * P::V, chain.s, at.row0, at);
    const unsigned begins = x.marks.begins;
    Left<P> turned[P::C] = {};
    Right<P> q[1] = {};
    float o[P::C][4] = {};
    chain.load_slots(in, 0, at), chain.outer(0, at);
    int group = 0;
    if (begins)
      for (; group < count; group += kGroup) forward_steps<true>(chain, turned, q, o, x, in, w, group, begins, at);
    else
      for (; group < count; group += kGroup) forward_steps<false>(chain, turned, q, o, x, in, w, group, begins, at);
    x.put(chain.now, 0, at);
#pragma unroll  // o of the last two steps
    for (int j = kGroup - 2; j < kGroup; j++) {
#pragma unroll
      for (int c = 0; c < P::C; c++) {
        float made[4] = {};
        multiply<P>(made, turned[c], q[0]), keep(o[c], made, j, slot(j, at));
        if (j < kGroup - 1) __syncwarp(), x.turned(turned[c], 0, c, at);
      }
    }
    store_sums<P>(x.sums(m, group - kGroup), o, at);
    __syncthreads();
    write_sums<P>(a.o, x, a, place, first);
  }
  store<P>(a.s1 + place.bh * P::K * P::V, chain.s, at.row0, at);
}

// Replays the states before the steps of a segment, as operands of the backward. The last one stays in the chain.
template <bool packed, class P>
__device__ __forceinline__ void replay_steps(Chain<P>& chain, Shared<P, true>& x, const Segment<P, true>& in,
                                             const Right<P> (&w)[P::C][P::N], int group, unsigned begins, Lane at) {
#pragma unroll 2
  for (int j = 0; j < kGroup; j++) {
    x.put(chain.now, group + j, at);
    const float f = x.marks.f[group + j];
    chain.squash(w, packed && begins >> (group + j) & 1, at);
    chain.blend(f, j, at);
    if (j == kGroup - 2) chain.load_slots(in, (group + kGroup) % kSteps, at);
  }
}

// A lane's inputs and results of eight steps. Key, value and slope (dy) are columns, the others are slots.
template <class P>
struct Group {
  int first;
  unsigned q[2], k[2], v[P::N], dy[P::N];
  Right<P> key[1], value[P::C], slope[P::C];
  float dq[4] = {}, dk[4] = {}, dv[P::C][4] = {};
  __device__ __forceinline__ Group(const Segment<P, true>& in, int first, unsigned live, Lane at) : first(first) {
    slots(q, in.q + first, at.row0, at), slots(k, in.k + first, at.row0, at), columns<P>(key, in.k + first, at.row0, at);
    slots(v, in.v + first, 0, at), columns<P>(value, in.v + first, 0, at);
    slots(dy, in.dy + first, 0, at), columns<P>(slope, in.dy + first, 0, at);
    const unsigned mine = (live & 1 ? 0xffffu : 0) | (live & 2 ? 0xffff0000u : 0);  // the lane's two steps
#pragma unroll
    for (int i = 0; i < 2; i++) q[i] &= mine;
#pragma unroll
    for (int i = 0; i < P::N; i++) dy[i] &= mine;
  }
  // dq of step n, from the state after it.
  __device__ __forceinline__ void read_back(const Left<P> (&after)[P::C], int n, Lane at) {
    float made[4] = {};
#pragma unroll
    for (int c = 0; c < P::C; c++) multiply<P>(made, after[c], slope[c]);
    keep(dq, made, n, slot(n, at));
  }
};

// Eight steps back. A step computes Z again from the state before it; the same state gives dq of the previous step.
template <bool packed, class P>
__device__ __forceinline__ void back_steps(Tile<P>& ds, Tile<P> (&dwt)[P::C], Group<P>& eight, Shared<P, true>& x,
                                           const Right<P> (&w)[P::C][P::N], const Right<P> (&wt)[P::C][P::N], unsigned begins,
                                           Lane at) {
  const int m = at.row0 / 16;
  add_outer<P>(ds, eight.q, eight.dy, slot(kGroup - 1, at));
#pragma unroll 1  // in pairs: a lane has both steps of a pair, and the inner unrolled loop knows which half it has
  for (int pair = kGroup / 2 - 1; pair >= 0; pair--)
#pragma unroll P::small ? 2 : 1
    for (int n = 1; n >= 0; n--) {
      const int j = 2 * pair + n, i = eight.first + j;
      const bool starts = packed && begins >> i & 1;
      const float f = x.marks.f[i];
      Left<P> before[P::C], operand[P::C], turned[P::C];
      Right<P> old[P::N];
      Tile<P> z = {}, gap, p, outer = {};  // gap: S_{t-1} - Z; outer: q do^T of the previous step
#pragma unroll
      for (int c = 0; c < P::C; c++) x.get(before[c], i, c, at);
      eight.read_back(before, j - 1, at);
      if (starts) restart<P>(z, before, at);
      add_outer<P>(z, eight.k, eight.v, slot(j, at));
#pragma unroll
      for (int c = 0; c < P::C; c++) multiply<P>(z, before[c], w[c]), join<P>(gap, before[c], c);
      add_outer<P>(outer, eight.q, eight.dy, slot(j - 1, at));
      float share = 0, dk[4] = {};
#pragma unroll
      for (int e = 0; e < P::N * 4; e++) {
        const float made = Fast::tanh(z[e / 4][e % 4]);
        float& d = ds[e / 4][e % 4];
        p[e / 4][e % 4] = fmaf(-(1 - f) * made, made, 1 - f) * d;
        share = fmaf(d, gap[e / 4][e % 4] - made, share), d = fmaf(f, d, outer[e / 4][e % 4]);
      }
      x.shares[m][j][at.lane] = share;
#pragma unroll
      for (int c = 0; c < P::C; c++) split<P>(operand[c], p, c), multiply<P>(ds, operand[c], wt[c]);
      x.put(operand, kSteps + n, at);
      if (starts) {
#pragma unroll
        for (int e = 0; e < P::N * 4; e++) ds[e / 4][e % 4] = outer[e / 4][e % 4];
      }
#pragma unroll
      for (int c = 0; c < P::C; c++) multiply<P>(dk, operand[c], eight.value[c]);
      __syncwarp();
#pragma unroll
      for (int c = 0; c < P::C; c++) x.turned(turned[c], kSteps + n, c, at), x.turned(old, i, c, at);
#pragma unroll
      for (int c = 0; c < P::C; c++) {
        float dv[4] = {};
        multiply<P>(dv, turned[c], eight.key[0]), keep(eight.dv[c], dv, j, slot(j, at));
        if (!starts) multiply<P>(dwt[c], turned[c], old);
      }
      keep(eight.dk, dk, j, slot(j, at));
    }
  float df = 0;  // the sum of a quarter of step g's shares
#pragma unroll
  for (int i = 0; i < 8; i++) df += x.shares[m][at.g][8 * at.t + i];
  df += __shfl_xor_sync(~0u, df, 1), df += __shfl_xor_sync(~0u, df, 2);
  if (at.t == 0) x.df[m][eight.first + at.g] = df;
}

template <class P>
__device__ void backward(const Args<typename P::Elem>& a, Shared<P, true>& x) {
  const Lane at;
  const Place<P> place(a);
  const int segments = (a.T + kSteps - 1) / kSteps, m = at.row0 / 16;
  Tile<P> ds, dwt[P::C] = {};  // dwt: the transpose of dW
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
    Chain<P> chain;
    const unsigned live = x.marks.live, begins = x.marks.begins;
    chain.start(a.saved + (place.bh * segments + segment) * P::K * P::V, at);
    chain.load_slots(in, 0, at), chain.outer(0, at);
    int group = 0;
    if (begins)
      for (; group < count; group += kGroup) replay_steps<true>(chain, x, in, w, group, begins, at);
    else
      for (; group < count; group += kGroup) replay_steps<false>(chain, x, in, w, group, begins, at);
    __syncwarp();
    Left<P> after[P::C];  // the state after a group
#pragma unroll
    for (int c = 0; c < P::C; c++) split<P>(after[c], chain.s, c);
    for (group -= kGroup; group >= 0; group -= kGroup) {
      Group<P> eight(in, group, live >> (group + 2 * at.t), at);
      eight.read_back(after, kGroup - 1, at);
      if (begins) back_steps<true>(ds, dwt, eight, x, w, wt, begins, at);
      else back_steps<false>(ds, dwt, eight, x, w, wt, begins, at);
#pragma unroll
      for (int c = 0; c < P::C; c++) x.get(after[c], group, c, at);
      __syncwarp();  // all lanes have their states
      store_sums<P>(x.sums(m, group), eight.dv, at);
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (!(live >> (group + 2 * at.t + e % 2) & 1)) eight.dq[e] = 0;
      const int t = first + group + at.g;
      const std::int64_t to = ((place.token0 + t) * a.H + place.h) * P::K + at.row0 + 2 * at.t;
      store_keys<P>(a.dq + to, eight.dq, t < a.T), store_keys<P>(a.dk + to, eight.dk, t < a.T);
    }
    __syncthreads();
    write_sums<P>(a.dv, x, a, place, first);
    if (threadIdx.x < count) {
      float df = 0;
#pragma unroll
      for (int i = 0; i < P::M; i++) df += x.df[i][threadIdx.x];
      a.df[(place.token0 + first + threadIdx.x) * a.H + place.h] = live >> threadIdx.x & 1 ? df : 0;
    }
  }
  store<P>(a.ds0 + place.bh * P::K * P::V, ds, at.row0, at);
#pragma unroll
  for (int c = 0; c < P::C; c++) store_turned<P>(a.dw + (place.bh * P::M + m) * P::V * P::V, dwt[c], 16 * c, at);
}

template <class P>
__global__ void __launch_bounds__(P::threads, P::blocks > 1 ? 2 * P::blocks : 1)
    forward_kernel(const __grid_constant__ Args<typename P::Elem> a) {
  forward<P>(a, *reinterpret_cast<Shared<P, false>*>(dynamic_shared()));
}
template <class P>
__global__ void __launch_bounds__(P::threads, P::blocks) backward_kernel(const __grid_constant__ Args<typename P::Elem> a) {
  backward<P>(a, *reinterpret_cast<Shared<P, true>*>(dynamic_shared()));
}

}  // namespace elman::rows
