// Turns a walk's results in shared memory into gradients in global memory: adjoints of the L2 norm, SiLU and the scalars' maps.
#pragma once

#include "matrix_state_blocked.cuh"

namespace elman::matrix {

// Sums over time of the gradients of A_log and dt_bias: this thread's share.
struct HeadSums {
  float log = 0, bias = 0;
};

// Sums a slot of row s of dkq over the warps of the team, for rows of the state from n on.
template <class P, int E>
__device__ __forceinline__ void sum_of_keys(float (&g)[E], const BackwardShared<P>& sm, int buf, int slot, int s, int n) {
  if constexpr (P::blocked) {
#pragma unroll
    for (int e = 0; e < E; e++) g[e] = 0;
#pragma unroll
    for (int i = 0; i < P::WPH; i++) {
      float more[E];
      load_stored<P, E>(more, reinterpret_cast<const typename P::Store*>(sm.dkq[0][i][slot * P::steps + s]) + n);
#pragma unroll
      for (int e = 0; e < E; e++) g[e] += more[e];
    }
  } else if constexpr (P::large) {
#pragma unroll
    for (int e = 0; e < E; e++) g[e] = 0;
#pragma unroll
    for (int i = 0; i < P::WPH; i++) {
      const int word = slot < 2 ? 0 : P::seconds && slot == P::at_l ? 2 : 1;
      const bool upper = P::keeps && slot == P::at_g ? false : slot > 0;
      const auto both = *reinterpret_cast<const Vec<E, unsigned>*>(sm.dkq[buf % P::result_buffers][i][s] + word * P::NP + n);
#pragma unroll
      for (int e = 0; e < E; e++) g[e] += unpack(both.x[e], upper, typename P::Store());
    }
  } else if constexpr (P::columns) {
    const int first = slot * P::NP + (slot == 1 ? n ^ P::swapped(1) : n);
    float x[P::WPH][E];
#pragma unroll
    for (int i = 0; i < P::WPH; i++) load<E>(x[i], sm.dkq[buf % P::result_buffers][i][s] + first);
#pragma unroll
    for (int e = 0; e < E; e++) {
      g[e] = x[0][slot == P::at_p ? e ^ P::swapped(P::at_p) : e];
#pragma unroll
      for (int i = 1; i < P::WPH; i++) g[e] += x[i][slot == P::at_p ? e ^ P::swapped(P::at_p) : e];
    }
  } else if constexpr (P::tensor) {
    load<E>(g, sm.dkq[buf % P::result_buffers][0][s] + slot * P::NP + n);
#pragma unroll
    for (int i = 1; i < P::WPH; i++) {
      float more[E];
      load<E>(more, sm.dkq[buf % P::result_buffers][i][s] + slot * P::NP + n);
#pragma unroll
      for (int e = 0; e < E; e++) g[e] += more[e];
    }
  } else {
#pragma unroll
    for (int e = 0; e < E; e++) g[e] = sm.dkq[s][slot * P::NP + n + e];
  }
}

template <class P>
__device__ __forceinline__ void give_keys(const BackwardArgs& a, const BackwardShared<P>& sm, const Place<P>& at, int seg, int buf,
                                          int raw, float* part, int64_t part_step) {
  using Store = typename P::Store;
  constexpr int N = P::N, KL = P::KL, E = N / KL;
  const int t0 = seg * P::steps, count = min(P::steps, a.n.T - t0);
  const int64_t token = int64_t(at.b) * a.n.T + t0;
  const Ready<P>& x = sm.x[buf];
  const int sub = at.tl % KL, w = at.tl / KL % 2;
  const int64_t step = w ? a.dq_step : a.dk_step;
  Store* to = static_cast<Store*>(w ? a.dq : a.dk) + (token + at.tl / (2 * KL)) * step + at.h * N + sub * E;
#pragma unroll(P::unroll)
  for (int it = 0; it < (2 * P::steps * KL + P::TL - 1) / P::TL; it++, to += step * (P::TL / (2 * KL))) {
    const int s = it * (P::TL / (2 * KL)) + at.tl / (2 * KL);
    if ((2 * P::steps * KL) % P::TL && s >= P::steps) break;
    float g[E], f[E];
    sum_of_keys<P, E>(g, sm, buf, w, P::tensor && !P::blocked ? s + w : s, sub * E);
    if constexpr (P::reads && P::Cell::reads_with_k)
      if (w == 0) {
        float p[E];
        sum_of_keys<P, E>(p, sm, buf, P::at_p, s, sub * E);
        load_further<P, E>(f, sm.raw[raw].vector[P::Cell::read_vector][s], P::Cell::read_vector, sub * E);
#pragma unroll
        for (int e = 0; e < E; e++) g[e] = fmaf(f[e], p[e], g[e]);
      }
    if (P::Opt::l2) {
      float whole[E];
      const float* unit = whole;
      if constexpr (P::blocked) load_parts<P, E>(whole, x, w, s, sub * E);
      else unit = x.kq[s] + w * P::Q + sub * E;
      float along = 0;
#pragma unroll
      for (int e = 0; e < E; e++) along = fmaf(g[e], unit[e], along);
      along = line_sum<KL>(along);
      if (!of_key(P::Opt::l2, w)) along = 0;
      const float rho = x.rho[w][s];
#pragma unroll
      for (int e = 0; e < E; e++) g[e] = rho * fmaf(-unit[e], along, g[e]);
    }
    if (of_key(P::Opt::silu, w)) {
      load_stored<P, E>(f, (w ? sm.raw[raw].q[s] : sm.raw[raw].k[s]) + sub * E);
#pragma unroll
      for (int e = 0; e < E; e++) g[e] *= silu_slope<typename P::Math>(f[e]);
    }
    if (s >= count) continue;
    if constexpr (P::PARTS > 1) {
      store<E>(vectors_of<P>(part + s * part_step) + w * N + sub * E, g);
    } else {
      store<E>(to, g);
    }
  }
}

template <class P, int E>
__device__ __forceinline__ void store_further(void* to, int i, int64_t at, const float (&g)[E]) {
  if (P::wide_vector(i)) store<E>(static_cast<float*>(to) + at, g);
  else store<E>(static_cast<typename P::Store*>(to) + at, g);
}
// Gradients of the vectors besides k and q. One vector may enter in several places.
template <class P>
__device__ __forceinline__ void give_vectors(const BackwardArgs& a, const BackwardShared<P>& sm, const Place<P>& at, int seg,
                                             int buf, float* part, int64_t part_step) {
  constexpr int N = P::N, KL = P::KL, E = N / KL;
  const int t0 = seg * P::steps, count = min(P::steps, a.n.T - t0);
  const int64_t token = int64_t(at.b) * a.n.T + t0;
#pragma unroll
  for (int i = 0; i < P::NX; i++)
#pragma unroll(P::unroll)
    for (int it = at.tl; it < count * KL; it += P::TL) {
      const int s = it / KL, n = it % KL * E;
      float g[E] = {}, d[E], k[E];
      const auto add = [&](int slot, bool with_k) {
        sum_of_keys<P, E>(d, sm, buf, slot, s, n);
        if (with_k) load<E>(k, sm.x[buf].kq[s] + n);
#pragma unroll
        for (int e = 0; e < E; e++) g[e] = with_k ? fmaf(k[e], d[e], g[e]) : g[e] + d[e];
      };
      if (i == P::Cell::read_vector) add(P::at_p, P::Cell::reads_with_k);
      if (i == P::Cell::keep_vector) add(P::at_g, false);
      if (i == P::Cell::second_vector) add(P::at_l, false);
      if constexpr (P::PARTS > 1) {
        store<E>(part + s * part_step + (2 + i) * N + n, g);
      } else {
        store_further<P, E>(a.dvector[i], i, (token + s) * a.dvector_step[i] + at.h * N + n, g);
      }
    }
}

template <class P, int TL = P::TL>
__device__ __forceinline__ void give_lines(const BackwardArgs& a, BackwardShared<P>& sm, const Place<P>& at, int seg, int buf,
                                           int raw) {
  using Store = typename P::Store;
  constexpr int EV = P::EV, per = P::CB / EV, V = P::V;
  const int t0 = seg * P::steps, count = min(P::steps, a.n.T - t0);
  const int64_t token = int64_t(at.b) * a.n.T + t0;
#pragma unroll
  for (int l = 0; l < P::NL; l++) {
    Store* first = static_cast<Store*>(a.dline[l]) + token * a.dline_step[l] + at.h * V + at.line0;
#pragma unroll(P::unroll)
    for (int it = 0; it < (P::steps * per + TL - 1) / TL; it++) {
      const Item at_it = item<TL, per>(it, at.tl);
      const int s = at_it.s, e0 = at_it.e * EV, line = at.line0 + e0;
      if ((P::steps * per) % TL && s >= P::steps) break;
      float g[EV], f[EV];
      load<EV>(g, sm.line_gradients(buf, l) + s * P::line_pitch + e0);
      if (of_line(P::Opt::silu, l)) {
        load_stored<P, EV>(f, &sm.raw[raw].line[l][s][e0]);
#pragma unroll
        for (int e = 0; e < EV; e++) g[e] *= silu_slope<typename P::Math>(f[e]);
      }
      if (s >= count) continue;
      Store* to = first + s * a.dline_step[l] + e0;
      if constexpr (P::wide) {
        if (line < V) store<EV>(to, g);
      } else {
#pragma unroll
        for (int e = 0; e < EV; e++)
          if (line + e < V) to[e] = from_float<Store>(g[e]);
      }
    }
  }
}

template <class P>
__device__ __forceinline__ void give_folded_lines(const BackwardArgs& a, BackwardShared<P>& sm, const Place<P>& at, int seg,
                                                  int buf, int raw, Folding<P>& folding) {
  using Store = typename P::Store;
  constexpr int EV = P::EV, per = P::CB / EV, V = P::V;
  const int t0 = seg * P::steps, count = min(P::steps, a.n.T - t0);
  const int64_t token = int64_t(at.b) * a.n.T + t0;
#pragma unroll(P::unroll)
  for (int it = 0; it < (P::steps * per + P::TL - 1) / P::TL; it++) {
    const Item at_it = item<P::TL, per>(it, at.tl);
    const int s = at_it.s, e0 = at_it.e * EV, line = at.line0 + e0;
    if ((P::steps * per) % P::TL && s >= P::steps) break;
    float d[P::NL][EV], f[P::NI][EV], g[P::NI][EV];
#pragma unroll
    for (int l = 0; l < P::NL; l++) load<EV>(d[l], sm.line_gradients(buf, l) + s * P::CB + e0);
#pragma unroll
    for (int l = 0; l < P::NI; l++) load<EV>(f[l], &sm.raw[raw].line[l][s][e0]);
#pragma unroll
    for (int e = 0; e < EV; e++) {
      float dx[P::NL], in[P::NI], par[P::AF], din[P::NI], dpar[P::AF];
#pragma unroll
      for (int l = 0; l < P::NL; l++) dx[l] = d[l][e];
      folding.given(in, par, f, e);
      P::Cell::template fold_backward<typename P::Math>(din, dpar, dx, in, par);
#pragma unroll
      for (int l = 0; l < P::NI; l++) g[l][e] = of_line(P::Opt::silu, l) ? din[l] * silu_slope<typename P::Math>(f[l][e]) : din[l];
#pragma unroll
      for (int i = 0; i < P::NF; i++) folding.sum[i][e] += dpar[i];  // steps beyond T are held and give 0
    }
    if (s >= count) continue;
#pragma unroll
    for (int l = 0; l < P::NI; l++) {
      Store* to = static_cast<Store*>(a.dline[l]) + (token + s) * a.dline_step[l] + at.h * V + line;
      if constexpr (P::wide) {
        if (line < V) store<EV>(to, g[l]);
      } else {
#pragma unroll
        for (int e = 0; e < EV; e++)
          if (line + e < V) to[e] = from_float<Store>(g[l][e]);
      }
    }
  }
}

template <class P>
__device__ __forceinline__ void give_scalars(const BackwardArgs& a, const BackwardShared<P>& sm, const Place<P>& at, int seg,
                                             int buf, const Scalars<P>& sc, HeadSums& sums, float* part, int64_t part_step) {
  constexpr int G = P::SL,
                VW = P::shares % (4 * G) ? 1 : 4;  // lanes per scalar, each with 1 / G of the shares; shares read at once
  const int t0 = seg * P::steps, count = min(P::steps, a.n.T - t0);
  const Ready<P>& x = sm.x[buf];
#pragma unroll(P::unroll)
  for (int it = 0; it < (P::NS * P::steps * G + P::TL - 1) / P::TL; it++) {
    const int i = it * P::TL + at.tl, w = i / (P::steps * G), s = i / G % P::steps, sub = i % G;
    if ((P::NS * P::steps * G) % P::TL && i >= P::NS * P::steps * G) break;
    float d = 0;
#pragma unroll
    for (int j = 0; j < P::shares / (VW * G); j++) {
      float y[VW];
      load<VW>(y, &sm.dscalar[buf % P::result_buffers][w][s][(j * G + sub) * VW]);
      d += VW == 4 ? (y[0] + y[1]) + (y[VW - 2] + y[VW - 1]) : y[0];
    }
    d = line_sum<G>(d);
    if (sub != 0 || s >= count) continue;
    const bool first = w == 0, third = P::NS > 2 && w == 2;
    const ScalarKind kind = first ? P::kind0 : third ? P::kind2 : P::kind1;
    const ScalarGrad<float> g = scalar_adjoint<typename P::Math>(kind, d, x.scalar[w][s], x.raw[w][s], sc.rate, sc.bias);
    if (P::mamba && first) sums.log += g.da_log, sums.bias += g.dx;
    if constexpr (P::PARTS > 1) {
      part[s * part_step + P::part_width - 4 + w] = g.dx;
    } else {
      const int64_t to = (int64_t(at.b) * a.n.T + t0 + s) * (first   ? a.dscalar_step[0]
                                                             : third ? a.third.dx_step
                                                                     : a.dscalar_step[1]) +
                         at.h;
      void* d = first ? a.dscalar[0] : third ? a.third.dx : a.dscalar[1];
      if (kind == ScalarKind::given) static_cast<float*>(d)[to] = g.dx;
      else static_cast<typename P::Store*>(d)[to] = from_float<typename P::Store>(g.dx);
    }
  }
}

// All gradients of segment `seg`. buf, raw: its place in shared memory.
template <class P>
__device__ __forceinline__ void give_gradients(const BackwardArgs& a, BackwardShared<P>& sm, const Place<P>& at, int seg, int buf,
                                               int raw, const Scalars<P>& sc, HeadSums& sums, Folding<P>& folding) {
  const int64_t part_step = int64_t(a.n.H) * P::part_width, token = int64_t(at.b) * a.n.T + seg * P::steps;
  float* part = P::PARTS > 1 ? a.parts + (int64_t(at.part) * a.n.B * a.n.T + token) * part_step + at.h * P::part_width : nullptr;
  if constexpr (P::blocked) {  // the last warp has the scalars and, if there are eight, no lines
    constexpr int others = P::TL - (P::WPH >= 8 ? 32 : 0);
    give_keys<P>(a, sm, at, seg, buf, raw, part, part_step);
    if (at.tl < others) give_lines<P, others>(a, sm, at, seg, buf, raw);
    if (at.tw < P::WPH - 1) return;
    Place<P> there = at;
    there.tl = at.lane;
    give_keeps<P>(sm, sm.x[buf], at.lane);
    __syncwarp();
    give_scalars<P>(a, sm, there, seg, buf, sc, sums, part, part_step);
    return;
  }
  give_keys<P>(a, sm, at, seg, buf, raw, part, part_step);
  if constexpr (P::NX > 0) give_vectors<P>(a, sm, at, seg, buf, part, part_step);
  if constexpr (P::folds) {
    give_folded_lines<P>(a, sm, at, seg, buf, raw, folding);
  } else if constexpr (P::two_groups && P::NX > 0) {  // the other half of the helpers than vectors take
    Place<P> there = at;
    there.tl += at.tl < P::TL / 2 ? P::TL - P::TL / 2 : -(P::TL / 2);
    give_lines<P>(a, sm, there, seg, buf, raw);
  } else {
    give_lines<P>(a, sm, at, seg, buf, raw);
  }
  give_scalars<P>(a, sm, at, seg, buf, sc, sums, part, part_step);
}

// Adds up the threads' shares in a fixed order. `x`: shared memory for 2 TL numbers.
template <class P, class Sync>
__device__ __forceinline__ void give_heads(const BackwardArgs& a, const Place<P>& at, const HeadSums& sums, float* x, Sync sync) {
  if constexpr (P::mamba) {
    sync();
    x[at.tl] = sums.log, x[P::TL + at.tl] = sums.bias;
    sync();
    if (at.tl < 2) {
      float d = 0;
      for (int i = 0; i < P::TL; i++) d += x[at.tl * P::TL + i];
      a.dhead[((int64_t(at.part) * 2 + at.tl) * a.n.B + at.b) * a.n.H + at.h] = d;
    }
  }
}

// The same for learned constants that are folded into lines. `x`: shared memory for TL EV numbers.
template <class P, class Sync>
__device__ __forceinline__ void give_folded(const BackwardArgs& a, const Place<P>& at, const Folding<P>& folding, float* x,
                                            Sync sync) {
#pragma unroll
  for (int i = 0; i < P::NF; i++) {
    float mine[P::EV];
#pragma unroll
    for (int e = 0; e < P::EV; e++) mine[e] = folding.sum[i][e];
    sync();
    store<P::EV>(x + at.tl * P::EV, mine);
    sync();
    if (at.tl >= P::CB || at.line0 + at.tl >= P::V) continue;
    float d = 0;
    for (int j = at.tl; j < P::TL * P::EV; j += P::CB) d += x[j];
    a.dparam[i][at.bh * P::V + at.line0 + at.tl] = d;
  }
}

}  // namespace elman::matrix
