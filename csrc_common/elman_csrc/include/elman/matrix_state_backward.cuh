// The backward kernel, and the sum over the parts of a head.
#pragma once

#include "matrix_state_inputs.cuh"
#include "matrix_state_walk.cuh"
#include "matrix_state_walk_tensor.cuh"

namespace elman::matrix {

template <class P>
__global__ void __launch_bounds__(P::threads, P::blocks                ? P::blocks
                                              : P::tensor && P::E <= 4 ? 4
                                              : P::threads <= 128 ? 2
                                                                  : 1) backward_kernel(const __grid_constant__ BackwardArgs a) {
  using Store = typename P::Store;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const Place<P> at(a.n);
  if (!at.active) return;
  BackwardShared<P>& sm = reinterpret_cast<BackwardShared<P>*>(shared_bytes)[at.team];
  constexpr int L = P::L, N = P::N, V = P::V, E = N / 4;
  const int T = a.n.T, H = a.n.H, segments = (T + kInterval - 1) / kInterval;
  clear(&sm, at.tl, P::TL);
  float dS[P::E], S0[P::E];
  read_state<P>(S0, a.ds1, at, a.state_line, a.state_row);
#pragma unroll
  for (int e = 0; e < P::E; e++) dS[e] = S0[e];
  auto stage_all = [&](int seg, int buf) {
    const int t0 = seg * kInterval;
    stage<P>(sm.raw[buf], a.in, a.n, at.b, at.h, at.line0, t0, at.tl);
    stage_rows<P::piece_line, P::CB, P::TL>(&sm.dy_raw[buf][0][0], P::CBP,
                                            static_cast<const Store*>(a.dy) + (int64_t(at.b) * T * H + at.h) * V + at.line0,
                                            int64_t(H) * V, t0, T, V - at.line0, at.tl);
#pragma unroll
    for (int m = 0; m < P::M; m++) {
      const float* from = a.saved + ((at.bh * segments + seg) * V + at.line(m)) * int64_t(N);
      if (at.mine(m))
#pragma unroll
        for (int n = 0; n < P::RV; n++) {
          const int i = (n * L + at.rg) * P::VW;
          if (i < N) __pipeline_memcpy_async(&sm.saved[at.tw][m][n][at.lane][0], from + i, P::VW * 4);
        }
    }
    __pipeline_commit();
  };
  Scalars<P> sc(a.in, at.h);
  sc.fetch(a.in, a.n, at.b, at.h, (segments - 1) * kInterval, at.tl);
  team_sync<P>(at.team);
  stage_all(segments - 1, (segments - 1) & 1);
  float sum_log = 0, sum_bias = 0;
  for (int seg = segments - 1; seg >= 0; seg--) {
    const int t0 = seg * kInterval, count = min(kInterval, T - t0), buf = seg & 1;
    __pipeline_wait_prior(0);
    team_sync<P>(at.team);
    make_ready<P>(sm.x, sm.raw[buf], sc, at.tl);
#pragma unroll
    for (int it = 0; it < (kInterval * P::CB / P::EV + P::TL - 1) / P::TL; it++) {
      const int i = it * P::TL + at.tl, s = i / (P::CB / P::EV), e0 = i % (P::CB / P::EV) * P::EV;
      if ((kInterval * P::CB / P::EV) % P::TL && i >= kInterval * P::CB / P::EV) break;
      float f[P::EV];
      load<P::EV>(f, &sm.dy_raw[buf][s][e0]);
      store<P::EV>(&sm.dy[s][e0], f);
    }
#pragma unroll
    for (int m = 0; m < P::M; m++)
#pragma unroll
      for (int n = 0; n < P::RV; n++) {
        float g[P::VW];
        load<P::VW>(g, &sm.saved[at.tw][m][n][at.lane][0]);
#pragma unroll
        for (int e = 0; e < P::VW; e++) S0[P::element(m, n * P::VW + e)] = g[e];
      }
    team_sync<P>(at.team);
    if (seg > 0) {
      stage_all(seg - 1, buf ^ 1);
      sc.fetch(a.in, a.n, at.b, at.h, t0 - kInterval, at.tl);
    }
    const bool plain = count == kInterval && !a.in.mask;
    if constexpr (P::tensor) {
      if (plain) walk_tensor<P, false>(sm, at, S0, dS);
      else walk_tensor<P, true>(sm, at, S0, dS);
    } else {
      if (plain) walk<P, false>(sm, at, S0, dS);
      else walk<P, true>(sm, at, S0, dS);
      team_sync<P>(at.team);
      sums_over_lines<P>(sm, buf, at);
    }
    team_sync<P>(at.team);

    const int64_t token = int64_t(at.b) * T + t0;
    float* part = P::PARTS > 1 ? a.parts + ((int64_t(at.part) * a.n.B * T + token) * H + at.h) * (2 * N + 2) : nullptr;
    const int64_t part_step = int64_t(H) * (2 * N + 2);
#pragma unroll
    for (int it = 0; it < (2 * kInterval * 4 + P::TL - 1) / P::TL; it++) {  // dk, dq: four lanes a row
      const int i = it * P::TL + at.tl, sub = i & 3, w = (i >> 2) & 1, s = i >> 3;
      if ((2 * kInterval * 4) % P::TL && i >= 2 * kInterval * 4) break;
      float g[E], f[E];
      const float* from = sm.dkq[0][s] + w * P::NP + sub * E;
      const float* unit = sm.x.kq[s] + w * P::NP + sub * E;
#pragma unroll
      for (int e = 0; e < E; e++) {
        g[e] = from[e];
#pragma unroll
        for (int i = 1; i < (P::tensor ? P::WPH : 1); i++) g[e] += from[i * (kInterval * 2 * P::NP) + e];
      }
      if (P::Opt::l2) {
        float along = 0;
#pragma unroll
        for (int e = 0; e < E; e++) along = fmaf(g[e], unit[e], along);
        along += __shfl_xor_sync(~0u, along, 1);
        along += __shfl_xor_sync(~0u, along, 2);
        const float rho = sm.x.rho[w][s];
#pragma unroll
        for (int e = 0; e < E; e++) g[e] = rho * fmaf(-unit[e], along, g[e]);
      }
      if (P::Opt::silu) {
        load<E>(f, (w ? sm.raw[buf].q[s] : sm.raw[buf].k[s]) + sub * E);
#pragma unroll
        for (int e = 0; e < E; e++) g[e] *= silu_derivative(f[e], P::Math::sigmoid(f[e]));
      }
      if (s < count) {
        if constexpr (P::PARTS > 1) {
#pragma unroll
          for (int e = 0; e < E; e++) part[s * part_step + w * N + sub * E + e] = g[e];
        } else {
          store<E>(static_cast<Store*>(w ? a.dq : a.dk) + (token + s) * (w ? a.dq_step : a.dk_step) + at.h * N + sub * E, g);
        }
      }
    }
#pragma unroll
    for (int l = 0; l < P::NL; l++)
#pragma unroll
      for (int it = 0; it < (kInterval * P::CB / P::EV + P::TL - 1) / P::TL; it++) {
        const int i = it * P::TL + at.tl, s = i / (P::CB / P::EV), e0 = i % (P::CB / P::EV) * P::EV, line = at.line0 + e0;
        if ((kInterval * P::CB / P::EV) % P::TL && i >= kInterval * P::CB / P::EV) break;
        float g[P::EV], f[P::EV];
        load<P::EV>(g, &sm.dline[l][s][e0]);
        if (P::Opt::silu && l == 0) {
          load<P::EV>(f, &sm.raw[buf].line[l][s][e0]);
#pragma unroll
          for (int e = 0; e < P::EV; e++) g[e] *= silu_derivative(f[e], P::Math::sigmoid(f[e]));
        }
        if (s < count) {
          Store* to = static_cast<Store*>(a.dline[l]) + (token + s) * a.dline_step[l] + at.h * V + line;
          if constexpr (P::wide) {
            if (line < V) store<P::EV>(to, g);
          } else {
#pragma unroll
            for (int e = 0; e < P::EV; e++)
              if (line + e < V) to[e] = from_float<Store>(g[e]);
          }
        }
      }
#pragma unroll
    for (int it = 0; it < (P::NS * kInterval * 8 + P::TL - 1) / P::TL; it++) {  // eight lanes a scalar
      const int i = it * P::TL + at.tl, w = i / (kInterval * 8), s = i / 8 % kInterval, sub = i % 8;
      if ((P::NS * kInterval * 8) % P::TL && i >= P::NS * kInterval * 8) break;
      float d = 0;
#pragma unroll
      for (int e = 0; e < P::TL / 8; e++) d += sm.dscalar[w][s][e * 8 + sub];
      d += __shfl_xor_sync(~0u, d, 1);
      d += __shfl_xor_sync(~0u, d, 2);
      d += __shfl_xor_sync(~0u, d, 4);
      if (sub == 0 && s < count) {
        const bool first = w == 0;
        const ScalarKind kind = first ? P::kind0 : P::kind1;
        const ScalarGrad<float> g = scalar_adjoint<typename P::Math>(kind, d, sm.x.scalar[w][s], sm.x.raw[w][s], sc.rate, sc.bias);
        if (P::mamba && first) sum_log += g.da_log, sum_bias += g.dx;
        if constexpr (P::PARTS > 1) part[s * part_step + 2 * N + w] = g.dx;
        else {
          const int64_t to = (token + s) * (first ? a.dscalar_step[0] : a.dscalar_step[1]) + at.h;
          void* d = first ? a.dscalar[0] : a.dscalar[1];
          if (kind == ScalarKind::given) static_cast<float*>(d)[to] = g.dx;
          else static_cast<Store*>(d)[to] = from_float<Store>(g.dx);
        }
      }
    }
  }
  write_state<P>(a.ds0, dS, at, a.state_line, a.state_row);
  if constexpr (P::mamba) {  // the per-lane sums over time, added up in a fixed order
    team_sync<P>(at.team);
    float* x = &sm.dscalar[0][0][0];
    x[at.tl] = sum_log, x[P::TL + at.tl] = sum_bias;
    team_sync<P>(at.team);
    if (at.tl < 2) {
      float d = 0;
      for (int i = 0; i < P::TL; i++) d += x[at.tl * P::TL + i];
      a.dhead[((int64_t(at.part) * 2 + at.tl) * a.n.B + at.b) * H + at.h] = d;
    }
  }
}

// Adds up the parts of a head, in order.
template <class P>
__global__ void __launch_bounds__(256) add_parts_kernel(const __grid_constant__ BackwardArgs a) {
  using Store = typename P::Store;
  constexpr int N = P::N, W = 2 * N + 2;
  const int64_t rows = int64_t(a.n.B) * a.n.T * a.n.H, total = rows * W;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t row = i / W, token = row / a.n.H;
    const int e = int(i % W), h = int(row % a.n.H);
    if (e >= 2 * N + P::NS) continue;
    float d = 0;
    for (int p = 0; p < P::PARTS; p++) d += a.parts[p * total + i];
    if (e < N) static_cast<Store*>(a.dk)[token * a.dk_step + h * N + e] = from_float<Store>(d);
    else if (e < 2 * N) static_cast<Store*>(a.dq)[token * a.dq_step + h * N + e - N] = from_float<Store>(d);
    else {
      const int w = e - 2 * N;
      const int64_t to = token * a.dscalar_step[w] + h;
      if ((w ? P::kind1 : P::kind0) == ScalarKind::given) static_cast<float*>(a.dscalar[w])[to] = d;
      else static_cast<Store*>(a.dscalar[w])[to] = from_float<Store>(d);
    }
  }
}

}  // namespace elman::matrix
