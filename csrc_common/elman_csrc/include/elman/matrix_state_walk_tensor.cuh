// Backward over a segment where the tensor cores do the sums: only what the chain of dS needs stands between two steps.
//
//   replay: S, and what was written, in registers
//   walk:   P = dS phi';  dwrite = P k by products as in the forward;  dS' = (keep P + q' dy') + k dr, where the bracket does not wait for dr
//   dq_{s-1} and dk_s, off the chain:  (S_s)^T [dy_{s-1}, dr_s] + P_s^T [0, write_s]
//
// with S_s the state before step s. For these sums over lines, fragments of 8 lines x 8 rows are cut to bf16, transposed among the lanes
// (movmatrix) and are A of m16n8k16 (two lines a lane) or m16n8k8. A lane packs its line's (dy, dr) the same way: transposed, that is
// B with dy in even columns and dr in odd ones. Errors are those of bf16 operands with fp32 sums.
#pragma once

#include "matrix_state_step.cuh"

namespace elman::matrix {

__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&x);
}

// dq and dk of one step: sums over this warp's lines. Rows come as the fragments leave them: tile q, row g of either half (row_of_sum).
template <class P>
struct LineSums {
  static constexpr int pairs = P::R / 2, tiles = (pairs + 1) / 2;  // of rows of a lane; of 16 rows
  float c[tiles][4];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int q = 0; q < tiles; q++) c[q][0] = c[q][1] = c[q][2] = c[q][3] = 0;
  }
  // Adds X^T [even, odd] for this warp's lines of X; `even` and `odd` are the lane's own weights.
  __device__ __forceinline__ void add(const float (&X)[P::E], const float (&even)[P::M], const float (&odd)[P::M]) {
    unsigned b[P::M], turned[P::M][2 * tiles];
#pragma unroll
    for (int m = 0; m < P::M; m++) {
      b[m] = transposed(pack_bf16(even[m], odd[m]));
#pragma unroll
      for (int j = 0; j < 2 * tiles; j++)
        turned[m][j] =
            j < pairs ? transposed(pack_bf16(X[P::element(m, j < pairs ? 2 * j : 0)], X[P::element(m, j < pairs ? 2 * j + 1 : 0)]))
                      : 0u;
    }
#pragma unroll
    for (int q = 0; q < tiles; q++) {
      if constexpr (P::M == 2) {
        const unsigned a[4] = {turned[0][2 * q], turned[0][2 * q + 1], turned[1][2 * q], turned[1][2 * q + 1]};
        mma_bf16(c[q], a, b[0], b[1]);
      } else {
        mma_bf16_k8(c[q], turned[0][2 * q], turned[0][2 * q + 1], b[0]);
      }
    }
  }
  // Lane t gives dq of row g (t = 0), dk of row g (1), dq of row g of the upper half (2), dk of it (3).
  __device__ __forceinline__ float mine(int q, int t) const {
    const float low = t & 1 ? c[q][1] : c[q][0], high = t & 1 ? c[q][3] : c[q][2];
    return t & 2 ? high : low;
  }
  static __device__ __forceinline__ int row(int q, int upper, int g) {  // of the state
    const int i = 2 * (2 * q + upper) + (g & 1);  // of the lane g / 2
    return P::row_of(g >> 1, i);
  }
};

