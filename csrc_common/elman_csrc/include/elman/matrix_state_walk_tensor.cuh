// Backward over a segment where the tensor cores do the sums: only what the chain of dS needs stands between two steps.
//
//   replay: S, and what was written, in registers; where the forward kept what it retrieved, without products
//   walk:   P = dS phi';  dwrite = P k by products as in the forward;  dS' = (keep P + q' dy') + k dr, where the bracket does not wait for dr
//   dq_{s-1} and dk_s, off the chain:  (S_s)^T [dy_{s-1}, dr_s] + P_s^T [0, write_s]
//   further vectors likewise:  dp_s = (S_s)^T dr_s,  dg_s = (keep P_s S_s)^T 1,  dl_s = P_s^T second_s, in further columns
//
// with S_s the state before step s. For these sums over lines, fragments of 8 lines x 8 rows are rounded to the storage type, transposed
// among the lanes (movmatrix) and are A of m16n8k16. A lane packs its line's (dy, dr) the same way: transposed, that is B with dy in even
// columns and dr in odd ones. Errors are those of 16-bit operands with fp32 sums: of the same size as the rounding of dq and dk themselves.
// In fp16 a P too small for it gives a dk too small for it, what is written being of the size of 1.
#pragma once

#include "matrix_state_step.cuh"

namespace elman::matrix {

template <class P>
__device__ __forceinline__ unsigned pack_stored(float low, float high) {
  return pack(low, high, typename P::Store());
}

// What the steps of a segment wrote, in 16 bits: two numbers in a word, of both lines of a lane or of two steps of its one line.
template <class P>
struct Written {
  unsigned x[kInterval * P::M / 2];
  float even = 0;
  __device__ __forceinline__ void set(int s, const float (&write)[P::M]) {
    if (P::M == 2) x[s] = pack_stored<P>(write[0], write[P::M - 1]);
    else if (s % 2) x[s / 2] = pack_stored<P>(even, write[0]);
    else even = write[0];
  }
  // (0, what step s wrote into line m).
  __device__ __forceinline__ unsigned at(int s, int m) const {
    const unsigned both = x[P::M == 2 ? s : s / 2];
    return (P::M == 2 ? m : s % 2) ? both & 0xffff0000u : both << 16;
  }
};

// Sums over lines are columns of products, two from each lane t of a line: dq and dk; dp and dg; dl and none. As many lanes give the same two.
template <class P>
constexpr int kPairs = P::NX == 0   ? 1
                       : P::seconds ? 4
                                    : 2;

// dq and dk of one step: sums over this warp's lines. Rows come as the fragments leave them: tile q, row g of either half.
template <class P>
struct LineSums {
  static constexpr int pairs = P::R / 2, tiles = (pairs + 1) / 2;  // of rows of a lane; of 16 rows
  float c[tiles][4];
  using Fragments = unsigned[P::M][2 * tiles];

