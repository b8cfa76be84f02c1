// A step of a large head, N > 32. The tensor cores also compute its update: S = keep S + k write^T is a rank-one product added
// to an fp32 accumulator. So not every lane needs its rows of k, and tanh is the bottleneck.
//
// A lane has lines 2 g and 2 g + 1, which are rows g and g + 8 of A and C. A product takes 8 rows of the state, two per lane: columns t and t + 4 of A,
// 2t and 2t + 1 of C.
#pragma once

#include "matrix_state_step.cuh"

namespace elman::matrix {

// Row of a lane in product q. In C, column g of VW / 2 products is as many adjacent elements of a vector.
template <class P>
__device__ __forceinline__ constexpr int row_at(int q, int h) {
  constexpr int W = P::VW / 2;
  return q / W * P::VW + q % W + h * W;
}
// A vector as operand of an update, one element per product.
template <class P>
using Columns = float[P::R / 2];
template <class P>
__device__ __forceinline__ void load_columns(Columns<P>& b, const float* vec, int g) {
  constexpr int W = P::VW / 2;
#pragma unroll
  for (int n = 0; n < P::RV; n++) {
    float x[W];
    load<W>(x, vec + (n * 8 + g) * W);
#pragma unroll
    for (int i = 0; i < W; i++) b[n * W + i] = x[i];
  }
}
// S += a x^T for up to four vectors a: lane t of a line has the t-th vector a and its x, in tf32, for both lines.
template <class P>
__device__ __forceinline__ void add_outer(float (&S)[P::E], const float (&x)[P::M], const Columns<P>& a) {
#pragma unroll
  for (int q = 0; q < P::R / 2; q++) {
    const int low = row_at<P>(q, 0), high = row_at<P>(q, 1);
    mma_tf32(S[P::element(0, low)], S[P::element(0, high)], S[P::element(1, low)], S[P::element(1, high)], x[0], x[1], a[q]);
  }
}
// Sums over the elements of a line, in `chains` shares: c[2 m] is line m times the vector in even columns of B, c[2 m + 1] times that in odd ones.
template <class P, int chains>
__device__ __forceinline__ void line_products(float (&c)[chains][4], const float (&S)[P::E], const float (&b)[P::R]) {
#pragma unroll
  for (int q = 0; q < P::R / 2; q++) {
    float (&to)[4] = c[q % chains];
    if (q < chains) to[0] = to[1] = to[2] = to[3] = 0;
    const int low = row_at<P>(q, 0), high = row_at<P>(q, 1);
    mma_tf32(to, S[P::element(0, low)], S[P::element(1, low)], S[P::element(0, high)], S[P::element(1, high)], b[low], b[high]);
  }
}

// The vectors of an update; each lane holds one: k in lanes 0 and 1 of a line, the second write's in the others.
template <class P>
__device__ __forceinline__ void load_written(Columns<P>& b, const float* kq, int g, int t) {
  if constexpr (P::seconds) load_columns<P>(b, t < 2 ? kq : kq + P::at_l * P::Q, g);
  else load_columns<P>(b, kq, g);
}
// A step, from its retrieved values; forward and replay use the same code. The tensor cores get `write` as two numbers, so that no digit is lost.
// k: from load_written. kq: the step's vectors.
template <class P, bool MayHold>
__device__ __forceinline__ void update(float (&S)[P::E], const float (&r)[P::M], const Columns<P>& k, const float* kq,
                                       const float (&in)[P::M][P::NL], const float (&c)[P::AS], const Constants<P>& par, bool hold,
                                       int t) {
  float x[P::E], write[P::M], kept[P::R];
  load_vector<P, P::keeps>(kept, kq + P::at_g * P::Q, t);
#pragma unroll
  for (int m = 0; m < P::M; m++) {
    const auto w = P::Cell::template line<typename P::Math, float>({r[m], in[m], c, par[m]});
    if constexpr (P::seconds) {
      const float mine = t < 2 ? w.write : w.second;
      write[m] = t % 2 ? cut_off(mine) : mine;
    } else {
      const float rest = cut_off(w.write), part = t == 0 ? w.write : rest;
      write[m] = t < 2 ? part : 0.f;
    }
#pragma unroll
    for (int i = 0; i < P::R; i++) {
      const int e = P::element(m, i);
      x[e] = w.keep * (P::keeps ? kept[i] * S[e] : S[e]);
    }
  }
  add_outer<P>(x, write, k);
#pragma unroll
  for (int e = 0; e < P::E; e++) {
    if (squashes<typename P::Cell>(c)) x[e] = P::Math::tanh(x[e]);
    S[e] = MayHold && hold ? S[e] : x[e];
  }
}

// The steps of a forward's segment, as Recur: retrieval of the next step and readout of this one are two columns of one
// product. Lane 0 of a line stores the last step's o, still to be multiplied by kUncut, and lane 1 this step's r.
template <class P>
struct RecurLarge {
  static constexpr int pitch = P::C + 4;
  static constexpr int to_r = P::buffers * P::WPH * P::steps * pitch;  // from o
  const Ready<P>& x;
  float* out;
  const float* lines;
  int g, t;
  const Constants<P>& par;
  float (&S)[P::E];
  float sum[1][4], in[P::M][P::NL], c[P::AS];  // the last two: for the next step, whose chain begins with them

