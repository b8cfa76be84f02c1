// The forward kernel.
#pragma once

#include "matrix_state_inputs.cuh"
#include "matrix_state_step.cuh"

namespace elman::matrix {

template <class P>
__global__ void __launch_bounds__(P::threads, P::blocks) forward_kernel(const __grid_constant__ ForwardArgs a) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const Place<P> at(a.n);
  if (!at.active) return;
  ForwardShared<P>& sm = reinterpret_cast<ForwardShared<P>*>(shared_bytes)[at.team];
  constexpr int R = P::R, L = P::L, C = P::C, PL = C / 2;
  const int T = a.n.T, segments = (T + kInterval - 1) / kInterval;
  clear(&sm, at.tl, P::TL);
  float S[P::E];
  read_state<P>(S, a.s0, at, a.state_line, a.state_row);
  Scalars<P> sc(a.in, at.h);
  sc.fetch(a.in, a.n, at.b, at.h, 0, at.tl);
  team_sync<P>(at.team);
  stage<P>(sm.raw, a.in, a.n, at.b, at.h, at.line0, 0, at.tl);
  __pipeline_commit();
  for (int seg = 0; seg < segments; seg++) {
    const int t0 = seg * kInterval, count = min(kInterval, T - t0);
    __pipeline_wait_prior(0);
    team_sync<P>(at.team);
    make_ready<P>(sm.x, sm.raw, sc, at.tl);
    team_sync<P>(at.team);
    if (seg + 1 < segments) stage<P>(sm.raw, a.in, a.n, at.b, at.h, at.line0, t0 + kInterval, at.tl);
    __pipeline_commit();
    if (a.saved)
#pragma unroll
      for (int m = 0; m < P::M; m++) {
        float* to = a.saved + ((at.bh * segments + seg) * P::V + at.line(m)) * int64_t(P::N);
        if (at.mine(m))
#pragma unroll
          for (int n = 0; n < P::RV; n++) {
            const int i = (n * L + at.rg) * P::VW;
            float g[P::VW];
#pragma unroll
            for (int e = 0; e < P::VW; e++) g[e] = S[P::element(m, n * P::VW + e)];
            if (i < P::N) store<P::VW>(to + i, g);
          }
      }
    float* out = &sm.out[at.tw][0][P::tensor ? at.cg : at.lane];
    constexpr int pitch = sizeof(sm.out[0][0]) / sizeof(float);
    const float* lines = &sm.x.line[0][0][at.column(0)];
    float kc[R], q[R] = {};
    Products<P> sum, read = {};
    HalfB<P> qb = {};
    load_rows<P>(kc, sm.x.kq[0], at.rg);
    retrieve_state<P>(sum, S, kc, sm.x, 0, at.rg, at.cg & 1);
    // merged: even columns of a product are for k of the next step, odd ones for q of this one
    const float* both = sm.x.kq[0] + (at.cg & 1 ? P::NP : 2 * P::NP);
    auto readout = [&](int s) {
      if constexpr (P::tensor) {
        float o[P::M];
        state_sums<P>(o, P::merged ? sum : read, P::merged ? 1 : 0);
        if (at.rg == 0)
#pragma unroll
          for (int m = 0; m < P::M; m++) out[s * pitch + m * 8] = o[m];
      } else {
        out[s * pitch] = read.c[0][0];
      }
    };
    auto step = [&](int s, auto may_hold) {
      constexpr bool MayHold = decltype(may_hold)::value;
      float kn[R], in[P::M][P::NL], c[P::NS], r[P::M], write[P::M];
      if constexpr (P::merged) {
        load_rows<P>(kc, sm.x.kq[s], at.rg);
        HalfB<P> b;
        if constexpr (P::half) load_half_b<P>(b, sm.x.half[0] + (both - sm.x.kq[0]) + s * 2 * P::NP, at.rg, 0);
        else load_rows<P>(kn, both + s * 2 * P::NP, at.rg);
        step_inputs<P>(in, c, lines, sm.x, s);
        advance<P, MayHold>(S, sum, kc, in, c, MayHold && sm.x.hold[s] != 0.f, r, write);
        if (s > 0) readout(s - 1);
        if constexpr (P::half) half_products<P>(sum.c[0], S, b);
        else line_products<P>(sum, S, kn);
        return;
      }
      load_rows<P>(kn, sm.x.kq[s + 1 < kInterval ? s + 1 : s], at.rg);
      step_inputs<P>(in, c, lines, sm.x, s);
      advance<P, MayHold>(S, sum, kc, in, c, MayHold && sm.x.hold[s] != 0.f, r, write);
      retrieve_state<P>(sum, S, kn, sm.x, s + 1 < kInterval ? s + 1 : s, at.rg, at.cg & 1);
      if (s > 0) readout(s - 1);  // one step late: nothing waits for it
      if constexpr (P::half) {
        if (at.cg < 2) load_half_b<P>(qb, sm.x.half[s] + P::NP, at.rg, at.cg & 1);
        half_products<P>(read.c[0], S, qb);
#pragma unroll
        for (int i = 0; i < R; i++) kc[i] = kn[i];
        return;
      }
      if (!P::tensor || at.cg < (P::M == 1 ? 2 : 1))
        load_b<P>(q, sm.x.kq[s] + P::NP, at.rg, at.cg & 1);  // tensor: the first columns of B are enough
      line_products<P>(read, S, q);
#pragma unroll
      for (int i = 0; i < R; i++) kc[i] = kn[i];
    };
    if (count == kInterval && !a.in.mask) {
#pragma unroll
      for (int s = 0; s < kInterval; s++) {
        step(s, std::false_type());
        if (s == kInterval / 2 && seg + 1 < segments) sc.fetch(a.in, a.n, at.b, at.h, t0 + kInterval, at.tl);
      }
    } else {
#pragma unroll 1
      for (int s = 0; s < count; s++) step(s, std::true_type());
      sc.fetch(a.in, a.n, at.b, at.h, t0 + kInterval, at.tl);
    }
    readout(count - 1);
    __syncwarp();
    {  // complete the readouts of this warp: lane = (step, half of the lines)
      const int s = at.lane / 2, half = at.lane % 2;
      float y[PL];
      if constexpr (P::tensor) load<PL>(y, &sm.out[at.tw][s][half * PL]);
      else {
        float x[16];
        load<16>(x, &sm.out[at.tw][s][half * 16]);
#pragma unroll
        for (int j = 0; j < PL; j++) {
          y[j] = x[j * L];
#pragma unroll
          for (int g = 1; g < L; g++) y[j] += x[j * L + g];
        }
      }
      const int line = at.line0 + at.tw * C + half * PL;
      if (s < count) {
        typename P::Store* to = static_cast<typename P::Store*>(a.o) + ((int64_t(at.b) * T + t0 + s) * a.n.H + at.h) * P::V + line;
        if constexpr (P::V % PL == 0) {
          if (line < P::V) store<PL>(to, y);
        } else {
#pragma unroll
          for (int j = 0; j < PL; j++)
            if (line + j < P::V) to[j] = from_float<typename P::Store>(y[j]);
        }
      }
    }
    if constexpr (P::WPH == 1) __syncwarp();
  }
  write_state<P>(a.s1, S, at, a.state_line, a.state_row);
}

}  // namespace elman::matrix
