// One step of the recurrence on a state in registers: sums over a line, update, and how states come and go.
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

// Which rows of a lane a product on the tensor cores takes: as A at columns t and t + 4, as C at columns 2t and 2t + 1, h = 0 and 1. In C, column g of
// two products that follow each other (of one, where VW is 2) is a pair of adjacent elements of a vector (one).
template <class P>
__device__ __forceinline__ constexpr int row_at(int q, int h) {
  return P::large && P::VW == 4 ? q / 2 * 4 + q % 2 + 2 * h : 2 * q + h;
}
// S += a x^T of a large head, a sum of up to four such products: lane t of a line has the t-th vector a, in shared memory, and its x, tf32, of each line.
template <class P>
__device__ __forceinline__ void add_outer(float (&S)[P::E], const float (&x)[P::M], const float* a, int g) {
  constexpr int W = P::VW / 2;
#pragma unroll
  for (int n = 0; n < P::RV; n++) {
    float b[W];
    load<W>(b, a + (n * 8 + g) * W);
#pragma unroll
    for (int i = 0; i < W; i++) {
      const int low = row_at<P>(n * W + i, 0), high = row_at<P>(n * W + i, 1);
      mma_tf32(S[P::element(0, low)], S[P::element(0, high)], S[P::element(1, low)], S[P::element(1, high)], x[0], x[1], b[i]);
    }
  }
}

// Sums over the elements of a line. Products are issued by `line_products` and collected by `line_sums`, so that other work can stand between.
// Tensor form: four elements are an A fragment, what a lane gives for B is k at its own rows.
//   two lines a lane: rows g and g + 8 of A; columns of B may carry different vectors: c[2 m] is of even columns, c[2 m + 1] of odd ones
//   one: its odd rows are where the fragment has lines g + 8, and odd columns of B carry their k (as_b)
// chains: sums that products are added to, by turns. One for a state, whose elements come from tanh one after another; else each product has its own,
// unless that takes too many registers.
template <class P>
struct Products {
  static constexpr int all = P::tensor ? P::E / 4 : 1, chains = P::large ? 4 : all;
  float c[all][4];
};
template <class P>
__device__ __forceinline__ void as_b(float (&b)[P::R], const float (&k)[P::R], bool odd) {
#pragma unroll
  for (int i = 0; i < P::R; i++) b[i] = P::M == 2 ? k[i] : i < P::R / 2 ? (odd ? k[2 * i + 1] : k[2 * i]) : 0.f;
}
template <class P, int chains>
__device__ __forceinline__ void line_products(Products<P>& x, const float (&S)[P::E], const float (&b)[P::R]) {
  if constexpr (P::tensor) {
#pragma unroll
    for (int q = 0; q < P::E / 4; q++) {
      float (&c)[4] = x.c[q % chains];
      if (q < chains) c[0] = c[1] = c[2] = c[3] = 0;
      const int low = row_at<P>(q, 0), high = row_at<P>(q, 1);
      if constexpr (P::M == 2)
        mma_tf32(c, S[2 * low], S[2 * low + 1], S[2 * high], S[2 * high + 1], b[low], b[high]);
      else mma_tf32(c, S[4 * q], S[4 * q + 1], S[4 * q + 2], S[4 * q + 3], b[2 * q], b[2 * q + 1]);
    }
  } else {
    x.c[0][0] = dot<P::R>(b, S);
  }
}
template <class P, int chains>
__device__ __forceinline__ void line_sums(float (&r)[P::M], const Products<P>& x) {
  if constexpr (P::tensor) {
#pragma unroll
    for (int m = 0; m < P::M; m++) {
      float sum = P::M == 2 ? x.c[0][2 * m] : x.c[0][0] + x.c[0][3];
#pragma unroll
      for (int q = 1; q < chains; q++) sum += P::M == 2 ? x.c[q][2 * m] : x.c[q][0] + x.c[q][3];
      r[m] = P::Cell::backward_uses_r ? __fmul_rn(sum, kUncut) : sum * kUncut;  // contracted in all places or in none
    }
  } else {
    r[0] = line_sum<P::L>(x.c[0][0]);
  }
}
// With two lines a lane a state's products are chained.
template <class P>
__device__ __forceinline__ void state_products(Products<P>& x, const float (&S)[P::E], const float (&k)[P::R], bool odd) {
  if constexpr (P::tensor && P::M == 1) {
    float b[P::R];
    as_b<P>(b, k, odd);
    line_products<P, Products<P>::all>(x, S, b);
  } else {
    line_products<P, P::M == 2 ? 1 : Products<P>::all>(x, S, k);
  }
}
// What this step retrieves, from the products of the state and its k.
template <class P>
__device__ __forceinline__ void retrieved(float (&r)[P::M], const Products<P>& sum) {
  if constexpr (P::Cell::retrieves) {
    line_sums<P, P::M == 2 ? 1 : Products<P>::all>(r, sum);
  } else {
#pragma unroll
    for (int m = 0; m < P::M; m++) r[m] = 0;
  }
}

