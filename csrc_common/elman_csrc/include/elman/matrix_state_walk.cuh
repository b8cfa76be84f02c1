// Backward over a segment by shuffles: fp32 storage, and N > 32.
#pragma once

#include "matrix_state_step.cuh"

namespace elman::matrix {

// Which 16-byte chunk of row j holds the rows of lane group g: conflict-free for both the writers and ldmatrix.
template <int L>
__device__ __forceinline__ int swizzle(int j, int g) {
  if (L == 2) return g ^ ((j >> 2) & 1);
  if (L == 4) return g ^ ((j >> 1) & 3);
  return g ^ (j & 7);
}

template <class P>
__device__ __forceinline__ void keep_rows(typename BackwardShared<P>::Hist (&m)[P::CBP][P::ROW], const float (&x)[P::R], int j,
                                          int rg) {
  if constexpr (P::mma) {
    unsigned w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const __nv_bfloat162 z = __floats2bfloat162_rn(2 * i < P::R ? x[2 * i < P::R ? 2 * i : 0] : 0.f,
                                                     2 * i + 1 < P::R ? x[2 * i + 1 < P::R ? 2 * i + 1 : 0] : 0.f);
      w[i] = *reinterpret_cast<const unsigned*>(&z);
    }
    *reinterpret_cast<uint4*>(&m[j][swizzle<P::L>(j, rg) * 8]) = make_uint4(w[0], w[1], w[2], w[3]);
  } else {
    float g[P::R];
#pragma unroll
    for (int e = 0; e < P::R; e++) g[e] = x[e];
    store<P::R>(&m[j][rg * P::R], g);
  }
}

// dq and dk of a segment from the matrices left in shared memory. Slot s is the state before step s, so it gives dq of step s-1
// and the S' part of dk of step s; P of step s gives the rest of dk.
template <class P>
__device__ __forceinline__ void sums_over_lines(BackwardShared<P>& sm, int buf, const Place<P>& at) {
  constexpr int L = P::L;
  if constexpr (P::mma) {
    constexpr int MT = L / 2;
    const int g = at.lane / 4, tg = at.lane % 4;
    for (int tile = at.tw; tile < (kInterval + 1) * MT; tile += P::WPH) {
      const int s = tile / MT, mt = tile % MT;
      const bf16* bx = g == 0 && s > 0 ? sm.dy[buf][s - 1] : g == 1 ? sm.dr[s] : sm.zero;
      const bf16* bp = g == 1 && s < kInterval ? sm.write[s] : sm.zero;
      float c[4] = {0, 0, 0, 0};
#pragma unroll
      for (int kk = 0; kk < P::CBP / 16; kk++) {
        const int j = kk * 16 + (at.lane & 7) + (at.lane >> 4) * 8, chunk = swizzle<L>(j, mt * 2 + ((at.lane >> 3) & 1));
        unsigned m[4];
        ldsm_x4_trans(m, &sm.s[s][j][chunk * 8]);
        mma_16x8x16<bf16>(c, m, *reinterpret_cast<const unsigned*>(bx + kk * 16 + 2 * tg),
                          *reinterpret_cast<const unsigned*>(bx + kk * 16 + 8 + 2 * tg));
        if (s < kInterval) {
          ldsm_x4_trans(m, &sm.p[s][j][chunk * 8]);
          mma_16x8x16<bf16>(c, m, *reinterpret_cast<const unsigned*>(bp + kk * 16 + 2 * tg),
                            *reinterpret_cast<const unsigned*>(bp + kk * 16 + 8 + 2 * tg));
        }
      }
      if (tg == 0) {
#pragma unroll
        for (int x = 0; x < 2; x++) {
          const int i = ((g / P::VW) * L + mt * 2 + x) * P::VW + g % P::VW;
          if (g < P::R) {
            if (s > 0) sm.dkq[s - 1][P::NP + i] = c[2 * x];
            if (s < kInterval) sm.dkq[s][i] = c[2 * x + 1];
          }
        }
      }
    }
  } else {
    for (int it = at.tl; it < kInterval * P::NP; it += P::TL) {
      const int s = it / P::NP, p = it % P::NP, rg = p / P::R, e = p % P::R, i = ((e / P::VW) * L + rg) * P::VW + e % P::VW;
      float dq = 0, dk = 0;
      for (int j = 0; j < P::CB; j++) {
        dq = fmaf(sm.s[s + 1][j][p], to_float(sm.dy[buf][s][j]), dq);
        dk = fmaf(sm.p[s][j][p], sm.write[s][j], dk);
        dk = fmaf(sm.s[s][j][p], sm.dr[s][j], dk);
      }
      sm.dkq[s][P::NP + i] = dq;
      sm.dkq[s][i] = dk;
    }
  }
}

