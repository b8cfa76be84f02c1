// Products beside the recurrence of a backward: sums over lines, diagonals and outer products.
#pragma once

#include "matrix_state_step.cuh"

namespace elman::matrix {

template <class P>
__device__ __forceinline__ unsigned pack_stored(float low, float high) {
  return pack(low, high, typename P::Store());
}

// Writes of a segment's steps, in 16 bits, two per word: both lines of a lane, or two steps of its single line.
template <class P>
struct Written {
  unsigned x[kInterval * P::M / 2];
  float even = 0;
  __device__ __forceinline__ void set(int s, const float (&write)[P::M]) {
    if (P::M == 2) x[s] = pack_stored<P>(write[0], write[P::M - 1]);
    else if (s % 2) x[s / 2] = pack_stored<P>(even, write[0]);
    else even = write[0];
  }
  // (0, the write of step s into line m).
  __device__ __forceinline__ unsigned at(int s, int m) const {
    const unsigned both = x[P::M == 2 ? s : s / 2];
    return (P::M == 2 ? m : s % 2) ? both & 0xffff0000u : both << 16;
  }
};

// Sums over lines are columns of products, two from each lane t of a line: dq and dk; dp and dg; dl and nothing. Lanes beyond these repeat them.
template <class P>
constexpr int kPairs = P::NX == 0   ? 1
                       : P::seconds ? 4
                                    : 2;

// For each line of a lane, the dot product of two lines: the diagonal of a product. Only lane t = g / 2 of the four has it. Words of two rows.
template <class P>
__device__ __forceinline__ void diagonal(float (&sum)[P::M], const unsigned (&X)[P::M][P::R / 2],
                                         const unsigned (&Y)[P::M][P::R / 2], int g) {
  if constexpr (P::M == 1) {  // one half of either product counts
    static_assert(P::R == 8);
    float c[2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; i++) mma_16x8x16<typename P::Store>(c[i], X[0], Y[0][i], Y[0][2 + i]);
    sum[0] = g % 2 ? c[0][1] + c[1][3] : c[0][0] + c[1][2];
  } else {
    constexpr int pairs = P::R / 2;
#pragma unroll
    for (int m = 0; m < P::M; m++) {
      float c[4] = {};
#pragma unroll
      for (int j = 0; j < pairs; j += 2) {
        const bool whole = j + 1 < pairs;
        const int o = whole ? j + 1 : j;
        const unsigned a[4] = {X[0][j], X[1][j], whole ? X[0][o] : 0u, whole ? X[1][o] : 0u};
        mma_16x8x16<typename P::Store>(c, a, Y[m][j], whole ? Y[m][o] : 0u);
      }
      sum[m] = g % 2 ? c[2 * m + 1] : c[2 * m];
    }
  }
}
// The same in tf32, with one line per lane.
template <class P>
__device__ __forceinline__ float diagonal(const float (&X)[P::E], const float (&Y)[P::E], int g) {
  float c[2][4] = {};
#pragma unroll
  for (int e = 0; e < P::E; e += 4)
#pragma unroll
    for (int i = 0; i < 2; i++) mma_tf32(c[i], X[e], X[e + 2], X[e + 1], X[e + 3], Y[e + 2 * i], Y[e + 2 * i + 1]);
  return (g % 2 ? c[0][1] + c[1][3] : c[0][0] + c[1][2]) * (kUncut * kUncut);
}
// x += y vec, with y a number of the lane's single line, as products. Of every four rows, column t = 0 of A gives the first two and t = 1 the last two;
// t = 2 and 3 add the digits of y that the tensor cores cut off.
template <class P>
struct Outer {
  int g, t;
  float one[2], whole[2];
  unsigned cut[2];
  __device__ __forceinline__ Outer(int g, int t) : g(g), t(t) {
    static_assert(P::M == 1 && P::VW == 4);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      one[i] = t == i ? 1.f : 0.f, whole[i] = t % 2 == i ? 1.f : 0.f, cut[i] = t == 2 + i ? 0xffffe000u : 0u;
    }
    ptx::pin(whole[0]), ptx::pin(whole[1]), ptx::pin(one[0]), ptx::pin(one[1]), ptx::pin(cut[0]), ptx::pin(cut[1]);
  }
  // Start of this lane's B in a vector.
  __device__ __forceinline__ int at() const { return 4 * (g >> 1) + (g & 1) + 2 * (t & 1); }
  // A lane's part of A, for a y that fits tf32 and for any y.
  __device__ __forceinline__ void exact(float (&a)[2], float y) const { a[0] = y * one[0], a[1] = y * one[1]; }
  __device__ __forceinline__ void any(float (&a)[2], float y) const {
#pragma unroll
    for (int i = 0; i < 2; i++) a[i] = fmaf(y, whole[i], -__uint_as_float(__float_as_uint(y) & cut[i]));
  }
  __device__ __forceinline__ void add(float (&x)[P::E], const float* vec, const float (&a)[2]) const {
#pragma unroll
    for (int e = 0; e < P::E; e += 4) mma_tf32(x[e], x[e + 1], x[e + 2], x[e + 3], a[0], a[1], vec[at() + 4 * e]);
  }
  // Two vectors in one product.
  __device__ __forceinline__ void add(float (&x)[P::E], const float* vec, const float (&a)[2], const float* more,
                                      const float (&b)[2]) const {
#pragma unroll
    for (int e = 0; e < P::E; e += 4) {
      float c[4] = {x[e], x[e + 1], x[e + 2], x[e + 3]};
      mma_tf32(c, a[0], a[1], b[0], b[1], vec[at() + 4 * e], more[at() + 4 * e]);
#pragma unroll
      for (int i = 0; i < 4; i++) x[e + i] = c[i];
    }
  }
};