// One step of the recurrence from what it retrieved, the same code for the forward and for the replay.
template <class P, bool MayHold>
__device__ __forceinline__ void update(float (&S)[P::E], const float (&r)[P::M], const float (&k)[P::R],
                                       const float (&in)[P::M][P::NL], const float (&c)[P::NS], bool hold, float (&write)[P::M]) {
  MatrixLine<float> w[P::M];
#pragma unroll
  for (int m = 0; m < P::M; m++) {
    w[m] = P::Cell::template line<typename P::Math>(r[m], in[m], c);
    write[m] = MayHold && hold ? 0.f : w[m].write;
  }
  float x[P::E];
#pragma unroll
  for (int e = 0; e < P::E; e++) x[e] = fmaf(k[P::k_of(e)], w[P::line_of(e)].write, w[P::line_of(e)].keep * S[e]);
#pragma unroll
  for (int e = 0; e < P::E; e++) {
    if (P::Cell::squashes) x[e] = P::Math::tanh(x[e]);
    S[e] = MayHold && hold ? S[e] : x[e];
  }
}
// The same for a large head, `k` in shared memory: k write^T comes from the tensor cores, where `write` goes in two numbers, so that nothing is cut.
template <class P, bool MayHold>
__device__ __forceinline__ void update(float (&S)[P::E], const float (&r)[P::M], const float* k, const float (&in)[P::M][P::NL],
                                       const float (&c)[P::NS], bool hold, const Place<P>& at) {
  float x[P::E], write[P::M], keep[P::M];
#pragma unroll
  for (int m = 0; m < P::M; m++) {
    const auto w = P::Cell::template line<typename P::Math>(r[m], in[m], c);
    const float rest = cut_off(w.write), part = at.rg == 0 ? w.write : rest;
    keep[m] = w.keep, write[m] = at.rg < 2 ? part : 0.f;
  }
#pragma unroll
  for (int e = 0; e < P::E; e++) x[e] = keep[P::line_of(e)] * S[e];
  add_outer<P>(x, write, k, at.cg);
#pragma unroll
  for (int e = 0; e < P::E; e++) {
    if (P::Cell::squashes) x[e] = P::Math::tanh(x[e]);
    S[e] = MayHold && hold ? S[e] : x[e];
  }
}
// `sum` holds the products of S and this step's k.
template <class P, bool MayHold>
__device__ __forceinline__ void advance(float (&S)[P::E], const Products<P>& sum, const float (&k)[P::R],
                                        const float (&in)[P::M][P::NL], const float (&c)[P::NS], bool hold, float (&r)[P::M],
                                        float (&write)[P::M]) {
  retrieved<P>(r, sum);
  update<P, MayHold>(S, r, k, in, c, hold, write);
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
// `lines`: the first of this lane's, of step 0.
template <class P, class R>
__device__ __forceinline__ void step_inputs(float (&in)[P::M][P::NL], float (&c)[P::NS], const float* lines, const R& x,
                                            int s) {
#pragma unroll
  for (int l = 0; l < P::NL; l++) {
    float v[P::M];
    load<P::M>(v, lines + (l * kInterval + s) * P::CB);
#pragma unroll
    for (int m = 0; m < P::M; m++) in[m][l] = v[m];
  }
#pragma unroll
  for (int i = 0; i < P::NS; i++) c[i] = x.scalar[i][s];
}

}  // namespace elman::matrix