// Replay 16 steps into registers and walk back over them.
template <class P, bool MayHold>
__device__ __forceinline__ void walk(BackwardShared<P>& sm, int buf, const Place<P>& at, const float (&S0)[P::E],
                                     float (&dS)[P::E]) {
  static_assert(P::M == 1);
  using Hist = typename BackwardShared<P>::Hist;
  constexpr int R = P::R;
  const int j = at.column(0);
  const Ready<P>& x = sm.x[0];
  const float* lines = &x.line[0][0][j];
  float hist[kInterval + 1][R], rs[kInterval][1];
#pragma unroll
  for (int i = 0; i < R; i++) hist[0][i] = S0[i];
  keep_rows<P>(sm.s[0], hist[0], j, at.rg);
  float kc[R];
  load_rows<P>(kc, x.kq[0], at.rg);
#pragma unroll
  for (int s = 0; s < kInterval; s++) {
    float kn[R], in[1][P::NL], c[P::NS], write[1];
    load_rows<P>(kn, x.kq[s + 1 < kInterval ? s + 1 : s], at.rg);
    step_inputs<P>(in, c, lines, x, s);
#pragma unroll
    for (int i = 0; i < R; i++) hist[s + 1][i] = hist[s][i];
    Products<P> sum;
    line_products<P, false>(sum, hist[s], kc);
    advance<P, MayHold>(hist[s + 1], sum, kc, in, c, MayHold && x.hold[s] != 0.f, rs[s], write);
    if (at.rg == 0) sm.write[s][j] = from_float<Hist>(write[0]);
    keep_rows<P>(sm.s[s + 1], hist[s + 1], j, at.rg);
#pragma unroll
    for (int i = 0; i < R; i++) kc[i] = kn[i];
  }
  float q[R];
  load_rows<P>(q, x.kq[kInterval - 1] + P::NP, at.rg);
  float dy = to_float(sm.dy[buf][kInterval - 1][j]);
#pragma unroll
  for (int s = kInterval - 1; s >= 0; s--) {
    const int b = s > 0 ? s - 1 : 0;
    float kn[R], qn[R], in[1][P::NL], c[P::NS], Pm[R];
    load_rows<P>(kn, x.kq[b], at.rg);
    load_rows<P>(qn, x.kq[b] + P::NP, at.rg);
    const float dyn = to_float(sm.dy[buf][b][j]);
    step_inputs<P>(in, c, lines, x, s);
    const bool hold = MayHold && x.hold[s] != 0.f;
    const float* S = hist[s + 1];
    const float* Sp = hist[s];
#pragma unroll
    for (int i = 0; i < R; i++) {
      dS[i] = fmaf(q[i], dy, dS[i]);
      Pm[i] = P::Cell::squashes ? dS[i] * fmaf(-S[i], S[i], 1.f) : dS[i];
      if (MayHold && hold) Pm[i] = 0.f;
    }
    const float dwrite = line_sum<P::L>(dot<R>(kc, Pm));
    float dkeep = 0;
#pragma unroll
    for (int i = 0; i < R; i++) dkeep = fmaf(Pm[i], Sp[i], dkeep);
    if (!P::Cell::scalar_keep) dkeep = line_sum<P::L>(dkeep);
    const MatrixLine<float> w = P::Cell::template line<typename P::Math>(rs[s][0], in[0], c);
    const auto d = P::Cell::template line_backward<typename P::Math>(dkeep, dwrite, rs[s][0], in[0], c);
    keep_rows<P>(sm.p[s], Pm, j, at.rg);
#pragma unroll
    for (int i = 0; i < P::NS; i++) {
      const bool whole = i == 0 && P::Cell::scalar_keep;
      sm.dscalar[0][i][s][at.tl] = (whole || at.rg == 0) && !hold ? d.dc[i] : 0.f;
    }
    if (at.rg == 0) {
      sm.dr[s][j] = from_float<Hist>(hold ? 0.f : d.dr);
#pragma unroll
      for (int l = 0; l < P::NL; l++) sm.dline[0][l][s][j] = hold ? 0.f : d.din[l];
    }
#pragma unroll
    for (int i = 0; i < R; i++) {
      const float back = fmaf(kc[i], d.dr, w.keep * Pm[i]);
      dS[i] = hold ? dS[i] : back;
      kc[i] = kn[i], q[i] = qn[i];
    }
    dy = dyn;
  }
}

}  // namespace elman::matrix