template <class P, bool MayHold>
__device__ __forceinline__ void walk_tensor(BackwardShared<P>& sm, const Place<P>& at, const float (&S0)[P::E], float (&dS)[P::E]) {
  constexpr int R = P::R, M = P::M, E = P::E, CB = P::CB, NP = P::NP;
  using Sums = LineSums<P>;
  const int g = at.cg, t = at.rg, odd = g & 1;
  const float* lines = &sm.x.line[0][0][at.column(0)];
  float hist[kInterval + 1][E], S[E], Sp[E], written[kInterval][M], retrieved[kInterval][M];
#pragma unroll
  for (int e = 0; e < E; e++) S[e] = hist[0][e] = S0[e];
  {
    float kc[R];
    Products<P> sum;
    load_rows<P>(kc, sm.x.kq[0], t);
    retrieve_state<P>(sum, S, kc, sm.x, 0, t, odd);
#pragma unroll
    for (int s = 0; s < kInterval; s++) {
      float kn[R], in[M][P::NL], c[P::NS];
      load_rows<P>(kn, sm.x.kq[s + 1 < kInterval ? s + 1 : s], t);
      step_inputs<P>(in, c, lines, sm.x, s);
      advance<P, MayHold>(S, sum, kc, in, c, MayHold && sm.x.hold[s] != 0.f, retrieved[s], written[s]);
      if (s + 1 < kInterval) retrieve_state<P>(sum, S, kn, sm.x, s + 1, t, odd);
#pragma unroll
      for (int e = 0; e < E; e++) hist[s + 1][e] = S[e];
#pragma unroll
      for (int i = 0; i < R; i++) kc[i] = kn[i];
    }
  }
  // Where this lane's share of a step's sums goes: dk of the step, dq of the one before.
  float* sums = &sm.dkq[at.tw][0][0] + (t & 1 ? 0 : NP - 2 * NP);
  auto give = [&](const Sums& x, int s, bool dq, bool dk) {
#pragma unroll
    for (int q = 0; q < Sums::tiles; q++)
      if ((t & 1 ? dk : dq) && (2 * q + 1 < Sums::pairs || !(t & 2))) sums[s * 2 * NP + Sums::row(q, t >> 1, g)] = x.mine(q, t);
  };
  const float* dys = &sm.dy[0][at.column(0)];
  const float none[2] = {0.f, 0.f};
  float dy[M], kc[R];
#pragma unroll
  for (int m = 0; m < M; m++) dy[m] = dys[(kInterval - 1) * CB + m * 8];
  {
    float q[R], zero[M];
    load_rows<P>(q, sm.x.kq[kInterval - 1] + NP, t);
#pragma unroll
    for (int e = 0; e < E; e++) dS[e] = fmaf(q[P::k_of(e)], dy[P::line_of(e)], dS[e]);
    Sums last;
    last.clear();
#pragma unroll
    for (int m = 0; m < M; m++) zero[m] = none[m];
    last.add(S, dy, zero);
    give(last, kInterval, true, false);
  }
  load_rows<P>(kc, sm.x.kq[kInterval - 1], t);
#pragma unroll
  for (int s = kInterval - 1; s >= 0; s--) {
    const int before = s > 0 ? s - 1 : 0;
    float kn[R], q[R], in[M][P::NL], c[P::NS], Pm[E], base[E], dwrite[M], dkeep[M], dr[M], dscalar[P::NS], zero[M];
    Products<P> sum;
#pragma unroll
    for (int e = 0; e < E; e++) Sp[e] = hist[s][e];
    load_rows<P>(kn, sm.x.kq[before], t);
    load_rows<P>(q, sm.x.kq[before] + NP, t);
    step_inputs<P>(in, c, lines, sm.x, s);
    const bool hold = MayHold && sm.x.hold[s] != 0.f;
#pragma unroll
    for (int m = 0; m < M; m++) dy[m] = s > 0 ? dys[before * CB + m * 8] : 0.f, zero[m] = 0.f;
#pragma unroll
    for (int e = 0; e < E; e++) {
      Pm[e] = P::Cell::squashes ? dS[e] * fmaf(-S[e], S[e], 1.f) : dS[e];
      if (MayHold && hold) Pm[e] = 0.f;
    }
    retrieve<P, true>(sum, Pm, kc, odd);
    MatrixLine<float> w[M];
#pragma unroll
    for (int m = 0; m < M; m++) {
      if constexpr (!P::Cell::backward_uses_r) retrieved[s][m] = 0.f;
      w[m] = P::Cell::template line<typename P::Math>(retrieved[s][m], in[m], c);
    }
#pragma unroll
    for (int e = 0; e < E; e++) {
      const int m = P::line_of(e);
      const float rest = MayHold && hold ? dS[e] : w[m].keep * Pm[e];
      base[e] = fmaf(q[P::k_of(e)], dy[m], rest);
      dkeep[m] = e < M ? Pm[e] * Sp[e] : fmaf(Pm[e], Sp[e], dkeep[m]);
    }
    line_sums<P>(dwrite, sum);
#pragma unroll
    for (int m = 0; m < M; m++) {
      if (!P::Cell::scalar_keep) dkeep[m] = line_sum<4>(dkeep[m]);
      const auto d = P::Cell::template line_backward<typename P::Math>(dkeep[m], dwrite[m], retrieved[s][m], in[m], c);
      dr[m] = hold ? 0.f : d.dr;
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
    for (int e = 0; e < E; e++) dS[e] = fmaf(kc[P::k_of(e)], dr[P::line_of(e)], base[e]);
    Sums x;
    x.clear();
    x.add(Pm, zero, written[s]);
    x.add(Sp, dy, dr);
    give(x, s, s > 0, true);
#pragma unroll
    for (int i = 0; i < P::NS; i++) sm.dscalar[i][s][at.tl] = hold ? 0.f : dscalar[i];
#pragma unroll
    for (int e = 0; e < E; e++) S[e] = Sp[e];
#pragma unroll
    for (int i = 0; i < R; i++) kc[i] = kn[i];
  }
}

}  // namespace elman::matrix