  static __device__ __forceinline__ void turn(Fragments& to, const float (&X)[P::E]) {
#pragma unroll
    for (int m = 0; m < P::M; m++)
#pragma unroll
      for (int j = 0; j < 2 * tiles; j++)
        to[m][j] =
            j < pairs
                ? transposed(pack_stored<P>(X[P::element(m, j < pairs ? 2 * j : 0)], X[P::element(m, j < pairs ? 2 * j + 1 : 0)]))
                : 0u;
  }
  // X^T x + Y^T y for this warp's lines; x, y: transposed pairs of weights, for even and odd columns, of each line.
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
  // The same for one X, in words of two rows, added to what is there.
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
  // To a row of shared memory, its two columns. Where two lanes have the same ones, t < 2 gives rows of a tile's lower half.
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
  // To a row of shared memory, all columns t being alike: lane t gives dk (t odd) or dq of row g, of the lower half of a tile or (t >= 2) the upper.
  __device__ __forceinline__ void give(float* to, int g, int t) const {
    if constexpr (kPairs<P> > 1) return give_pairs(to, g, t);
    to += t & 1 ? 0 : P::NP;
#pragma unroll
    for (int q = 0; q < tiles; q++) {
      const float low = t & 1 ? c[q][1] : c[q][0], high = t & 1 ? c[q][3] : c[q][2];
      const int i = 4 * q + (t & 2) + (g & 1);  // row of the lane g / 2
      if (2 * q + 1 < pairs || !(t & 2)) to[place(i, g)] = t & 2 ? high : low;
    }
  }
  static __device__ __forceinline__ int place(int i, int g) {  // in a vector, of row i of the lane g / 2
    return i / P::VW * P::L * P::VW + (g >> 1) * P::VW + i % P::VW;
  }
  // The same as words (dk, dq): lane t gives those of one of two tiles (t odd: the second).
  __device__ __forceinline__ void give(unsigned* to, int g, int t) const {
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

template <class P, bool MayHold>
__device__ __forceinline__ void walk_tensor(BackwardShared<P>& sm, int buf, int raw, const Place<P>& at, const Constants<P>& par,
                                            const float (&S0)[P::E], float (&dS)[P::E], Constants<P>& dpar) {
  constexpr int R = P::R, M = P::M, E = P::E, CB = P::CB, NP = P::NP;
  using Sums = LineSums<P>;
  const int g = at.cg, t = at.rg;
  const Ready<P>& x = sm.x[buf];
  const float* lines = &x.line[0][0][at.column(0)];
  const typename P::Store* rs = &sm.r[raw][0][at.column(0)];
  float hist[kInterval][E], S[E],
      retrieved[kInterval][M];  // retrieved: not kept where it was kept already, or the cell's backward does without
  Written<P> written[P::writes];
#pragma unroll
  for (int e = 0; e < E; e++) S[e] = S0[e];
  {
    float kc[R];
    load_rows<P>(kc, x.kq[0], t);
#pragma unroll
    for (int s = 0; s < kInterval; s++) {
      float kn[R], p[R], in[M][P::NL], c[P::AS], write[P::writes][M];
      Products<P> sum;
      load_vector<P, P::reads && !P::keeps_r>(p, x.kq[s] + P::at_p * NP, t);
      if constexpr (P::keeps_r) load<M>(retrieved[s], rs + s * P::CB);
      else state_products<P>(sum, S, P::reads ? p : kc, g & 1);
      load_rows<P>(kn, x.kq[s + 1 < kInterval ? s + 1 : s], t);
      step_inputs<P>(in, c, lines, x, s);
#pragma unroll
      for (int e = 0; e < E; e++) hist[s][e] = S[e];
      const bool hold = MayHold && x.hold[s] != 0.f;
      if constexpr (P::keeps_r) update<P, MayHold>(S, retrieved[s], kc, x.kq[s], t, in, c, par, hold, write);
      else advance<P, MayHold>(S, sum, kc, x.kq[s], t, in, c, par, hold, retrieved[s], write);
#pragma unroll
      for (int i = 0; i < P::writes; i++) written[i].set(s, write[i]);
#pragma unroll
      for (int i = 0; i < R; i++) kc[i] = kn[i];
    }
  }
  auto* sums = sm.dkq[buf][at.tw];
  const typename P::Store* dys = &sm.dy[raw][0][at.column(0)];
  float* dlines = sm.line_gradients(buf, 0) + at.column(0);
  float dy[M], kc[R];
  load<M>(dy, dys + (kInterval - 1) * P::CB);
  // The sums of a step are issued in the step after it, where nothing waits for them: fragments and weights stay until then.
  typename Sums::Fragments turned, turned_before, turned_kept;
  unsigned wrote[M] = {}, weights[M], kept_by[M] = {};
  const int pair = t % kPairs<P>;  // which columns are this lane's
  const auto add = [&](Sums& y) {
    y.set(turned, wrote, turned_before, weights);
    if constexpr (P::keeps) y.add_alone(turned_kept, kept_by);
  };
  // Of (dy of the step before, dr) and of what was written, a lane's columns.
  const auto of_state = [&](float dy, float dr) {
    if constexpr (P::NX == 0) return transposed(pack_stored<P>(dy, dr));
    else return transposed(pack_stored<P>(pair == 0 ? dy : pair == 1 && P::reads ? dr : 0.f, pair == 0 && !P::reads ? dr : 0.f));
  };
  const auto of_write = [&](int s, int m) {
    if constexpr (P::Cell::elementwise) return transposed(pack_stored<P>(0.f, pair == 0 ? 1.f : 0.f));
    unsigned first = written[0].at(s, m);
    if constexpr (P::NX > 0) first = pair == 0 ? first : 0u;
    if constexpr (P::seconds) first = pair == 2 ? written[1].at(s, m) >> 16 : first;
    return transposed(first);
  };
  {
    float q[R];
    load_rows<P>(q, x.kq[kInterval - 1] + NP, t);
#pragma unroll
    for (int e = 0; e < E; e++) dS[e] = fmaf(q[P::k_of(e)], dy[P::line_of(e)], dS[e]);
#pragma unroll
    for (int m = 0; m < M; m++) weights[m] = of_state(dy[m], 0.f);
    Sums::turn(turned_before, S);
#pragma unroll
    for (int j = 0; j < 2 * M * Sums::tiles; j++)
      turned[j / (2 * Sums::tiles)][j % (2 * Sums::tiles)] = turned_kept[j / (2 * Sums::tiles)][j % (2 * Sums::tiles)] = 0;
  }
  load_rows<P>(kc, x.kq[kInterval - 1], t);
#pragma unroll
  for (int s = kInterval - 1; s >= 0; s--) {
    const int before = s > 0 ? s - 1 : 0;
    const float (&Sp)[E] = hist[s];
    float kn[R], q[R], p[R], kept[R], l[R], in[M][P::NL], c[P::AS], Pm[E], of_keep[E], base[E], dwrite[M], dkeep[M],
        dsecond[M] = {}, dr[M], din[P::NL][M], dscalar[P::AS];
    Products<P> sum, sum_l, sum_keep;
    load_vector<P, P::reads>(p, x.kq[s] + P::at_p * NP, t);
    load_vector<P, P::keeps>(kept, x.kq[s] + P::at_g * NP, t);
    load_vector<P, P::seconds>(l, x.kq[s] + P::at_l * NP, t);
    load_rows<P>(kn, x.kq[before], t);
    load_rows<P>(q, x.kq[before] + NP, t);
    step_inputs<P>(in, c, lines, x, s);
    const bool hold = MayHold && x.hold[s] != 0.f;
    load<M>(dy, dys + before * P::CB);
#pragma unroll
    for (int m = 0; m < M; m++) dy[m] = s > 0 ? dy[m] : 0.f;
#pragma unroll
    for (int e = 0; e < E; e++) {
      Pm[e] = P::Cell::squashes ? dS[e] * fmaf(-S[e], S[e], 1.f) : dS[e];
      if (MayHold && hold) Pm[e] = 0.f;
    }
    const auto products = [&](Products<P>& sum, const float (&X)[E], const float (&k)[R]) {
      if constexpr (M == 1) {
        float b[R];
        as_b<P>(b, k, g & 1);
        line_products<P, false>(sum, X, b);
      } else {
        line_products<P, false>(sum, X, k);
      }
    };
    if constexpr (!P::Cell::elementwise) products(sum, Pm, kc);
    if constexpr (P::seconds) products(sum_l, Pm, l);
    if constexpr (P::sums_keep || P::keeps) {
#pragma unroll
      for (int e = 0; e < E; e++) of_keep[e] = Pm[e] * Sp[e];
    }
    if constexpr (P::sums_keep) {
#pragma unroll
      for (int i = 0; i < R; i++) kept[i] = P::keeps ? kept[i] : 1.f;
      products(sum_keep, of_keep, kept);
    }
    Sums y;
    add(y);
    y.give(sums[s + 1], g, t);
    if constexpr (!P::Cell::elementwise) Sums::turn(turned, Pm);
    Sums::turn(turned_before, Sp);
    if constexpr (P::keeps) Sums::turn(turned_kept, of_keep);
    MatrixLine<float> w[M], dw[M] = {};
    MatrixIn<float> x_[M];
    float of_s[E];
    if constexpr (P::keeps_r && P::Cell::backward_uses_r) load<M>(retrieved[s], rs + s * P::CB);
#pragma unroll
    for (int m = 0; m < M; m++) {
      if constexpr (!P::Cell::backward_uses_r) retrieved[s][m] = 0.f;
      x_[m] = given<P>(retrieved[s][m], in[m], c, par[m], Sp, m);
      w[m] = P::Cell::template line<typename P::Math, float>(x_[m]);
    }
    if constexpr (P::Cell::elementwise) {
#pragma unroll
      for (int m = 0; m < M; m++) {
        elements<P>(of_s, Pm, dw[m], Pm, Sp, kc, w[m], m);
        dkeep[m] = dw[m].keep, dwrite[m] = line_sum<4>(dw[m].write), dsecond[m] = line_sum<4>(dw[m].second);
      }
      Sums::turn(turned, Pm);
#pragma unroll
      for (int e = 0; e < E; e++) base[e] = fmaf(q[P::k_of(e)], dy[P::line_of(e)], MayHold && hold ? dS[e] : of_s[e]);
    } else {
#pragma unroll
      for (int e = 0; e < E; e++) {
        const int m = P::line_of(e);
        const float now = P::keeps ? kept[P::k_of(e)] * Pm[e] : Pm[e], rest = MayHold && hold ? dS[e] : w[m].keep * now;
        base[e] = fmaf(q[P::k_of(e)], dy[m], rest);
        if constexpr (!P::sums_keep) dkeep[m] = e < M ? now * Sp[e] : fmaf(now, Sp[e], dkeep[m]);
      }
    }
    if constexpr (P::sums_keep) line_sums<P, false>(dkeep, sum_keep);
    if constexpr (!P::Cell::elementwise) line_sums<P, false>(dwrite, sum);
    if constexpr (P::seconds) line_sums<P, false>(dsecond, sum_l);
#pragma unroll
    for (int m = 0; m < M; m++) {
      if ((!P::Cell::scalar_keep || P::tight) && !P::sums_keep) dkeep[m] = line_sum<4>(dkeep[m]);
      const auto d = P::Cell::template line_backward<typename P::Math, float>({dkeep[m], dwrite[m], dsecond[m]}, x_[m]);
      dr[m] = hold ? 0.f : d.r;
      if constexpr (P::Cell::energy)
#pragma unroll
        for (int i = 0; i < R; i++)
          base[P::element(m, i)] = fmaf(hold ? 0.f : d.energy * (2.f / P::N), Sp[P::element(m, i)], base[P::element(m, i)]);
#pragma unroll
      for (int i = 0; i < P::NS; i++) {
        const float y = (i == 0 && P::Cell::scalar_keep && !P::tight) || t == 0 ? d.c[i] : 0.f;
        dscalar[i] = m == 0 ? y : dscalar[i] + y;
      }
#pragma unroll
      for (int l = 0; l < P::NL; l++) din[l][m] = hold ? 0.f : d.in[l];
#pragma unroll
      for (int i = 0; i < P::NC; i++) dpar[m][i] += hold ? 0.f : d.par[i];
    }
#pragma unroll
    for (int e = 0; e < E; e++) dS[e] = fmaf((P::reads ? p : kc)[P::k_of(e)], dr[P::line_of(e)], base[e]);
    if constexpr (P::tight) __syncwarp();  // all lanes of a line have read it
#pragma unroll
    for (int l = 0; l < P::NL; l++)
      if (t == 0) store<M>(dlines + (l * kInterval + s) * CB, din[l]);
#pragma unroll
    for (int m = 0; m < M; m++) {
      wrote[m] = of_write(s, m);
      weights[m] = of_state(dy[m], dr[m]);
      if constexpr (P::keeps) kept_by[m] = transposed(pack_stored<P>(0.f, pair == 1 ? w[m].keep : 0.f));
    }
#pragma unroll
    for (int i = 0; i < P::NS; i++) {
      const float d = hold ? 0.f : dscalar[i];
      if constexpr (!P::tight) sm.dscalar[buf][i][s][at.tl] = d;
      else if (t == 0) sm.dscalar[buf][i][s][at.tw * 8 + g] = d;
    }
#pragma unroll
    for (int e = 0; e < E; e++) S[e] = Sp[e];
#pragma unroll
    for (int i = 0; i < R; i++) kc[i] = kn[i];
  }
  Sums y;
  add(y);
  y.give(sums[0], g, t);
}

}  // namespace elman::matrix
