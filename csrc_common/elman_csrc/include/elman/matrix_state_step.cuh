// One step of the recurrence on a state in registers: sums over a line, the update, and loads and stores of states.
#pragma once

#include "matrix_state_args.cuh"

namespace elman::matrix {

template <class P>
__device__ __forceinline__ void load_rows(float (&f)[P::R], const float* vec, int rg) {
#pragma unroll
  for (int m = 0; m < P::RV; m++) {
    float g[P::VW];
    load<P::VW>(g, vec + (m * P::L + rg) * P::VW);
#pragma unroll
    for (int e = 0; e < P::VW; e++) f[m * P::VW + e] = g[e];
  }
}

// A lane's part of B: its rows of k, or (outer) of every four rows the first two in even columns and the last two in odd ones.
template <class P>
__device__ __forceinline__ void load_for_products(float (&f)[P::R], const float* vec, int rg, bool odd) {
  if constexpr (P::outer) {
#pragma unroll
    for (int m = 0; m < P::R / 4; m++) {
      float g[2];
      load<2>(g, vec + (m * P::L + rg) * 4 + (odd ? 2 : 0));
      f[2 * m] = g[0], f[2 * m + 1] = g[1];
    }
  } else {
    load_rows<P>(f, vec, rg);
  }
}

// The same for a vector that not every cell has.
template <class P, bool there>
__device__ __forceinline__ void load_vector(float (&f)[P::R], const float* vec, int rg) {
  if constexpr (there) load_rows<P>(f, vec, rg);
}

// Sums over the elements of a line. Products are issued by `line_products` and collected by `line_sums`, so that other work can stand between.
// Tensor form: four elements are an A fragment, and a lane's part of B is k at its own rows.
//   two lines per lane: rows g and g + 8 of A; columns of B may hold different vectors: c[2 m] belongs to even columns, c[2 m + 1] to odd ones
//   one line per lane: its odd rows take the place of lines g + 8, and odd columns of B hold their k (as_b)
// chained: all products add to one sum. A state uses it, because its elements come from tanh one after another. Otherwise each product has its own sum.
template <class P>
struct Products {
  float c[P::tensor ? P::E / 4 : 1][4];
};
template <class P>
__device__ __forceinline__ void as_b(float (&b)[P::R], const float (&k)[P::R], bool odd) {
#pragma unroll
  for (int i = 0; i < P::R; i++) b[i] = P::M == 2 ? k[i] : i < P::R / 2 ? (odd ? k[2 * i + 1] : k[2 * i]) : 0.f;
}
template <class P, bool chained>
__device__ __forceinline__ void line_products(Products<P>& x, const float (&S)[P::E], const float (&b)[P::R]) {
  if constexpr (P::tensor) {
#pragma unroll
    for (int q = 0; q < P::E / 4; q++) {
      float (&c)[4] = x.c[chained ? 0 : q];
      if (!chained || q == 0) c[0] = c[1] = c[2] = c[3] = 0;
      mma_tf32(c, S[4 * q], S[4 * q + 1], S[4 * q + 2], S[4 * q + 3], b[2 * q], b[2 * q + 1]);
    }
  } else {
    x.c[0][0] = dot<P::R>(b, S);
  }
}
// The same for a lane's single line, with operands from load_for_products with `outer`.
template <class P>
__device__ __forceinline__ void half_products(Products<P>& x, const float (&S)[P::E], const float (&b)[P::R]) {
#pragma unroll
  for (int q = 0; q < P::E / 4; q++) {
    float (&c)[4] = x.c[q];
    c[0] = c[1] = c[2] = c[3] = 0;
    mma_tf32(c, S[4 * q], S[4 * q + 2], S[4 * q + 1], S[4 * q + 3], b[2 * q], b[2 * q + 1]);
  }
}
template <class P, bool chained>
__device__ __forceinline__ void line_sums(float (&r)[P::M], const Products<P>& x) {
  if constexpr (P::tensor) {
#pragma unroll
    for (int m = 0; m < P::M; m++) {
      float sum = P::M == 2 ? x.c[0][2 * m] : x.c[0][0] + x.c[0][3];
#pragma unroll
      for (int q = 1; q < (chained ? 1 : P::E / 4); q++) sum += P::M == 2 ? x.c[q][2 * m] : x.c[q][0] + x.c[q][3];
      r[m] = P::Cell::backward_uses_r ? __fmul_rn(sum, kUncut) : sum * kUncut;  // __fmul_rn: never contracted, so equal everywhere
    }
  } else {
    r[0] = line_sum<P::L>(x.c[0][0]);
  }
}
// With two lines per lane, a state's products are chained.
template <class P>
__device__ __forceinline__ void state_products(Products<P>& x, const float (&S)[P::E], const float (&k)[P::R], bool odd) {
  if constexpr (P::tensor && P::M == 1) {
    float b[P::R];
    as_b<P>(b, k, odd);
    line_products<P, false>(x, S, b);
  } else {
    line_products<P, P::M == 2>(x, S, k);
  }
}

// The cell's inputs for line m with state S.
template <class P>
__device__ __forceinline__ MatrixIn<float> given(float r, const float (&in)[P::NL], const float (&c)[P::AS],
                                                 const float (&par)[P::AC], const float (&S)[P::E], int m) {
  if constexpr (!P::Cell::energy) return {r, in, c, par};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < P::R; i++) sum = fmaf(S[P::element(m, i)], S[P::element(m, i)], sum);
  return {r, in, c, par, line_sum<P::L>(sum) * (1.f / P::N)};
}

