// Backward over a segment with shuffles: fp32 storage.
#pragma once

#include "matrix_state_step.cuh"

namespace elman::matrix {

template <class P>
__device__ __forceinline__ void keep_rows(float (&m)[P::CB][P::NP], const float (&x)[P::R], int j, int rg) {
  store<P::R>(&m[j][rg * P::R], x);
}

// dq, dk and further vectors of a segment, from the matrices in shared memory. Slot s is the state before step s: it gives dq of step s-1 and the S' part
// of dk of step s. P of step s gives the rest of dk.
template <class P>
__device__ __forceinline__ void sums_over_lines(BackwardShared<P>& sm, int buf, const Place<P>& at) {
  for (int it = at.tl; it < P::steps * P::NP; it += P::TL) {
    const int s = it / P::NP, p = it % P::NP, i = P::row_of(p / P::R, p % P::R);
    float dq = 0, dk = 0, dp = 0, dg = 0, dl = 0;
    for (int j = 0; j < P::CB; j++) {
      dq = fmaf(sm.s[s + 1][j][p], to_float(sm.dy[buf][s][j]), dq);
      dk = fmaf(sm.p[s][j][p], sm.write[0][s][j], dk);
      float& dr = P::reads ? dp : dk;
      dr = fmaf(sm.s[s][j][p], sm.dr[s][j], dr);
      if constexpr (P::keeps) dg = fmaf(sm.p[s][j][p] * sm.s[s][j][p], sm.keep[s][j], dg);
      if constexpr (P::seconds) dl = fmaf(sm.p[s][j][p], sm.write[1][s][j], dl);
    }
    sm.dkq[s][P::NP + i] = dq;
    sm.dkq[s][i] = dk;
    if constexpr (P::reads) sm.dkq[s][P::at_p * P::NP + i] = dp;
    if constexpr (P::keeps) sm.dkq[s][P::at_g * P::NP + i] = dg;
    if constexpr (P::seconds) sm.dkq[s][P::at_l * P::NP + i] = dl;
  }
}

// Replays a segment into registers and walks back.
template <class P, bool MayHold>
__device__ __forceinline__ void walk(BackwardShared<P>& sm, int buf, const Place<P>& at, const Constants<P>& par,
                                     const float (&S0)[P::E], float (&dS)[P::E], ConstantSums<P>& dpar) {
  static_assert(P::M == 1);
  constexpr int R = P::R;
  const int j = at.column(0);
  const Ready<P>& x = sm.x[0];
  const float* lines = &x.line[0][0][j];
  float hist[P::steps + 1][R], rs[P::steps][1];
#pragma unroll
  for (int i = 0; i < R; i++) hist[0][i] = S0[i];
  keep_rows<P>(sm.s[0], hist[0], j, at.rg);
  float kc[R];
  load_rows<P>(kc, x.kq[0], at.rg);
#pragma unroll
  for (int s = 0; s < P::steps; s++) {
    float kn[R], p[R], in[1][P::NL], c[P::AS], write[P::writes][1];
    load_rows<P>(kn, x.kq[s + 1 < P::steps ? s + 1 : s], at.rg);
    step_inputs<P>(in, c, lines, x, s);
#pragma unroll
    for (int i = 0; i < R; i++) hist[s + 1][i] = hist[s][i];
    Products<P> sum;
    load_rows<P>(p, x.kq[s] + P::at_p * P::Q, at.rg);
    line_products<P, false>(sum, hist[s], p);
    if (begins<P, MayHold>(x, s)) forget<P, false>(hist[s + 1], sum);
    advance<P, MayHold>(hist[s + 1], sum, kc, x.kq[s], at.rg, in, c, par, MayHold && x.hold[s] != 0.f, rs[s], write);
#pragma unroll
    for (int i = 0; i < P::writes; i++)
      if (at.rg == 0) sm.write[i][s][j] = P::Cell::elementwise ? 1.f : write[i][0];
    keep_rows<P>(sm.s[s + 1], hist[s + 1], j, at.rg);
#pragma unroll
    for (int i = 0; i < R; i++) kc[i] = kn[i];
  }
  float q[R];
  load_rows<P>(q, x.kq[P::steps - 1] + P::NP, at.rg);
  float dy = to_float(sm.dy[buf][P::steps - 1][j]);
#pragma unroll
  for (int s = P::steps - 1; s >= 0; s--) {
    const int b = s > 0 ? s - 1 : 0;
    float kn[R], qn[R], p[R], g[R], l[R], in[1][P::NL], c[P::AS], Pm[R];
    load_rows<P>(p, x.kq[s] + P::at_p * P::Q, at.rg);
    load_vector<P, P::keeps>(g, x.kq[s] + P::at_g * P::Q, at.rg);
    load_vector<P, P::seconds>(l, x.kq[s] + P::at_l * P::Q, at.rg);
    load_rows<P>(kn, x.kq[b], at.rg);
    load_rows<P>(qn, x.kq[b] + P::NP, at.rg);
    const float dyn = to_float(sm.dy[buf][b][j]);
    step_inputs<P>(in, c, lines, x, s);
    const bool hold = MayHold && x.hold[s] != 0.f, fresh = begins<P, MayHold>(x, s);
    const float* S = hist[s + 1];
    float Sp[R];  // the state that the step saw
#pragma unroll
    for (int i = 0; i < R; i++) Sp[i] = fresh ? 0.f : hist[s][i];
#pragma unroll
    for (int i = 0; i < R; i++) {
      dS[i] = fmaf(q[i], dy, dS[i]);
      Pm[i] = squashes<typename P::Cell>(c) ? dS[i] * fmaf(-S[i], S[i], 1.f) : dS[i];
      if (MayHold && hold) Pm[i] = 0.f;
    }
    const MatrixIn<float> x_ = given<P>(rs[s][0], in[0], c, par[0], Sp, 0);
    const MatrixLine<float> w = P::Cell::template line<typename P::Math>(x_);
    MatrixLine<float> dw{};
    float of_s[R];
    if constexpr (P::Cell::elementwise) {
      elements<P>(of_s, Pm, dw, Pm, Sp, kc, w, 0);
      dw = {dw.keep, line_sum<P::L>(dw.write), line_sum<P::L>(dw.second)};
    } else {
      dw.write = line_sum<P::L>(dot<R>(kc, Pm));
      if constexpr (P::seconds) dw.second = line_sum<P::L>(dot<R>(l, Pm));
#pragma unroll
      for (int i = 0; i < R; i++) {
        const float now = P::keeps ? g[i] * Pm[i] : Pm[i];
        dw.keep = fmaf(now, Sp[i], dw.keep), of_s[i] = w.keep * now;
      }
    }
    if (!P::Cell::scalar_keep) dw.keep = line_sum<P::L>(dw.keep);
    const auto d = P::Cell::template line_backward<typename P::Math>(dw, x_);
    keep_rows<P>(sm.p[s], Pm, j, at.rg);
#pragma unroll
    for (int i = 0; i < P::NS; i++) {
      const bool whole = i == 0 && P::Cell::scalar_keep;
      sm.dscalar[0][i][s][at.tl] = (whole || at.rg == 0) && !hold ? d.c[i] : 0.f;
    }
    if (at.rg == 0) {
      sm.dr[s][j] = hold || fresh ? 0.f : d.r;
      if constexpr (P::keeps) sm.keep[s][j] = fresh ? 0.f : w.keep;
#pragma unroll
      for (int l = 0; l < P::NL; l++) sm.dline[0][l][s][j] = hold ? 0.f : d.in[l];
    }
#pragma unroll
    for (int i = 0; i < P::NC; i++) dpar[0][i] += hold ? 0.f : d.par[i];
#pragma unroll
    for (int i = 0; i < R; i++) {
      float back = fmaf(p[i], d.r, of_s[i]);
      if constexpr (P::Cell::energy) back = fmaf(d.energy * (2.f / P::N), Sp[i], back);
      dS[i] = fresh ? 0.f : hold ? dS[i] : back;
      kc[i] = kn[i], q[i] = qn[i];
    }
    dy = dyn;
  }
}

}  // namespace elman::matrix
