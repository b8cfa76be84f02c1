// Backward over a segment with sums on the tensor cores: only the chain of dS lies between two steps.
//
//   replay: S and the writes, in registers; without products if the forward saved the retrieved values
//   walk:   P = dS phi';  dwrite = P k by products as in the forward;  dS' = (keep P + q' dy') + k dr, where the bracket does not wait for dr
//   dq_{s-1} and dk_s, off the chain:  (S_s)^T [dy_{s-1}, dr_s] + P_s^T [0, write_s]
//   further vectors likewise:  dp_s = (S_s)^T dr_s,  dg_s = (keep P_s S_s)^T 1,  dl_s = P_s^T second_s, in further columns
//
// with S_s the state before step s. For these sums over lines, fragments of 8 lines x 8 rows are rounded to the storage type, transposed
// among the lanes (movmatrix) and become A of m16n8k16. A lane packs its line's (dy, dr) in the same way; transposed, this is B
// with dy in even columns and dr in odd ones. Errors are those of 16-bit operands with fp32 sums, about as large as the
// rounding of dq and dk themselves.
// In fp16 a P below its range gives a dk below its range, because writes are of order 1.
#pragma once

#include "matrix_state_line_sums.cuh"

namespace elman::matrix {

template <class P, bool MayHold>
__device__ __forceinline__ void walk_tensor(BackwardShared<P>& sm, int buf, int raw, const Place<P>& at, const Constants<P>& par,
                                            const float (&S0)[P::E], float (&dS)[P::E], ConstantSums<P>& dpar) {
  constexpr int R = P::R, M = P::M, E = P::E, CB = P::CB, NP = P::NP;
  using Sums = LineSums<P>;
  const int g = at.cg, t = at.rg;
  const Ready<P>& x = sm.x[buf];
  const float* lines = &x.line[0][0][at.column(0)];
  const typename P::Store* rs = &sm.r[raw][0][at.column(0)];
  float hist[kInterval][E], S[E],
      retrieved[kInterval][M];  // retrieved: not needed if the forward saved it, or if the cell's backward does not use it
  Written<P> written[P::writes];
  const std::conditional_t<P::outer, Outer<P>, Nothing> by(g, t);
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
      if constexpr (!(P::outer && P::keeps_r)) load_rows<P>(kn, x.kq[s + 1 < kInterval ? s + 1 : s], t);
      step_inputs<P>(in, c, lines, x, s);
#pragma unroll
      for (int e = 0; e < E; e++) hist[s][e] = S[e];
      const bool hold = MayHold && x.hold[s] != 0.f;
      if (begins<P, MayHold>(x, s)) forget<P, false>(S, sum);
      if constexpr (P::outer && P::keeps_r) {
        const auto w = P::Cell::template line<typename P::Math, float>({retrieved[s][0], in[0], c, par[0]});
        write[0][0] = hold ? 0.f : w.write;
        float next[E] = {}, a[2];
        by.any(a, w.write);
        by.add(next, x.kq[s], a);
#pragma unroll
        for (int e = 0; e < E; e++) {
          next[e] = fmaf(w.keep, S[e], next[e]);
          if (squashes<typename P::Cell>(c)) next[e] = P::Math::tanh(next[e]);
          S[e] = hold ? S[e] : next[e];
        }
      } else if constexpr (P::keeps_r) update<P, MayHold>(S, retrieved[s], kc, x.kq[s], t, in, c, par, hold, write);
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
  // A step issues the sums of the step before, where nothing waits for them; fragments and weights are kept until then.
  typename Sums::Fragments turned, turned_before, turned_kept;
  unsigned wrote[M] = {}, weights[M], kept_by[M] = {};
  const unsigned third = t == 2 ? 0xffffu : 0u;  // the lane whose column is dk
  const int pair = t % kPairs<P>;  // this lane's columns
  // The lane of a line that stores scalar i, if only one does.
  const auto owner = [&](int i) { return i == 0 && P::Cell::scalar_keep && P::diagonal ? g / 2 : 0; };
  const auto add = [&](Sums& y) {
    y.set(turned, wrote, turned_before, weights);
    if constexpr (P::keeps) y.add_alone(turned_kept, kept_by);
  };
  // A lane's columns of (dy of the previous step, dr) and of the writes.
  const auto of_state = [&](float dy, float dr) {
    if constexpr (P::NX == 0) return transposed(pack_stored<P>(dy, dr));
    else if constexpr (P::columns) return transposed(pack_stored<P>(fmaf(dr, by.one[1], dy * by.one[0]), 0.f));
    else return transposed(pack_stored<P>(pair == 0 ? dy : pair == 1 && P::reads ? dr : 0.f, pair == 0 && !P::reads ? dr : 0.f));
  };
  const auto of_write = [&](int s, int m) {
    if constexpr (P::Cell::elementwise) return transposed(pack_stored<P>(0.f, pair == 0 ? 1.f : 0.f));
    unsigned first = written[0].at(s, m);
    if constexpr (P::columns) return transposed(first >> 16 & third);
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
  load_for_products<P>(kc, x.kq[kInterval - 1], t, g & 1);
#pragma unroll
  for (int s = kInterval - 1; s >= 0; s--) {
    const int before = s > 0 ? s - 1 : 0;
    float kn[R], q[R], p[R], kept[R], l[R], in[M][P::NL], c[P::AS], Pm[E], of_keep[E], base[E], dwrite[M], dkeep[M],
        dsecond[M] = {}, dr[M], din[P::NL][M], dscalar[P::AS];
    Products<P> sum, sum_l, sum_keep;
    load_vector<P, P::reads && !P::outer>(p, x.kq[s] + P::at_p * NP, t);
    load_vector<P, P::keeps>(kept, x.kq[s] + P::at_g * NP, t);
    load_vector<P, P::seconds>(l, x.kq[s] + P::at_l * NP, t);
    load_for_products<P>(kn, x.kq[before], t, g & 1);
    if constexpr (!P::outer) load_rows<P>(q, x.kq[before] + NP, t);
    step_inputs<P>(in, c, lines, x, s);
    const bool hold = MayHold && x.hold[s] != 0.f, fresh = begins<P, MayHold>(x, s);
    float Sp[E];  // the state that the step saw
#pragma unroll
    for (int e = 0; e < E; e++) Sp[e] = fresh ? 0.f : hist[s][e];
    load<M>(dy, dys + before * P::CB);
#pragma unroll
    for (int m = 0; m < M; m++) dy[m] = s > 0 ? dy[m] : 0.f;
#pragma unroll
    for (int e = 0; e < E; e++) {
      Pm[e] = squashes<typename P::Cell>(c) ? dS[e] * fmaf(-S[e], S[e], 1.f) : dS[e];
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
    if constexpr (P::outer) half_products<P>(sum, Pm, kc);
    else if constexpr (!P::Cell::elementwise) products(sum, Pm, kc);
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
    if constexpr (P::diagonal) {
      unsigned of_P[M][R / 2], of_S[M][R / 2];
      Sums::words(of_P, Pm);
      Sums::words(of_S, hist[s]);
      Sums::turn(turned, of_P);
      Sums::turn(turned_before, of_S);
      if constexpr (P::Cell::scalar_keep) {
        dkeep[0] = diagonal<P>(Pm, Sp, g);
      } else {
        diagonal<P>(dkeep, of_P, of_S, g);
#pragma unroll
        for (int m = 0; m < M; m++) dkeep[m] = fresh ? 0.f : __shfl_sync(~0u, dkeep[m], g * 4 + g / 2);
      }
    } else {
      if constexpr (!P::Cell::elementwise) Sums::turn(turned, Pm);
      Sums::turn(turned_before, hist[s]);
    }
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
      for (int e = 0; e < E; e++) base[e] = fmaf(q[P::k_of(e)], dy[P::line_of(e)], fresh ? 0.f : MayHold && hold ? dS[e] : of_s[e]);
    } else if constexpr (P::outer) {
#pragma unroll
      for (int e = 0; e < E; e++) base[e] = fresh ? 0.f : MayHold && hold ? dS[e] : w[0].keep * Pm[e];
    } else {
#pragma unroll
      for (int e = 0; e < E; e++) {
        const int m = P::line_of(e);
        const float now = P::keeps ? kept[P::k_of(e)] * Pm[e] : Pm[e], rest = MayHold && hold ? dS[e] : w[m].keep * now;
        base[e] = fmaf(q[P::k_of(e)], dy[m], fresh ? 0.f : rest);
        if constexpr (!P::sums_keep && !P::diagonal) dkeep[m] = e < M ? now * Sp[e] : fmaf(now, Sp[e], dkeep[m]);
      }
    }
    if constexpr (P::sums_keep) line_sums<P, false>(dkeep, sum_keep);
    if constexpr (!P::Cell::elementwise) line_sums<P, false>(dwrite, sum);
    if constexpr (P::seconds) line_sums<P, false>(dsecond, sum_l);
#pragma unroll
    for (int m = 0; m < M; m++) {
      if ((!P::Cell::scalar_keep || P::tight) && !P::sums_keep && !P::diagonal) dkeep[m] = line_sum<4>(dkeep[m]);
      const auto d = P::Cell::template line_backward<typename P::Math, float>({dkeep[m], dwrite[m], dsecond[m]}, x_[m]);
      dr[m] = hold || fresh ? 0.f : d.r;
      if constexpr (P::Cell::energy)
#pragma unroll
        for (int i = 0; i < R; i++)
          base[P::element(m, i)] = fmaf(hold ? 0.f : d.energy * (2.f / P::N), Sp[P::element(m, i)], base[P::element(m, i)]);
#pragma unroll
      for (int i = 0; i < P::NS; i++) {
        const bool unsummed = i == 0 && P::Cell::scalar_keep && !P::tight && !P::diagonal;  // each lane has a share
        const float y = unsummed || (P::diagonal && P::tight) || t == owner(i) ? d.c[i] : 0.f;
        dscalar[i] = m == 0 ? y : dscalar[i] + y;
      }
#pragma unroll
      for (int l = 0; l < P::NL; l++) din[l][m] = hold ? 0.f : d.in[l];
#pragma unroll
      for (int i = 0; i < P::NC; i++) dpar[m][i] += hold ? 0.f : d.par[i];
    }
#pragma unroll
    for (int e = 0; e < E; e++) dS[e] = P::outer ? base[e] : fmaf((P::reads ? p : kc)[P::k_of(e)], dr[P::line_of(e)], base[e]);
    if constexpr (P::outer) {
      float of_dy[2], of_dr[2];
      by.exact(of_dy, dy[0]);
      by.any(of_dr, dr[0]);
      by.add(dS, x.kq[before] + NP, of_dy, x.kq[s] + P::at_p * NP, of_dr);
    }
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
      else if (t == owner(i)) sm.dscalar[buf][i][s][at.tw * 8 + g] = d;
    }
#pragma unroll
    for (int e = 0; e < E; e++) S[e] = hist[s][e];
#pragma unroll
    for (int i = 0; i < R; i++) kc[i] = kn[i];
  }
  Sums y;
  add(y);
  y.give(sums[0], g, t);
}

}  // namespace elman::matrix
