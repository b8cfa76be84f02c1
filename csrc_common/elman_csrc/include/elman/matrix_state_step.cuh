// One step of the recurrence on a state in registers: sums over a line, update, and how states come and go.
#pragma once

#include "matrix_state_half.cuh"

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

// Sums over the elements of a line, complete in every lane of it (or, with `b` zero in some columns, in the lanes of the others).
// Tensor form: a quad of elements is an A fragment; what a lane gives for B (as_b) is k at its own rows. With one line a lane the rows 2t + 1
// sit where the fragment has lines g + 8, and odd columns of B carry their k.
// Products are issued by `line_products` and collected by `line_sums`, so that other work can stand between.
template <class P>
struct Products {
  float c[P::tensor && !P::merged ? P::Q : 1][4];
};
template <class P>
__device__ __forceinline__ void line_products(Products<P>& x, const float (&S)[P::E], const float (&b)[P::R]) {
  if constexpr (P::merged) {
    x.c[0][0] = x.c[0][1] = x.c[0][2] = x.c[0][3] = 0;
#pragma unroll
    for (int q = 0; q < P::Q; q++) mma_tf32(x.c[0], S[4 * q], S[4 * q + 1], S[4 * q + 2], S[4 * q + 3], b[2 * q], b[2 * q + 1]);
  } else if constexpr (P::tensor) {
#pragma unroll
    for (int q = 0; q < P::Q; q++) {
      x.c[q][0] = x.c[q][1] = x.c[q][2] = x.c[q][3] = 0;
      mma_tf32(x.c[q], S[4 * q], S[4 * q + 1], S[4 * q + 2], S[4 * q + 3], b[2 * q], b[2 * q + 1]);
    }
  } else {
    x.c[0][0] = dot<P::R>(b, S);
  }
}
template <class P>
__device__ __forceinline__ void line_sums(float (&r)[P::M], const Products<P>& x, int column = 0) {  // column 1: of odd columns
  if constexpr (P::merged) {
#pragma unroll
    for (int m = 0; m < P::M; m++)
      r[m] = P::Cell::backward_uses_r ? __fmul_rn(x.c[0][2 * m + column], kUncut) : x.c[0][2 * m + column] * kUncut;
  } else if constexpr (P::tensor) {
    float sum[2] = {P::M == 1 ? x.c[0][0] + x.c[0][3] : x.c[0][0], x.c[0][2]};
#pragma unroll
    for (int q = 1; q < P::Q; q++) sum[0] += P::M == 1 ? x.c[q][0] + x.c[q][3] : x.c[q][0], sum[1] += x.c[q][2];
#pragma unroll
    for (int m = 0; m < P::M; m++)
      r[m] = P::Cell::backward_uses_r ? __fmul_rn(sum[m], kUncut) : sum[m] * kUncut;  // contracted in all places or in none
  } else {
    r[0] = line_sum<P::L>(x.c[0][0]);
  }
}
template <class P>
__device__ __forceinline__ void as_b(float (&b)[P::R], const float (&k)[P::R], bool odd) {
#pragma unroll
  for (int i = 0; i < P::R; i++)
    b[i] = !P::tensor || P::M == 2 ? k[i]
           : i < P::R / 2          ? (odd ? k[2 * i + 1 < P::R ? 2 * i + 1 : 0] : k[2 * i < P::R ? 2 * i : 0])
                                   : 0.f;
}
// The same straight from memory: one line a lane gives its even rows in even columns, its odd ones in odd columns.
template <class P>
__device__ __forceinline__ void load_b(float (&b)[P::R], const float* row, int rg, int odd) {
  if constexpr (P::tensor && P::M == 1) {
#pragma unroll
    for (int i = 0; i < P::R / 2; i++)
      b[i] = row[P::VW == 2 ? 8 * i + 2 * rg + odd : P::row_of(rg, 2 * i) + odd];  // narrow loads: wider ones made the steps longer
  } else {
    load_rows<P>(b, row, rg);
  }
}

// The sums of the state itself: as line_sums, or as float16 products left them.
template <class P>
__device__ __forceinline__ void state_sums(float (&r)[P::M], const Products<P>& x, int column = 0) {
  if constexpr (P::half) {
#pragma unroll
    for (int m = 0; m < P::M; m++) r[m] = P::M == 2 ? x.c[0][2 * m + column] : x.c[0][0] + x.c[0][3];
  } else {
    line_sums<P>(r, x, column);
  }
}

// One step of the recurrence, the same code for the forward and for the replay. `sum` holds the products of S and this step's k.
struct Nothing {
  __device__ __forceinline__ void operator()() const {}
};
template <class P, bool MayHold, class Between = Nothing>
__device__ __forceinline__ void advance(float (&S)[P::E], const Products<P>& sum, const float (&k)[P::R],
                                        const float (&in)[P::M][P::NL], const float (&c)[P::NS], bool hold, float (&r)[P::M],
                                        float (&write)[P::M], Between between = {}) {
  MatrixLine<float> w[P::M];
  if constexpr (P::Cell::retrieves) state_sums<P>(r, sum);
#pragma unroll
  for (int m = 0; m < P::M; m++) {
    if (!P::Cell::retrieves) r[m] = 0;
    w[m] = P::Cell::template line<typename P::Math>(r[m], in[m], c);
    write[m] = MayHold && hold ? 0.f : w[m].write;
  }
  float x[P::E];
#pragma unroll
  for (int e = 0; e < P::E; e++) x[e] = fmaf(k[P::k_of(e)], w[P::line_of(e)].write, w[P::line_of(e)].keep * S[e]);
  between();
#pragma unroll
  for (int e = 0; e < P::E; e++) {
    if (P::Cell::squashes) x[e] = P::Math::tanh(x[e]);
    S[e] = MayHold && hold ? S[e] : x[e];
  }
}
template <class P, bool always = false>
__device__ __forceinline__ void retrieve(Products<P>& sum, const float (&S)[P::E], const float (&k)[P::R], bool odd) {
  if constexpr (P::Cell::retrieves || always) {
    float b[P::R];
    as_b<P>(b, k, odd);
    line_products<P>(sum, S, b);
  }
}

// Products of the state with k of step s, which is also in registers.
template <class P>
__device__ __forceinline__ void retrieve_state(Products<P>& sum, const float (&S)[P::E], const float (&k)[P::R], const Ready<P>& x,
                                               int s, int t, bool odd) {
  if constexpr (P::half) {
    HalfB<P> b;
    load_half_b<P>(b, x.half[s], t, odd);
    half_products<P>(sum.c[0], S, b);
  } else {
    retrieve<P>(sum, S, k, odd);
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
template <class P>
__device__ __forceinline__ void step_inputs(float (&in)[P::M][P::NL], float (&c)[P::NS], const float* lines, const Ready<P>& x,
                                            int s) {
#pragma unroll
  for (int m = 0; m < P::M; m++)
#pragma unroll
    for (int l = 0; l < P::NL; l++) in[m][l] = lines[(l * kInterval + s) * P::CB + m * 8];
#pragma unroll
  for (int i = 0; i < P::NS; i++) c[i] = x.scalar[i][s];
}

}  // namespace elman::matrix
