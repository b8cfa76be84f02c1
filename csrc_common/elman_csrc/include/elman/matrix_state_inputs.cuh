// Inputs of 16 steps: from global memory by cp.async, then to fp32 in shared memory with SiLU, the L2 norm and the maps of the scalars.
#pragma once

#include <cuda_pipeline.h>

#include "matrix_state_args.cuh"

namespace elman::matrix {

// Item number `it` of thread tl, with `per` items per step.
struct Item {
  int s, e;  // step; item within the step
};
template <int TL, int per>
__device__ __forceinline__ Item item(int it, int tl) {
  if constexpr (TL % per == 0) return {it * (TL / per) + tl / per, tl % per};
  else return {(it * TL + tl) / per, (it * TL + tl) % per};
}

// Copies rows of `COUNT` elements for STEPS steps from global to shared memory; steps beyond T become zero. Asynchronous if the size allows it.
template <int STEPS, int PIECE, int COUNT, int TL, class T>
__device__ __forceinline__ void stage_rows(T* dst, int dst_step, const T* src, int64_t step, int t0, int T_, int count, int tl) {
  constexpr int E = PIECE / int(sizeof(T)) > 0 ? PIECE / int(sizeof(T)) : 1, per = (COUNT + E - 1) / E;
  src += t0 * step;
  if (t0 + STEPS <= T_) {  // the usual case, without a test for every row
#pragma unroll(2)
    for (int it = 0; it < (STEPS * per + TL - 1) / TL; it++) {
      const Item at = item<TL, per>(it, tl);
      const int s = at.s, e = at.e * E;
      if ((STEPS * per) % TL && s >= STEPS) break;
      if (e >= count) continue;
      if constexpr (PIECE >= 4) __pipeline_memcpy_async(dst + s * dst_step + e, src + s * step + e, PIECE);
      else dst[s * dst_step + e] = src[s * step + e];
    }
    return;
  }
#pragma unroll 1
  for (int it = 0; it < (STEPS * per + TL - 1) / TL; it++) {
    const Item at = item<TL, per>(it, tl);
    const int s = at.s, e = at.e * E;
    if ((STEPS * per) % TL && s >= STEPS) break;
    if (e >= count) continue;
    const bool in = t0 + s < T_;
    const T* from = src + int64_t(in ? s : T_ - 1 - t0) * step + e;
    if constexpr (PIECE >= 4) __pipeline_memcpy_async(dst + s * dst_step + e, from, PIECE, in ? 0 : PIECE);
    else dst[s * dst_step + e] = in ? *from : from_float<T>(0.f);
  }
}

// scalar_forward and scalar_backward (matrix_state_cell.h) with a given exp(A_log), and with the hardware's exp and log for 16-bit storage.
template <class Math>
__device__ __forceinline__ float soft(float z) {
  if (std::is_same_v<Math, Exact>) return softplus(z);
  const float y = __expf(-fabsf(z));
  return fmaxf(z, 0.f) + (y < 0.03f ? y * (1.f - y * (0.5f - y * (1.f / 3))) : __logf(1.f + y));
}
template <class Math>
__device__ __forceinline__ float logistic(float z) {
  return std::is_same_v<Math, Exact> ? 1.f / (1.f + expf(-z)) : __fdividef(1.f, 1.f + __expf(-z));
}
template <class Math>
__device__ __forceinline__ float scalar_map(ScalarKind kind, float x, float rate, float bias) {
  if (kind == ScalarKind::given) return x;
  if (kind == ScalarKind::sigmoid) return logistic<Math>(x);
  const float y = -rate * soft<Math>(x + bias);
  return std::is_same_v<Math, Exact> ? expf(y) : __expf(y);
}
template <class Math>
__device__ __forceinline__ ScalarGrad<float> scalar_adjoint(ScalarKind kind, float dy, float y, float x, float rate, float bias) {
  if (kind == ScalarKind::given) return {dy, 0.f};
  if (kind == ScalarKind::sigmoid) return {dy * y * (1.f - y), 0.f};
  const float g = -dy * y * rate;
  return {g * logistic<Math>(x + bias), g * soft<Math>(x + bias)};
}

// silu and its derivative. Fast: with h = x / 2 and t = tanh(h), sigmoid(x) = (1 + t) / 2, so that x sigmoid(x) = h + h t.
template <class Math>
__device__ __forceinline__ float silu_of(float x) {
  if constexpr (std::is_same_v<Math, Exact>) return silu(x, Math::sigmoid(x));
  const float h = 0.5f * x;
  return fmaf(h, Math::tanh(h), h);
}
template <class Math>
__device__ __forceinline__ float silu_slope(float x) {
  if constexpr (std::is_same_v<Math, Exact>) return silu_derivative(x, Math::sigmoid(x));
  const float h = 0.5f * x, t = Math::tanh(h), s = fmaf(0.5f, t, 0.5f);
  return fmaf(s, fmaf(-h, t, h), s);
}
// Rounds x to 10 bits of mantissa, to nearest; NaN and infinity stay.
__device__ __forceinline__ float to_tf32(float x) { return fmaf(x, -8192.f, __fmul_rn(x, 8193.f)); }

// Scalars and mask of the next segment, in a register until it starts: the first lanes hold scalar 0 (and a third scalar), the
// next ones scalar 1. With sixteen steps at once they keep their storage type if both have the same: a conversion would wait
// for the load.
template <class P>
struct Scalars {
  static constexpr bool fp32 = !P::blocked || P::kind0 == ScalarKind::given || (P::NS > 1 && P::kind1 == ScalarKind::given);
  static constexpr int first = P::NS < 2 ? P::NS : 2;  // held in x
  std::conditional_t<fp32, float, typename P::Store> x = {};
  float third = 0;
  float rate = 0, bias = 0;  // for mamba: exp(A_log), dt_bias
  bool hold = false, fresh = false;
  const unsigned char* starts;
  const void* from;  // the third scalar
  int64_t step;
  template <class Args>
  __device__ __forceinline__ Scalars(const Args& a, int h) : starts(a.starts), from(a.third.x), step(a.third.step) {
    if (P::mamba) rate = expf(a.in.a_log[h]), bias = a.in.dt_bias[h];
  }
  __device__ __forceinline__ void fetch(const Inputs& in, const Sizes& n, int b, int h, int t0, int tl) {
    if (!P::blocked && tl >= 32) return;  // otherwise each warp has the mask
    const int s = tl % P::steps, w = (P::blocked ? tl % 32 : tl) / P::steps, t = min(t0 + s, n.T - 1);
    if (w < first) {
      const void* from = w ? in.scalar[1] : in.scalar[0];
      const int64_t i = (int64_t(b) * n.T + t) * (w ? in.scalar_step[1] : in.scalar_step[0]) + h;
      const bool given = (w ? P::kind1 : P::kind0) == ScalarKind::given;
      if constexpr (fp32) x = given ? static_cast<const float*>(from)[i] : to_float(static_cast<const typename P::Store*>(from)[i]);
      else x = static_cast<const typename P::Store*>(from)[i];
    }
    if constexpr (P::NS > 2)
      if (w == 0) {
        const int64_t i = (int64_t(b) * n.T + t) * step + h;
        third = P::kind2 == ScalarKind::given ? static_cast<const float*>(from)[i]
                                              : to_float(static_cast<const typename P::Store*>(from)[i]);
      }
    hold = t0 + s >= n.T || (in.mask && in.mask[int64_t(b) * n.T + t] == 0);
    if constexpr (P::packed) fresh = t0 + s < n.T && starts[int64_t(b) * n.T + t];
  }
};

// A row of vector i, from element n on.
template <class P, int E>
__device__ __forceinline__ void load_further(float (&f)[E], const unsigned char* row, int i, int n) {
  if (P::wide_vector(i)) load<E>(f, reinterpret_cast<const float*>(row) + n);
  else load<E>(f, reinterpret_cast<const typename P::Store*>(row) + n);
}
template <class P, int TL = P::TL>
__device__ __forceinline__ void stage(Staging<P>& d, const Inputs& in, const Vectors& more, const Sizes& n, int b, int h, int line0,
                                      int t0, int tl) {
  using S = typename P::Store;
  const int64_t first = int64_t(b) * n.T;
  stage_rows<P::steps, P::piece_kq, P::N, TL>(&d.k[0][0], P::N, static_cast<const S*>(in.k) + first * in.k_step + h * P::KH,
                                              in.k_step, t0, n.T, P::N, tl);
  stage_rows<P::steps, P::piece_kq, P::N, TL>(&d.q[0][0], P::N, static_cast<const S*>(in.q) + first * in.q_step + h * P::QH,
                                              in.q_step, t0, n.T, P::N, tl);
#pragma unroll
  for (int i = 0; i < P::NX; i++) {
    const int64_t at = first * more.step[i] + h * P::N;
    unsigned char* to = &d.vector[i][0][0];
    constexpr int pitch = P::N * P::vector_size;
    if (P::wide_vector(i)) {
      stage_rows<P::steps, 16, P::N, TL>(reinterpret_cast<float*>(to), pitch / 4, static_cast<const float*>(more.x[i]) + at,
                                         more.step[i], t0, n.T, P::N, tl);
    } else {
      stage_rows<P::steps, P::piece_kq, P::N, TL>(reinterpret_cast<S*>(to), pitch / P::sz, static_cast<const S*>(more.x[i]) + at,
                                                  more.step[i], t0, n.T, P::N, tl);
    }
  }
#pragma unroll
  for (int l = 0; l < P::NI; l++)
    stage_rows<P::steps, P::piece_line, P::CB, TL>(
        &d.line[l][0][0], P::CB, static_cast<const S*>(in.line[l]) + first * in.line_step[l] + h * P::line_head(l) + line0,
        in.line_step[l], t0, n.T, P::V - line0, tl);
}

// State of a thread that folds lines: learned constants of its EV lines, equal in every step, and sums over time of their gradients.
template <class P>
struct Folding {
  float par[P::AF][P::EV];
  TimeSum<P> sum[P::AF][P::EV] = {};
  __device__ __forceinline__ Folding(const float* const (&from)[kMostParams], const Place<P>& at) {
    static_assert(!P::folds || P::TL % (P::CB / P::EV) == 0);
    const int line = at.line0 + item<P::TL, P::CB / P::EV>(0, at.tl).e * P::EV;
#pragma unroll
    for (int i = 0; i < P::NF; i++)
#pragma unroll
      for (int e = 0; e < P::EV; e++) par[i][e] = line + e < P::V ? from[i][int64_t(at.h) * P::V + line + e] : 0.f;
  }
  // Folds line e with raw inputs f.
  __device__ __forceinline__ void given(float (&in)[P::NI], float (&constants)[P::AF], const float (&f)[P::NI][P::EV],
                                        int e) const {
#pragma unroll
    for (int l = 0; l < P::NI; l++) in[l] = of_line(P::Opt::silu, l) ? silu_of<typename P::Math>(f[l][e]) : f[l][e];
#pragma unroll
    for (int i = 0; i < P::NF; i++) constants[i] = par[i][e];
  }
};

// Stores rows of k or q of a step, from element n on, for sixteen steps at once.
template <class P, int E>
__device__ __forceinline__ void store_parts(unsigned short (&rows)[2][16][Block<P>::pitch], int s, int n, const float (&f)[E]) {
  float rest[E];
#pragma unroll
  for (int e = 0; e < E; e++) rest[e] = f[e] - to_float(from_float<bf16>(f[e]));
  store<E>(reinterpret_cast<bf16*>(&rows[0][s][n]), f), store<E>(reinterpret_cast<bf16*>(&rows[1][s][n]), rest);
}
template <class P, int E>
__device__ __forceinline__ void load_parts(float (&f)[E], const Block<P>& x, int w, int s, int n) {
  const auto& rows = w ? x.q : x.k;
  float rest[E];
  load_stored<P, E>(f, reinterpret_cast<const bf16*>(&rows[0][s][n]));
  load_stored<P, E>(rest, reinterpret_cast<const bf16*>(&rows[1][s][n]));
#pragma unroll
  for (int e = 0; e < E; e++) f[e] += rest[e];
}
template <class P, int E>
__device__ __forceinline__ void store_rows(float* to, const float (&f)[E]) {
  if constexpr (P::Q % E == 0) store<E>(to, f);
  else {
#pragma unroll
    for (int e = 0; e < E; e++) to[e] = f[e];
  }
}

template <class P, int unroll>
__device__ __forceinline__ void fold_lines(Ready<P>& x, const Staging<P>& raw, const Folding<P>& folding, int tl) {
  constexpr int per = P::CB / P::EV;
#pragma unroll(unroll)
  for (int it = 0; it < (P::steps * per + P::TL - 1) / P::TL; it++) {
    const Item at = item<P::TL, per>(it, tl);
    const int s = at.s, e0 = at.e * P::EV;
    if ((P::steps * per) % P::TL && s >= P::steps) break;
    float f[P::NI][P::EV], y[P::NL][P::EV];
#pragma unroll
    for (int l = 0; l < P::NI; l++) load<P::EV>(f[l], &raw.line[l][s][e0]);
#pragma unroll
    for (int e = 0; e < P::EV; e++) {
      float in[P::NI], par[P::AF], of_line[P::NL];
      folding.given(in, par, f, e);
      P::Cell::template fold<typename P::Math>(of_line, in, par);
#pragma unroll
      for (int l = 0; l < P::NL; l++) y[l][e] = of_line[l];
    }
#pragma unroll
    for (int l = 0; l < P::NL; l++) store<P::EV>(&x.line[l][s][e0], y[l]);
  }
}

// Converts the storage type to fp32, with SiLU, norm and scalar maps. sets: 2, or 1 for k alone.
template <class P, int unroll, int TL = P::TL, int sets = 2, class To>
__device__ __forceinline__ void make_rows(To& x, const Staging<P>& raw, const Scalars<P>& sc, int tl) {
  constexpr int KL = P::KL, E = P::N / KL;
#pragma unroll(unroll)
  for (int it = 0; it < (sets * P::steps * KL + TL - 1) / TL; it++) {
    const int sub = tl % KL, w = tl / KL % sets, s = it * (TL / (sets * KL)) + tl / (sets * KL);
    bool hold = false;
    if constexpr (P::blocked) hold = __shfl_sync(~0u, int(sc.hold), s % P::steps);
    if ((sets * P::steps * KL) % TL && s >= P::steps) break;
    float f[E];
    load_stored<P, E>(f, (w ? raw.q[s] : raw.k[s]) + sub * E);
    float sum = 0;
#pragma unroll
    for (int e = 0; e < E; e++) {
      if (of_key(P::Opt::silu, w)) f[e] = silu_of<typename P::Math>(f[e]);
      sum = fmaf(f[e], f[e], sum);
    }
    if (P::Opt::l2) {
      sum = line_sum<KL>(sum);
      const float rho = of_key(P::Opt::l2, w) ? rsqrtf(sum + float(kNormEps)) : 1.f;
#pragma unroll
      for (int e = 0; e < E; e++) f[e] *= rho;
      if constexpr (sets == 2)
        if (sub == 0) x.rho[w][s] = rho;
    }
    if constexpr (P::blocked) {
#pragma unroll
      for (int e = 0; e < E; e++) f[e] = hold && w == 0 ? 0.f : f[e];  // keeps a NaN in a held step's k from other steps
      if constexpr (sets == 2) store_parts<P, E>(w ? x.q : x.k, s, sub * E, f);
      else store_parts<P, E>(x.k, s, sub * E, f);
    } else {
      if (P::tensor && ((P::Opt::silu & 3) || P::Opt::l2)) {  // round to tf32, so that sums and updates use the same k
#pragma unroll
        for (int e = 0; e < E; e++) f[e] = to_tf32(f[e]);
      }
      store_rows<P, E>(x.kq[s] + w * P::Q + sub * E, f);
      const auto further = [&](int vector, int slot, bool with_k) {
        float g[E];
        load_further<P, E>(g, raw.vector[vector][s], vector, sub * E);
#pragma unroll
        for (int e = 0; e < E; e++) {
          if (with_k) g[e] *= f[e];
          if (P::tensor && (with_k || (P::wide_vector(vector) && slot != P::at_g))) g[e] = to_tf32(g[e]);
        }
        store_rows<P, E>(x.kq[s] + slot * P::Q + sub * E, g);
      };
      if constexpr (P::reads)
        if (w == 0) further(P::Cell::read_vector, P::at_p, P::Cell::reads_with_k);
      if constexpr (P::keeps)
        if (w == 1) further(P::Cell::keep_vector, P::at_g, false);
      if constexpr (P::seconds)
        if (w == 1) further(P::Cell::second_vector, P::at_l, false);
    }
  }
}
template <class P, int unroll, int TL = P::TL>
__device__ __forceinline__ void make_lines(Ready<P>& x, const Staging<P>& raw, const Folding<P>& folding, int tl) {
  if constexpr (P::folds) {
    fold_lines<P, unroll>(x, raw, folding, tl);
  } else {
#pragma unroll
    for (int l = 0; l < P::NL; l++)
#pragma unroll(unroll)
      for (int it = 0; it < (P::steps * P::CB / P::EV + TL - 1) / TL; it++) {
        const Item at = item<TL, P::CB / P::EV>(it, tl);
        const int s = at.s, e0 = at.e * P::EV;
        if ((P::steps * P::CB / P::EV) % TL && s >= P::steps) break;
        float f[P::EV];
        load_stored<P, P::EV>(f, &raw.line[l][s][e0]);
        if (of_line(P::Opt::silu, l)) {
#pragma unroll
          for (int e = 0; e < P::EV; e++) f[e] = silu_of<typename P::Math>(f[e]);
        }
        store<P::EV>(&x.line[l][s][e0], f);
      }
  }
}
template <class P>
__device__ __forceinline__ void make_scalars(Ready<P>& x, const Scalars<P>& sc, int tl) {
  if (tl < P::steps * Scalars<P>::first) {
    const int w = tl / P::steps, s = tl % P::steps;
    const ScalarKind kind = w ? P::kind1 : P::kind0;
    const float c = to_float(sc.x);
    x.raw[w][s] = c;
    x.scalar[w][s] = scalar_map<typename P::Math>(kind, c, sc.rate, sc.bias);
  }
  if constexpr (P::NS > 2)
    if (tl < P::steps) x.raw[2][tl] = sc.third, x.scalar[2][tl] = scalar_map<typename P::Math>(P::kind2, sc.third, 0.f, 0.f);
  if (tl < P::steps) x.hold[tl] = sc.hold ? 1.f : 0.f;
  if constexpr (P::packed)
    if (tl < P::steps) x.fresh[tl] = sc.fresh ? 1.f : 0.f;
}
template <class P, int unroll, int TL = P::TL>
__device__ __forceinline__ void make_ready(Ready<P>& x, const Staging<P>& raw, const Scalars<P>& sc, const Folding<P>& folding,
                                           int tl) {
  make_rows<P, unroll, TL>(x, raw, sc, tl);
  make_lines<P, unroll, TL>(x, raw, folding, tl);
  make_scalars<P>(x, sc, tl);
}

}  // namespace elman::matrix
