// Backward over a segment with its sums on the tensor cores: bf16 storage and N <= 32.
#pragma once

#include "matrix_state_step.cuh"

namespace elman::matrix {

// The same in tensor form (lane (g, t): rows 2t, 2t + 1, ... of line g, or of lines g and g + 8). Sums over lines need lines and rows
// turned round: a product with a selection matrix does that, and its C fragment is the A fragment of a second product. So
//   replay: S; then dq = S^T dy, as dy is known
//   walk:   P = dS phi'; dwrite = P k as in line_dots; dS' = keep P + k dr + q' dy' in one product (dr in two halves of tf32 each, dy' of
//           the step before); dk = (P write + S' dr)^T 1, one step late, which fills the wait for the next dwrite.
template <class P, bool MayHold>
__device__ __forceinline__ void walk_tensor(BackwardShared<P>& sm, const Place<P>& at, const float (&S0)[P::E], float (&dS)[P::E]) {
  static_assert(P::VW == 2, "the rows of a fragment are taken to be 2t and 2t + 1");
  constexpr int R = P::R, M = P::M, E = P::E, Q = P::Q, CB = P::CB, NP = P::NP;
  const int g = at.cg, t = at.rg, odd = g & 1;
  const float* lines = &sm.x.line[0][0][at.column(0)];
  float hist[kInterval + 1][E];
  float select[2][4];
  {
    const float e0 = g == 2 * t ? 1.f : 0.f, e1 = g == 2 * t + 1 ? 1.f : 0.f;
    if (M == 1) {
      select[0][0] = e0, select[0][1] = 0, select[0][2] = e1, select[0][3] = 0;
      select[1][0] = 0, select[1][1] = e0, select[1][2] = 0, select[1][3] = e1;
    } else {
      select[0][0] = e0, select[0][1] = 0, select[0][2] = 0, select[0][3] = e0;
      select[1][0] = e1, select[1][1] = 0, select[1][2] = 0, select[1][3] = e1;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) select[i / 4][i % 4] = pinned(select[i / 4][i % 4], sm.zero);
  }
  // Sums over lines of X, weighted by b. The result of lane (g, t) is row 16 q + 8 (t & 1) + g, q = t / 2 (M = 1) or 8 q + g, q = t (M = 2).
  const bool upper = (g & 2) != 0;
  // In three stages, each a product that needs the one before: the program puts a step's other work between them.
  float turned[Q][4], total[Q][4];
  auto turn_first = [&](const float (&X)[E]) {
#pragma unroll
    for (int q = 0; q < Q; q++) {
      turned[q][0] = turned[q][1] = turned[q][2] = turned[q][3] = 0;
      mma_tf32(turned[q], select[0][0], select[0][1], select[0][2], select[0][3], X[4 * q], X[4 * q + 1]);
    }
  };
  auto turn_second = [&](const float (&X)[E]) {
#pragma unroll
    for (int q = 0; q < Q; q++)
      mma_tf32(turned[q], select[1][0], select[1][1], select[1][2], select[1][3], X[4 * q + 2], X[4 * q + 3]);
  };
  auto weigh = [&](float b0, float b1) {
#pragma unroll
    for (int q = 0; q < Q; q++) {
      total[q][0] = total[q][1] = total[q][2] = total[q][3] = 0;
      mma_tf32(total[q], turned[q][0], turned[q][1], turned[q][2], turned[q][3], b0, b1);
    }
  };
  auto result = [&] {
    float y = total[0][0] + total[0][3];
#pragma unroll
    for (int q = 1; q < Q; q++) y = (M == 1 ? t >= 2 * q : t == q) ? total[q][0] + total[q][3] : y;
    return y * kUncut;
  };
  const bool gives = (M == 1 ? 2 * Q : Q) >= 4 || t < (M == 1 ? 2 * Q : Q);
  float* sums = &sm.dkq[0][0][0] + pinned(at.tw * kInterval * 2 * NP + (M == 1 ? (t >> 1) * 16 + (t & 1) * 8 : t * 8) + g, sm.zero);
#pragma unroll
  for (int e = 0; e < E; e++) hist[0][e] = S0[e];
  {
    const float* dys = &sm.dy[0][0] + at.tw * P::C + 2 * t + odd;
    float kc[R];
    Products<P> sum;
    load_rows<P>(kc, sm.x.kq[0], t);
    retrieve<P>(sum, hist[0], kc, odd);
    auto weigh_dq = [&](int s) {
      float b0, b1;
      if (M == 1) {
        const float y = dys[s * CB];
        b0 = upper ? 0.f : y, b1 = upper ? y : 0.f;
      } else {
        b0 = dys[s * CB], b1 = dys[s * CB + (M == 1 ? 0 : 8)];
      }
      weigh(b0, b1);
    };
    auto give_dq = [&](int s) {
      const float dq = result();
      if (gives) sums[s * 2 * NP + NP] = dq;
    };
#pragma unroll
    for (int s = 0; s < kInterval; s++) {
      float kn[R], in[M][P::NL], c[P::NS], r[M], write[M];
      load_rows<P>(kn, sm.x.kq[s + 1 < kInterval ? s + 1 : s], t);
      step_inputs<P>(in, c, lines, sm.x, s);
#pragma unroll
      for (int e = 0; e < E; e++) hist[s + 1][e] = hist[s][e];
      advance<P, MayHold>(hist[s + 1], sum, kc, in, c, MayHold && sm.x.hold[s] != 0.f, r, write, [&] {
        if (s > 0) turn_second(hist[s]);
        if (s > 1) give_dq(s - 2);
      });
      if (s > 0) weigh_dq(s - 1);
      if (s + 1 < kInterval) retrieve<P>(sum, hist[s + 1], kn, odd);
      turn_first(hist[s + 1]);
      if (t == 0)
#pragma unroll
        for (int m = 0; m < M; m++) {
          sm.write[s][at.column(m)] = write[m];
          if (P::Cell::backward_uses_r) sm.retrieved[s][at.column(m)] = r[m];
        }
#pragma unroll
      for (int i = 0; i < R; i++) kc[i] = kn[i];
    }
    turn_second(hist[kInterval]);
    give_dq(kInterval - 2);
    weigh_dq(kInterval - 1);
    give_dq(kInterval - 1);
  }
  __syncwarp();
  const float* row = sm.x.before + pinned(t < 2 ? NP + g : g, sm.zero);  // of step s: k_s, or q_{s-1}
  const float* dys =
      sm.zero + pinned(t == 2 ? int(&sm.dy[0][0] - sm.zero) + at.column(0) : at.column(0), sm.zero);  // zero but for t = 2
  const float takes_high = pinned(t == 0 ? 1.f : 0.f, sm.zero), takes_low = pinned(t == 1 ? 1.f : 0.f, sm.zero);
  float x[4] = {0, 0, 0, 0}, one[2] = {M == 1 && upper ? 0.f : 1.f, M == 1 && !upper ? 0.f : 1.f};
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = pinned(x[i], sm.zero);
  one[0] = pinned(one[0], sm.zero), one[1] = pinned(one[1], sm.zero);
  auto rank_one = [&](const float* b) {  // dS += k dr + q' dy': x is dr in lanes t = 0, 1 and dy' in t = 2
#pragma unroll
    for (int q = 0; q < Q; q++) {
      float c[4] = {dS[4 * q], dS[4 * q + 1], dS[4 * q + 2], dS[4 * q + 3]};
      if (M == 1) mma_tf32(c, x[0], x[1], x[2], x[3], b[16 * q], b[16 * q + 8]);
      else mma_tf32(c, x[0], x[1], x[2], x[3], b[8 * q], 0.f);
#pragma unroll
      for (int e = 0; e < 4; e++) dS[4 * q + e] = c[e];
    }
  };
  auto set_x = [&](int m, float y) {
    x[M == 1 ? 0 : m] = y;
    if (M == 1) x[3] = y;
  };
#pragma unroll
  for (int m = 0; m < M; m++) set_x(m, dys[(kInterval - 1) * CB + m * 8]);
  rank_one(sm.x.kq[kInterval - 1] + NP + g);
  float b[R], X[E];
  load_b<P>(b, sm.x.kq[kInterval - 1], t, odd);
#pragma unroll
  for (int s = kInterval - 1; s >= 0; s--) {
    float bn[R], in[M][P::NL], c[P::NS], dwrite[M], Pm[E], write[M], dyp[M], r[M];
    if (s > 0) load_b<P>(bn, sm.x.kq[s > 0 ? s - 1 : 0], t, odd);
#pragma unroll
    for (int m = 0; m < M; m++) {
      dyp[m] = s > 0 ? dys[(s - 1) * CB + m * 8] : 0.f;
      write[m] = sm.write[s][at.column(m)];
      r[m] = P::Cell::backward_uses_r ? sm.retrieved[s][at.column(m)] : 0.f;
    }
    step_inputs<P>(in, c, lines, sm.x, s);
    const bool hold = MayHold && sm.x.hold[s] != 0.f;
#pragma unroll
    for (int e = 0; e < E; e++) {
      const float S = hist[s + 1][e], d = dS[P::c_of(e)];
      Pm[e] = P::Cell::squashes ? d * fmaf(-S, S, 1.f) : d;
      if (MayHold && hold) Pm[e] = 0.f;
    }
    Products<P> sum;
    line_products<P>(sum, Pm, b);
    if (s + 1 < kInterval) turn_second(X);
    float dkeep[M], dscalar[P::NS];
#pragma unroll
    for (int e = 0; e < E; e++) dkeep[P::line_of(e)] = e < M ? Pm[e] * hist[s][e] : fmaf(Pm[e], hist[s][e], dkeep[P::line_of(e)]);
    line_sums<P>(dwrite, sum);
    MatrixLine<float> w[M];
    float dr[M];
#pragma unroll
    for (int m = 0; m < M; m++) {
      if (!P::Cell::scalar_keep) dkeep[m] = line_sum<4>(dkeep[m]);
      w[m] = P::Cell::template line<typename P::Math>(r[m], in[m], c);
      const auto d = P::Cell::template line_backward<typename P::Math>(dkeep[m], dwrite[m], r[m], in[m], c);
      dr[m] = hold ? 0.f : d.dr;
      const float high = __uint_as_float(__float_as_uint(dr[m]) & 0xffffe000u);
      set_x(m, fmaf(dr[m] - high, takes_low, fmaf(high, takes_high, dyp[m])));  // no branch, though it looks like three
#pragma unroll
      for (int i = 0; i < P::NS; i++) {
        const float y = (i == 0 && P::Cell::scalar_keep) || t == 0 ? d.dc[i] : 0.f;
        dscalar[i] = m == 0 ? y : dscalar[i] + y;
      }
      if (t == 0)
#pragma unroll
        for (int l = 0; l < P::NL; l++) sm.dline[l][s][at.column(m)] = hold ? 0.f : d.din[l];
    }
#pragma unroll
    for (int e = 0; e < E; e++) dS[P::c_of(e)] = hold ? dS[P::c_of(e)] : w[P::line_of(e)].keep * Pm[e];
    rank_one(row + s * 2 * NP);
    if (s + 1 < kInterval) weigh(one[0], one[1]);
#pragma unroll
    for (int e = 0; e < E; e++) X[e] = fmaf(hist[s][e], dr[P::line_of(e)], Pm[e] * write[P::line_of(e)]);
    turn_first(X);
    if (s + 1 < kInterval) {
      const float dk = result();
      if (gives) sums[(s + 1) * 2 * NP] = dk;
    }
#pragma unroll
    for (int i = 0; i < P::NS; i++) sm.dscalar[i][s][at.tl] = hold ? 0.f : dscalar[i];
#pragma unroll
    for (int i = 0; i < R; i++) b[i] = bn[i];
  }
  turn_second(X);
  weigh(one[0], one[1]);
  const float dk = result();
  if (gives) sums[0] = dk;
}

}  // namespace elman::matrix