struct Nothing {  // replaces Outer if updates are not products
  __device__ Nothing(int, int) {}
};

// dq and dk of one step: sums over this warp's lines. Rows keep the order of the fragments: tile q, row g of either half.
template <class P>
struct LineSums {
  static constexpr int pairs = P::R / 2, tiles = (pairs + 1) / 2;  // pairs of a lane's rows; tiles of 16 rows
  float c[tiles][4];
  using Fragments = unsigned[P::M][2 * tiles];

  static __device__ __forceinline__ void words(unsigned (&to)[P::M][pairs], const float (&X)[P::E]) {
#pragma unroll
    for (int m = 0; m < P::M; m++)
#pragma unroll
      for (int j = 0; j < pairs; j++) to[m][j] = pack_stored<P>(X[P::element(m, 2 * j)], X[P::element(m, 2 * j + 1)]);
  }
  static __device__ __forceinline__ void turn(Fragments& to, const unsigned (&X)[P::M][pairs]) {
#pragma unroll
    for (int m = 0; m < P::M; m++)
#pragma unroll
      for (int j = 0; j < 2 * tiles; j++) to[m][j] = j < pairs ? transposed(X[m][j < pairs ? j : 0]) : 0u;
  }
  static __device__ __forceinline__ void turn(Fragments& to, const float (&X)[P::E]) {
    unsigned x[P::M][pairs];
    words(x, X);
    turn(to, x);
  }
  // X^T x + Y^T y over this warp's lines. x, y: transposed pairs of weights of each line, for even and odd columns.
  __device__ __forceinline__ void set(const Fragments& X, const unsigned (&x)[P::M], const Fragments& Y,
                                      const unsigned (&y)[P::M]) {
#pragma unroll
    for (int q = 0; q < tiles; q++) {
      c[q][0] = c[q][1] = c[q][2] = c[q][3] = 0;
      if constexpr (P::M == 2) {
        const unsigned a[4] = {X[0][2 * q], X[0][2 * q + 1], X[1][2 * q], X[1][2 * q + 1]};
        const unsigned b[4] = {Y[0][2 * q], Y[0][2 * q + 1], Y[1][2 * q], Y[1][2 * q + 1]};
        mma_16x8x16<typename P::Store>(c[q], a, x[0], x[1]);
        mma_16x8x16<typename P::Store>(c[q], b, y[0], y[1]);
      } else {
        const unsigned a[4] = {X[0][2 * q], X[0][2 * q + 1], Y[0][2 * q], Y[0][2 * q + 1]};
        mma_16x8x16<typename P::Store>(c[q], a, x[0], y[0]);
      }
    }
  }
  // The same for one X, in words of two rows, added to the sum.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int q = 0; q < tiles; q++) c[q][0] = c[q][1] = c[q][2] = c[q][3] = 0;
  }
  __device__ __forceinline__ void add(const unsigned (&X)[P::M][pairs], const unsigned (&x)[P::M]) {
#pragma unroll
    for (int q = 0; q < tiles; q++) {
      unsigned a[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int j = 2 * q + i % 2;
        a[i] = j < pairs ? transposed(X[i / 2 % P::M][j < pairs ? j : 0]) : 0u;
      }
      mma_16x8x16<typename P::Store>(c[q], a, x[0], x[P::M - 1]);
    }
  }
  // Z^T z, added.
  __device__ __forceinline__ void add_alone(const Fragments& Z, const unsigned (&z)[P::M]) {
#pragma unroll
    for (int q = 0; q < tiles; q++) {
      const unsigned a[4] = {Z[0][2 * q], Z[0][2 * q + 1], P::M == 2 ? Z[P::M - 1][2 * q] : 0u,
                             P::M == 2 ? Z[P::M - 1][2 * q + 1] : 0u};
      mma_16x8x16<typename P::Store>(c[q], a, z[0], z[P::M - 1]);
    }
  }
  // Stores this lane's two columns to a row of shared memory. If two lanes have the same columns, t < 2 stores rows of a tile's
  // lower half.
  __device__ __forceinline__ void give_pairs(float* to, int g, int t) const {
    constexpr int pairs_ = kPairs<P>;
    const int pair = t % pairs_;
    const int first = pair == 0 ? 1 : pair == 1 ? (P::reads ? P::at_p : -1) : pair == 2 ? P::at_l : -1;
    const int second = pair == 0 ? 0 : pair == 1 && P::keeps ? P::at_g : -1;
#pragma unroll
    for (int j = 0; j < pairs; j += pairs_ == 2 ? 2 : 1) {
      const bool halves = pairs_ == 2 && j + 1 < pairs;
      const bool upper = halves && t >= 2, mine = pairs_ == 4 || halves || t < 2;
      const float x = upper ? c[j / 2][2] : c[j / 2][j % 2 * 2], y = upper ? c[j / 2][3] : c[j / 2][j % 2 * 2 + 1];
      float* row = to + place(2 * (j + upper) + (g & 1), g);
      store_if(mine && first >= 0, row + first * P::NP, x);
      store_if(mine && second >= 0, row + second * P::NP, y);
    }
  }
  // Stores to a row of shared memory: lane t stores its even column, dq, dp or dk.
  __device__ __forceinline__ void give_columns(float* to, int g, int t) const {
    const int slot = t == 0 ? 1 : t == 1 ? P::at_p : 0, first = place(g & 1, g) ^ P::swapped(slot);
    to += slot * P::NP;
#pragma unroll
    for (int j = 0; j < pairs; j++) store_if(t < 3, to + (first ^ place(2 * j, 0)), c[j / 2][j % 2 * 2]);
  }
  // Stores to a row of shared memory if all columns t are alike: lane t gives dk (t odd) or dq of row g, in the lower half of a tile or (t >= 2) the upper.
  __device__ __forceinline__ void give(float* to, int g, int t) const {
    if constexpr (P::columns) return give_columns(to, g, t);
    if constexpr (kPairs<P> > 1) return give_pairs(to, g, t);
    to += t & 1 ? 0 : P::NP;
#pragma unroll
    for (int q = 0; q < tiles; q++) {
      const float low = t & 1 ? c[q][1] : c[q][0], high = t & 1 ? c[q][3] : c[q][2];
      const int i = 4 * q + (t & 2) + (g & 1);  // row of the lane g / 2
      if (2 * q + 1 < pairs || !(t & 2)) to[place(i, g)] = t & 2 ? high : low;
    }
  }
  static __device__ __forceinline__ int place(int i, int g) {  // place in a vector of row i of lane g / 2
    return i / P::VW * P::L * P::VW + (g >> 1) * P::VW + i % P::VW;
  }
  // Words of each pair of columns: dk and dq, dg and dp, nothing and dl.
  __device__ __forceinline__ void give_words(unsigned* to, int g, int t) const {
    constexpr bool halves = kPairs<P> == 2;  // two lanes have the same columns: each gives one half of a tile
    to += t % kPairs<P> * P::NP;
#pragma unroll
    for (int j = 0; j < pairs; j += halves ? 2 : 1) {
      const bool upper = halves && t >= 2, mine = t % kPairs<P> < P::words && (!upper || j + 1 < pairs);
      const float x = upper ? c[j / 2][2] : c[j / 2][j % 2 * 2], y = upper ? c[j / 2][3] : c[j / 2][j % 2 * 2 + 1];
      store_if(mine, to + place(2 * (j + upper) + (g & 1), g), pack_stored<P>(y, x));
    }
  }
  // The same as words (dk, dq): lane t gives those of one of two tiles (the second if t is odd).
  __device__ __forceinline__ void give(unsigned* to, int g, int t) const {
    if constexpr (kPairs<P> > 1) return give_words(to, g, t);
#pragma unroll
    for (int q = 0; q < tiles; q += 2) {
      const int second = q + 1 < tiles ? q + 1 : q;
      const unsigned low = t & 1 ? pack_stored<P>(c[second][1], c[second][0]) : pack_stored<P>(c[q][1], c[q][0]);
      const unsigned high = t & 1 ? pack_stored<P>(c[second][3], c[second][2]) : pack_stored<P>(c[q][3], c[q][2]);
      const int i = 4 * (q + (t & 1)) + (t & 2) + (g & 1);
      if (i < P::R) to[place(i, g)] = t & 2 ? high : low;
    }
  }
};

}  // namespace elman::matrix
