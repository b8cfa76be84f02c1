// Backward over a segment of a large head, N > 32: as matrix_state_walk_tensor.cuh, but with the states of the segment in shared memory, in the storage
// type. A lane reads what it wrote itself or, if helpers replay (`ahead`), what the same lane of a helper wrote. The replay starts from a state of the
// storage type and has no products, because the forward saved the retrieved values of every step.
#pragma once

#include "matrix_state_large.cuh"
#include "matrix_state_walk_tensor.cuh"

namespace elman::matrix {

template <class P>
using Packed = unsigned[P::M][P::R / 2];  // two rows of a line per word

template <class P>
__device__ __forceinline__ void pack_state(Packed<P>& to, const float (&S)[P::E]) {
#pragma unroll
  for (int m = 0; m < P::M; m++)
#pragma unroll
    for (int j = 0; j < P::R / 2; j++) to[m][j] = pack_stored<P>(S[P::element(m, 2 * j)], S[P::element(m, 2 * j + 1)]);
}
template <class P>
__device__ __forceinline__ float unpacked(const Packed<P>& S, int e) {
  const int i = P::k_of(e);
  return unpack(S[P::line_of(e)][i / 2], i % 2, typename P::Store());
}

// Loads saved states into registers. Helpers request them well before.
template <class P>
__device__ __forceinline__ void announce_state(const BackwardArgs& a, const Place<P>& at, int seg) {
  constexpr int piece = 128 / sizeof(typename P::Kept);
  const typename P::Kept* from = static_cast<const typename P::Kept*>(a.saved) + Saved<P>(a.n).state(at, seg, at.line0);
  for (int i = at.tl * piece; i < min(P::CB, P::V - at.line0) * P::N; i += P::TL * piece) prefetch_to_l2(from + i);
}
template <class P>
__device__ __forceinline__ void fetch_state(Packed<P>& S, const BackwardArgs& a, const Place<P>& at, int seg) {
  const Saved<P> saved(a.n);
#pragma unroll
  for (int m = 0; m < P::M; m++) {
    const typename P::Store* from = static_cast<const typename P::Store*>(a.saved) + saved.state(at, seg, at.line(m));
#pragma unroll
    for (int n = 0; n < P::RV; n++) {
      const int i = (n * P::L + at.rg) * P::VW;
      Vec<P::VW / 2, unsigned> x{};
      if (at.mine(m) && i < P::N) x = *reinterpret_cast<const Vec<P::VW / 2, unsigned>*>(from + i);
#pragma unroll
      for (int j = 0; j < P::VW / 2; j++) S[m][n * P::VW / 2 + j] = x.x[j];
    }
  }
}
template <class P>
__device__ __forceinline__ void keep_state(History<P>& to, int s, const Place<P>& at, const Packed<P>& S) {
  using H = History<P>;
#pragma unroll
  for (int w = 0; w < H::words; w += H::piece) {
    Vec<H::piece, unsigned> x;
#pragma unroll
    for (int i = 0; i < H::piece; i++) x.x[i] = S[(w + i) / (P::R / 2)][(w + i) % (P::R / 2)];
    *reinterpret_cast<Vec<H::piece, unsigned>*>(to.x[s][at.tw][w / H::piece][at.lane]) = x;
  }
}
template <class P>
__device__ __forceinline__ void kept_state(Packed<P>& S, const History<P>& from, int s, const Place<P>& at) {
  using H = History<P>;
#pragma unroll
  for (int w = 0; w < H::words; w += H::piece) {
    const auto x = *reinterpret_cast<const Vec<H::piece, unsigned>*>(from.x[s][at.tw][w / H::piece][at.lane]);
#pragma unroll
    for (int i = 0; i < H::piece; i++) S[(w + i) / (P::R / 2)][(w + i) % (P::R / 2)] = x.x[i];
  }
}

// Passes the state after the last segment from helpers to the walking warps.
template <class P, bool gives>
__device__ __forceinline__ void hand_over(BackwardShared<P>& sm, const Place<P>& at, Packed<P>& state) {
#pragma unroll
  for (int m = 0; m < P::M; m++)
#pragma unroll
    for (int j = 0; j < P::R / 2; j++) {
      unsigned& word = sm.dkq[1][at.tw][0][(m * (P::R / 2) + j) * 32 + at.lane];
      if (gives) word = state[m][j];
      else state[m][j] = word;
    }
}
// The place in the history of the state before step s. If helpers replay a segment while the following one is walked, segments use the places upwards and
// downwards in turn: a replayed state takes the place of a state that the walk has just read.
template <class P>
__device__ __forceinline__ int place_of(int buf, int s) {
  return P::ahead && buf ? P::steps - 1 - s : s;
}

// Turns the state before a segment into the one after it, in place. waits: the walk signals free places, and the last step is left out.
template <class P, bool MayHold, bool waits = false>
__device__ __forceinline__ void replay(BackwardShared<P>& sm, int buf, int raw, const Place<P>& at, const Constants<P>& par,
                                       Packed<P>& state) {
  constexpr int each = P::steps / P::signals;
  const Ready<P>& x = sm.x[buf];
  const float* lines = &x.line[0][0][at.column(0)];
  const typename P::Store* rs = &sm.r[raw][0][at.column(0)];
  float S[P::E];
#pragma unroll
  for (int e = 0; e < P::E; e++) S[e] = unpacked<P>(state, e);
#pragma unroll(MayHold ? 1 : P::steps)
  for (int s = 0; s < P::steps; s++) {
    float in[P::M][P::NL], c[P::AS], r[P::M];
    Columns<P> k;
    load<P::M>(r, rs + s * P::CB);
    step_inputs<P>(in, c, lines, x, s);
    load_written<P>(k, x.kq[s], at.cg, at.rg);
    if (waits && s % each == 0) signal<P, true>(at.team, s / each);
    keep_state<P>(sm.states, place_of<P>(buf, s), at, state);
    if (waits && s == P::steps - 1) break;
    if (begins<P, MayHold>(x, s))
#pragma unroll
      for (int e = 0; e < P::E; e++) S[e] = 0;
    update<P, MayHold>(S, r, k, x.kq[s], in, c, par, MayHold && x.hold[s] != 0.f, at.rg);
    pack_state<P>(state, S);
  }
}
// The same without tanh and without the states in between: products of each step's write times the keeps after it, four steps in one product.
template <class P>
__device__ __forceinline__ void pass_over(const BackwardShared<P>& sm, int buf, int raw, const Place<P>& at,
                                          const Constants<P>& par, Packed<P>& state) {
  const Ready<P>& x = sm.x[buf];
  const float* lines = &x.line[0][0][at.column(0)];
  const typename P::Store* rs = &sm.r[raw][0][at.column(0)];
  float keep[P::M], written[P::steps / 4][P::M], S[P::E];
#pragma unroll
  for (int m = 0; m < P::M; m++) keep[m] = 1;
#pragma unroll
  for (int s = P::steps - 1; s >= 0; s--) {
    float in[P::M][P::NL], c[P::AS], r[P::M];
    load<P::M>(r, rs + s * P::CB);
    step_inputs<P>(in, c, lines, x, s);
    const bool hold = x.hold[s] != 0.f, fresh = begins<P>(x, s);
#pragma unroll
    for (int m = 0; m < P::M; m++) {
      const auto w = P::Cell::template line<typename P::Math, float>({r[m], in[m], c, par[m]});
      const float now = hold ? 0.f : keep[m] * w.write;
      written[s / 4][m] = s % 4 == 3 || s % 4 == at.rg ? now : written[s / 4][m];
      keep[m] = fresh ? 0.f : hold ? keep[m] : keep[m] * w.keep;
    }
  }
#pragma unroll
  for (int e = 0; e < P::E; e++) S[e] = keep[P::line_of(e)] * unpacked<P>(state, e);
#pragma unroll
  for (int i = 0; i < P::steps / 4; i++) {
    Columns<P> k;
    float rest[P::M];
    load_columns<P>(k, x.kq[4 * i + at.rg], at.cg);
#pragma unroll
    for (int m = 0; m < P::M; m++) rest[m] = cut_off(written[i][m]);
    add_outer<P>(S, written[i], k);
    add_outer<P>(S, rest, k);
  }
  pack_state<P>(state, S);
}

// `state`: first the state after the segment, then the one before it.
template <class P, bool MayHold>
__device__ __forceinline__ void walk_large(BackwardShared<P>& sm, int buf, int raw, const Place<P>& at, const Constants<P>& par,
                                           Packed<P>& state, float (&dS)[P::E], ConstantSums<P>& dpar) {
  constexpr int R = P::R, M = P::M, E = P::E, last = P::steps - 1, each = P::steps / P::signals, by = P::ahead ? 2 : 1;
  using Sums = LineSums<P>;
  const int g = at.cg, t = at.rg;
  const Ready<P>& x = sm.x[buf];
  const float* lines = &x.line[0][0][at.column(0)];
  const typename P::Store* rs = &sm.r[raw][0][at.column(0)];
  const typename P::Store* dys = &sm.dy[raw][0][at.column(0)];
  auto* sums = sm.dkq[buf % P::result_buffers][at.tw];
  float* dlines = sm.line_gradients(buf, 0) + at.column(0);
  float dy[M], outer[M];
  unsigned weights[M];
  Columns<P> a;
  Sums y;
  float dscalar[P::AS] =
      {};  // sums of the previous step, not yet stored: like dq and dk, they are stored during the next step, beside other work
  auto& scalars = sm.dscalar[buf % P::result_buffers];
  const auto give = [&](int s) {
    y.give(sums[s], g, t);
#pragma unroll
    for (int i = 0; i < P::NS; i++) {  // one of a line's four lanes has its sum
      const float d = dscalar[i] + __shfl_xor_sync(~0u, dscalar[i], 4);
      const int owner = i == 0 && P::Cell::scalar_keep ? g / 2 : 0;  // step `steps` does not exist: step 0 overwrites its zero
      store_if(t == owner && g % 2 == 0, &scalars[i][s % P::steps][at.tw * 4 + g / 2], d);
    }
  };
  // This lane's two columns of the sums over lines, of a state and of what is written.
  const auto of_state = [&](float dy, float dr) {
    if constexpr (P::NX == 0) return transposed(pack_stored<P>(dy, dr));
    const int pair = t % kPairs<P>;
    return transposed(pack_stored<P>(pair == 0 ? dy : pair == 1 && P::reads ? dr : 0.f, pair == 0 && !P::reads ? dr : 0.f));
  };
  const auto of_write = [&](const MatrixLine<float>& w) {
    if constexpr (P::NX == 0) return transposed(pack_stored<P>(0.f, w.write));
    const int pair = t % kPairs<P>;
    return transposed(pack_stored<P>(P::seconds && pair == 2 ? w.second : 0.f, pair == 0 ? w.write : 0.f));
  };
  load<M>(dy, dys + last * P::CB);
#pragma unroll
  for (int m = 0; m < M; m++) weights[m] = of_state(dy[m], 0.f), outer[m] = t == 0 ? dy[m] : 0.f;
  load_columns<P>(a, x.kq[last] + P::Q, g);
  add_outer<P>(dS, outer, a);
  y.clear();
  y.add(state, weights);
  const auto step = [&](int s) {
    const int before = s > 0 ? s - 1 : 0;
    const bool fresh = begins<P, MayHold>(x, s);
    float in[M][P::NL], c[P::AS], r[M], dr[M], dwrite[M], dsecond[M] = {}, dkeep[M] = {}, din[P::NL][M];
    load<M>(dy, dys + before * P::CB);
#pragma unroll
    for (int m = 0; m < M; m++) dy[m] = s > 0 ? dy[m] : 0.f, dr[m] = 0;
#pragma unroll
    for (int l = 0; l < P::NL; l++)
#pragma unroll
      for (int m = 0; m < M; m++) din[l][m] = 0;
    load_columns<P>(a, t == 0 ? x.kq[before] + P::Q : x.kq[s] + P::at_p * P::Q, g);
    give(s + 1);
    y.clear();
#pragma unroll
    for (int i = 0; i < P::NS; i++) dscalar[i] = 0;
    if (!MayHold || x.hold[s] == 0.f) {
      MatrixLine<float> w[M];
      float sum[2][4];
      load<M>(r, rs + s * P::CB);
      step_inputs<P>(in, c, lines, x, s);
#pragma unroll
      for (int m = 0; m < M; m++) {
        w[m] = P::Cell::template line<typename P::Math, float>({r[m], in[m], c, par[m]});
        weights[m] = of_write(w[m]);
      }
      if (squashes<typename P::Cell>(c)) {
#pragma unroll
        for (int e = 0; e < E; e++) {
          const float S = unpacked<P>(state, e);
          dS[e] *= fmaf(-S, S, 1.f);  // from here on P
        }
      }
      {
        float k[R];
        load_rows<P>(k, P::seconds && g % 2 ? x.kq[s] + P::at_l * P::Q : x.kq[s], t);  // odd columns: the second write's
        line_products<P, 2>(sum, dS, k);
      }
      Packed<P> packed;
      pack_state<P>(packed, dS);
      y.add(packed, weights);
      kept_state<P>(state, sm.states, place_of<P>(buf, s), at);
      if constexpr (P::keeps) {
        float kept[R], of_keep[E];
        load_rows<P>(kept, x.kq[s] + P::at_g * P::Q, t);
#pragma unroll
        for (int e = 0; e < E; e++) {
          const int m = P::line_of(e);
          of_keep[e] = fresh ? 0.f : dS[e] * unpacked<P>(state, e);
          dkeep[m] = fmaf(kept[P::k_of(e)], of_keep[e], dkeep[m]);
          dS[e] *= w[m].keep * kept[P::k_of(e)];
        }
        pack_state<P>(packed, of_keep);
        unsigned kept_by[M];
#pragma unroll
        for (int m = 0; m < M; m++) kept_by[m] = transposed(pack_stored<P>(0.f, t % kPairs<P> == 1 ? w[m].keep : 0.f));
        y.add(packed, kept_by);
      } else {
        diagonal<P>(dkeep, packed, state, at.cg);
#pragma unroll
        for (int m = 0; m < M; m++) dkeep[m] = at.rg == at.cg / 2 && !fresh ? dkeep[m] : 0.f;
#pragma unroll
        for (int e = 0; e < E; e++) dS[e] *= w[P::line_of(e)].keep;
      }
#pragma unroll
      for (int m = 0; m < M; m++) {
        dwrite[m] = (sum[0][2 * m] + sum[1][2 * m]) * kUncut;
        if constexpr (P::seconds) dsecond[m] = (sum[0][2 * m + 1] + sum[1][2 * m + 1]) * kUncut;
        if (!P::Cell::scalar_keep || P::keeps) dkeep[m] = line_sum<4>(dkeep[m]);
        const auto d =
            P::Cell::template line_backward<typename P::Math, float>({dkeep[m], dwrite[m], dsecond[m]}, {r[m], in[m], c, par[m]});
        dr[m] = fresh ? 0.f : d.r;
#pragma unroll
        for (int i = 0; i < P::NS; i++) dscalar[i] += (i == 0 && P::Cell::scalar_keep) || t == 0 ? d.c[i] : 0.f;
#pragma unroll
        for (int l = 0; l < P::NL; l++) din[l][m] = d.in[l];
#pragma unroll
        for (int i = 0; i < P::NC; i++) dpar[m][i] += d.par[i];
      }
    }
    if (fresh) {
      if (x.hold[s] != 0.f) kept_state<P>(state, sm.states, place_of<P>(buf, s), at);
#pragma unroll
      for (int e = 0; e < E; e++) dS[e] = 0;
    }
    if (P::ahead && (P::steps - s) % each == 0) signal<P, false>(at.team, (last - s) / each);
#pragma unroll
    for (int m = 0; m < M; m++) {
      weights[m] = of_state(dy[m], dr[m]);
      const float rest = cut_off(dr[m]), part = t == 1 ? dr[m] : rest, any = t == 0 ? dy[m] : part;
      outer[m] = t < 3 ? any : 0.f;
    }
    add_outer<P>(dS, outer, a);
    y.add(state, weights);
    __syncwarp();  // all lanes of a line have read it
#pragma unroll
    for (int l = 0; l < P::NL; l++)
      if (t == 0) store<M>(dlines + (l * P::steps + s) * P::CB, din[l]);
  };
#pragma unroll 1
  for (int s = last; s >= 0; s -= by) {  // two at once: the end of one overlaps the beginning of the next
    step(s);
    if (by == 2) step(s - 1);
  }
  give(0);
}

}  // namespace elman::matrix