// One step of the recurrence from its retrieved values; forward and replay use the same code. `kq`: the step's vectors.
template <class P, bool MayHold>
__device__ __forceinline__ void update(float (&S)[P::E], const float (&r)[P::M], const float (&k)[P::R], const float* kq, int rg,
                                       const float (&in)[P::M][P::NL], const float (&c)[P::AS], const Constants<P>& par, bool hold,
                                       float (&write)[P::writes][P::M]) {
  MatrixLine<float> w[P::M];
#pragma unroll
  for (int m = 0; m < P::M; m++) {
    w[m] = P::Cell::template line<typename P::Math, float>(given<P>(r[m], in[m], c, par[m], S, m));
    write[0][m] = MayHold && hold ? 0.f : w[m].write;
    if constexpr (P::seconds) write[1][m] = MayHold && hold ? 0.f : w[m].second;
  }
  float x[P::E], g[P::R], l[P::R];
  load_vector<P, P::keeps>(g, kq + P::at_g * P::Q, rg);
  load_vector<P, P::seconds>(l, kq + P::at_l * P::Q, rg);
#pragma unroll
  for (int e = 0; e < P::E; e++) {
    const int i = P::k_of(e), m = P::line_of(e);
    if constexpr (P::Cell::elementwise) x[e] = P::Cell::template element<typename P::Math>(S[e], k[i], w[m]);
    else x[e] = fmaf(k[i], w[m].write, w[m].keep * (P::keeps ? g[i] * S[e] : S[e]));
    if (P::seconds) x[e] = fmaf(l[i], w[m].second, x[e]);
  }
#pragma unroll
  for (int e = 0; e < P::E; e++) {
    if (squashes<typename P::Cell>(c)) x[e] = P::Math::tanh(x[e]);
    S[e] = MayHold && hold ? S[e] : x[e];
  }
}
// A document begins: sets S and what this step retrieves from it to zero. beside: other columns of `sum` are a readout, and stay.
template <class P, bool beside>
__device__ __forceinline__ void forget(float (&S)[P::E], Products<P>& sum) {
#pragma unroll
  for (int e = 0; e < P::E; e++) S[e] = 0;
#pragma unroll
  for (auto& c : sum.c) {
    c[0] = c[2] = 0;
    if (!beside) c[1] = c[3] = 0;
  }
}
// `sum` holds the products of S and this step's p.
template <class P, bool MayHold>
__device__ __forceinline__ void advance(float (&S)[P::E], const Products<P>& sum, const float (&k)[P::R], const float* kq, int rg,
                                        const float (&in)[P::M][P::NL], const float (&c)[P::AS], const Constants<P>& par, bool hold,
                                        float (&r)[P::M], float (&write)[P::writes][P::M]) {
  if constexpr (P::Cell::retrieves) {
    line_sums<P, P::M == 2>(r, sum);
  } else {
#pragma unroll
    for (int m = 0; m < P::M; m++) r[m] = 0;
  }
  update<P, MayHold>(S, r, k, kq, rg, in, c, par, hold, write);
}
// Backward through the elements of line m: from P to the gradients of S and k (which may be P itself); those of (keep, write, second) are added to dw.
template <class P>
__device__ __forceinline__ void elements(float (&of_s)[P::E], float (&of_k)[P::E], MatrixLine<float>& dw, const float (&Pm)[P::E],
                                         const float (&S)[P::E], const float (&k)[P::R], const MatrixLine<float>& w, int m) {
#pragma unroll
  for (int i = 0; i < P::R; i++) {
    const int e = P::element(m, i);
    const MatrixElement<float> d = P::Cell::template element_backward<typename P::Math>(Pm[e], S[e], k[i], w);
    of_s[e] = d.s, of_k[e] = d.k;
    dw = {dw.keep + d.line.keep, dw.write + d.line.write, dw.second + d.line.second};
  }
}
template <class P>
__device__ __forceinline__ void read_state(float (&S)[P::E], const float* from, const Place<P>& at, int64_t line, int64_t row) {
#pragma unroll
  for (int m = 0; m < P::M; m++)
#pragma unroll
    for (int i = 0; i < P::R; i++) {
      const int n = P::row_of(at.rg, i);
      S[P::element(m, i)] =
          from && at.mine(m) && n < P::N ? from[at.bh * (int64_t(P::N) * P::V) + at.line(m) * line + n * row] : 0.f;
    }
}
template <class P>
__device__ __forceinline__ void read_constants(Constants<P>& par, const float* const (&from)[kMostParams], const Place<P>& at) {
#pragma unroll
  for (int i = 0; i < P::NC; i++)
#pragma unroll
    for (int m = 0; m < P::M; m++) par[m][i] = at.mine(m) ? from[i][int64_t(at.h) * P::V + at.line(m)] : 0.f;
}
template <class P>
__device__ __forceinline__ void write_state(float* to, const float (&S)[P::E], const Place<P>& at, int64_t line, int64_t row) {
  if (!to) return;
#pragma unroll
  for (int m = 0; m < P::M; m++)
#pragma unroll
    for (int i = 0; i < P::R; i++) {
      const int n = P::row_of(at.rg, i);
      if (at.mine(m) && n < P::N) to[at.bh * (int64_t(P::N) * P::V) + at.line(m) * line + n * row] = S[P::element(m, i)];
    }
}

}  // namespace elman::matrix