  __device__ __forceinline__ RecurLarge(const Ready<P>& x, float (*out)[pitch], const Place<P>& at, const Constants<P>& par,
                                        float (&S)[P::E])
      : x(x),
        out(out[0] + at.cg * P::M + (at.rg == 1 ? to_r : -pitch)),
        lines(&x.line[0][0][at.column(0)]),
        g(at.cg),
        t(at.rg),
        par(par),
        S(S) {
    float k[P::R];
    load_rows<P>(k, x.kq[0] + P::at_p * P::Q, t);
    step_inputs<P>(in, c, lines, x, 0);
    line_products<P, 1>(sum, S, k);
  }
  __device__ __forceinline__ void give(int s, const float (&r)[P::M], bool has_r) {
    float y[P::M];
#pragma unroll
    for (int m = 0; m < P::M; m++) y[m] = t == 1 ? r[m] : sum[0][2 * m + 1];
    if (t == 0 ? s > 0 : t == 1 && has_r) store<P::M>(out + s * pitch, y);
  }
  __device__ __forceinline__ void readout(int s) { give(s + 1, {}, false); }
  template <bool MayHold>
  __device__ __forceinline__ void step(int s) {
    float both[P::R], now[P::M][P::NL], scalar[P::AS], r[P::M];
    Columns<P> k;
    load_written<P>(k, x.kq[s], g, t);
    const bool fresh = begins<P, MayHold>(x, s);
#pragma unroll
    for (int e = 0; e < P::E; e++) S[e] = fresh ? 0.f : S[e];
#pragma unroll
    for (int m = 0; m < P::M; m++) {
      r[m] = P::Cell::retrieves && !fresh ? sum[0][2 * m] * kUncut : 0.f;
#pragma unroll
      for (int l = 0; l < P::NL; l++) now[m][l] = in[m][l];
    }
#pragma unroll
    for (int i = 0; i < P::NS; i++) scalar[i] = c[i];
    step_inputs<P>(in, c, lines, x, min(s + 1, P::steps - 1));
    update<P, MayHold>(S, r, k, x.kq[s], now, scalar, par, MayHold && x.hold[s] != 0.f, t);
    give(s, r, true);
    load_rows<P>(both, x.kq[0] + (g & 1 ? P::Q : (P::slots + P::at_p) * P::Q) + s * P::slots * P::Q,
                 t);  // even columns: next step's p; odd: this step's q
    line_products<P, 1>(sum, S, both);
  }
};

}  // namespace elman::matrix
