// The forward kernel.
#pragma once

#include "matrix_state_blocked.cuh"
#include "matrix_state_large.cuh"
#include "matrix_state_step.cuh"

namespace elman::matrix {

template <class P>
__device__ __forceinline__ void save_state(const ForwardArgs& a, const Place<P>& at, int seg, const float (&S)[P::E]) {
  if (!a.saved) return;
  const Saved<P> saved(a.n);
#pragma unroll
  for (int m = 0; m < P::M; m++) {
    typename P::Kept* to = static_cast<typename P::Kept*>(a.saved) + saved.state(at, seg, at.line(m));
    if (at.mine(m))
#pragma unroll
      for (int n = 0; n < P::RV; n++) {
        const int i = (n * P::L + at.rg) * P::VW;
        float g[P::VW];
#pragma unroll
        for (int e = 0; e < P::VW; e++) g[e] = S[P::element(m, n * P::VW + e)];
        if (i < P::N) store<P::VW>(to + i, g);
      }
  }
}

// The steps of a segment. A state enters two products: the retrieval of the next step and the readout of this one. Nothing
// waits for the readout.
template <class P, bool tensor = P::tensor>
struct Recur {
  static constexpr int pitch = 36;
  const Ready<P>& x;
  float* out;
  const float* lines;
  int rg;
  const Constants<P>& par;
  float (&S)[P::E];
  Products<P> sum, read;
  float kc[P::R];

  __device__ __forceinline__ Recur(const Ready<P>& x, float (*out)[pitch], const Place<P>& at, const Constants<P>& par,
                                   float (&S)[P::E])
      : x(x), out(out[0] + at.lane), lines(&x.line[0][0][at.column(0)]), rg(at.rg), par(par), S(S) {
    load_rows<P>(kc, x.kq[0], rg);
    float p[P::R];
    load_rows<P>(p, x.kq[0] + P::at_p * P::Q, rg);
    line_products<P, false>(sum, S, p);
  }
  __device__ __forceinline__ void readout(int s) { out[s * pitch] = read.c[0][0]; }
  template <bool MayHold>
  __device__ __forceinline__ void step(int s) {
    float kn[P::R], p[P::R], in[P::M][P::NL], c[P::AS], r[P::M], write[P::writes][P::M], q[P::R];
    load_rows<P>(kn, x.kq[s + 1 < P::steps ? s + 1 : s], rg);
    load_rows<P>(p, x.kq[s + 1 < P::steps ? s + 1 : s] + P::at_p * P::Q, rg);
    step_inputs<P>(in, c, lines, x, s);
    if (begins<P, MayHold>(x, s)) forget<P, false>(S, sum);
    advance<P, MayHold>(S, sum, kc, x.kq[s], rg, in, c, par, MayHold && x.hold[s] != 0.f, r, write);
    line_products<P, false>(sum, S, p);
    if (s > 0) readout(s - 1);
    load_rows<P>(q, x.kq[s] + P::NP, rg);
    line_products<P, false>(read, S, q);
#pragma unroll
    for (int i = 0; i < P::R; i++) kc[i] = kn[i];
  }
};
// Writes results straight to memory: lane 0 of a line stores the last step's o, lane 1 this step's r, if it is kept.
template <class P>
struct Straight {
  typename P::Store* to;  // the current step
  int64_t row;            // from one step to the next
  bool gives_o, gives_r;
};
// Retrieval and readout are columns of one product. The o in `out` must still be multiplied by kUncut. Lane 0 of a line stores
// the last step's o, lane 1 this step's r, if it is kept.
template <class P>
struct Recur<P, true> {
  static constexpr int pitch = P::C + 4;
  static constexpr int to_r = P::buffers * P::WPH * P::steps * pitch;  // from o
  const Ready<P>& x;
  float* out;
  const float* lines;
  int rg, odd;
  const Constants<P>& par;
  float (&S)[P::E];
  Straight<P> straight;
  Products<P> sum;

  __device__ __forceinline__ Recur(const Ready<P>& x, float (*out)[pitch], const Place<P>& at, const Constants<P>& par,
                                   float (&S)[P::E], Straight<P> straight = {})
      : x(x),
        out(out[0] + at.cg * P::M +
            (!P::keeps_r  ? 0
             : at.rg == 1 ? to_r
                          : -pitch)),
        lines(&x.line[0][0][at.column(0)]),
        rg(at.rg),
        odd(at.cg & 1),
        par(par),
        S(S),
        straight(straight) {
    float p[P::R];
    load_rows<P>(p, x.kq[0] + P::at_p * P::Q, rg);
    line_products<P, true>(sum, S, p);
  }
  __device__ __forceinline__ void give(int s, const float (&r)[P::M], bool has_r) {
    float x[P::M];
    if constexpr (P::straight) {
#pragma unroll
      for (int m = 0; m < P::M; m++) x[m] = (rg == 1 ? sum.c[0][2 * m] : sum.c[0][2 * m + 1]) * kUncut;
      if ((straight.gives_o && s > 0) || (straight.gives_r && has_r)) store<P::M>(straight.to, x);
      straight.to += straight.row;
    } else {
#pragma unroll
      for (int m = 0; m < P::M; m++) x[m] = rg == 1 ? r[m] : sum.c[0][2 * m + 1];
      if (rg == 0 ? s > 0 : rg == 1 && has_r) store<P::M>(out + s * pitch, x);
    }
  }
  __device__ __forceinline__ void readout(int s) {
    float x[P::M] = {};
    if constexpr (P::keeps_r) {
      give(s + 1, x, false);
    } else {
#pragma unroll
      for (int m = 0; m < P::M; m++) x[m] = sum.c[0][2 * m + 1];
      if (rg == 0) store<P::M>(out + s * pitch, x);
    }
  }
  template <bool MayHold>
  __device__ __forceinline__ void step(int s) {
    float k[P::R], both[P::R], in[P::M][P::NL], c[P::AS], r[P::M], write[P::writes][P::M];
    load_rows<P>(k, x.kq[s], rg);
    load_rows<P>(both, x.kq[0] + (odd ? P::NP : (P::slots + P::at_p) * P::NP) + s * P::slots * P::NP,
                 rg);  // even columns: p of the next step; odd: q of this one
    step_inputs<P>(in, c, lines, x, s);
    if (begins<P, MayHold>(x, s)) forget<P, true>(S, sum);
    advance<P, MayHold>(S, sum, k, x.kq[s], rg, in, c, par, MayHold && x.hold[s] != 0.f, r, write);
    if constexpr (P::keeps_r) give(s, r, true);
    else if (s > 0) readout(s - 1);
    line_products<P, true>(sum, S, both);
  }
};
template <class P>
using Recurrence = std::conditional_t<P::large, RecurLarge<P>, Recur<P>>;

// Runs a segment. The state is saved before each step that is a multiple of `interval`.
template <class P, class Save, class Halfway>
__device__ __forceinline__ void recur(Recurrence<P> run, int count, bool masked, Save save, Halfway halfway) {
  constexpr bool more = P::interval < P::steps;
  if (!more) save(0);
  if (count == P::steps && !masked) {
#pragma unroll 1
    for (int first = 0; first < P::steps; first += P::unrolled) {
      if (more) save(first);
#pragma unroll
      for (int s = 0; s < P::unrolled; s++) {
        run.template step<false>(first + s);
        if (s == P::segment / 2) halfway();
      }
    }
  } else {
#pragma unroll 1
    for (int s = 0; s < count; s++) {
      if (more && s % P::interval == 0) save(s);
      run.template step<true>(s);
    }
    halfway();
  }
  run.readout(count - 1);
}

// Stores a number of each of a warp's lines to [T,H,V] from row `row` on: lane = (step, share of the lines).
template <class P>
__device__ __forceinline__ void finish(const float (*out)[Recurrence<P>::pitch], typename P::Store* row, float scale,
                                       const Sizes& n, const Place<P>& at, int t0) {
  constexpr int per = 32 / P::steps, PL = P::C / per, L = P::L;  // lanes per step
  const int s = at.lane / per, share = at.lane % per, line = at.line0 + at.tw * P::C + share * PL;
  float y[PL];
  if constexpr (P::tensor) {
    load<PL>(y, &out[s][share * PL]);
#pragma unroll
    for (int j = 0; j < PL; j++) y[j] *= scale;
  } else {
    float x[16];
    load<16>(x, &out[s][share * 16]);
#pragma unroll
    for (int j = 0; j < PL; j++) {
      y[j] = x[j * L];
#pragma unroll
      for (int g = 1; g < L; g++) y[j] += x[j * L + g];
    }
  }
  if (t0 + s >= n.T) return;
  typename P::Store* to = row + (int64_t(t0 + s) * n.H + at.h) * P::V + line;
  if constexpr (P::V % PL == 0) {
    if (line < P::V) store<PL>(to, y);
  } else {
#pragma unroll
    for (int j = 0; j < PL; j++)
      if (line + j < P::V) to[j] = from_float<typename P::Store>(y[j]);
  }
}

// The first row of o, and of the retrieved values, for this head's row of the batch.
template <class P>
__device__ __forceinline__ typename P::Store* output(const ForwardArgs& a, const Place<P>& at) {
  return static_cast<typename P::Store*>(a.o) + int64_t(at.b) * a.n.T * a.n.H * P::V;
}
template <class P>
__device__ __forceinline__ typename P::Store* retrieved(const ForwardArgs& a, const Place<P>& at) {
  return static_cast<typename P::Store*>(a.saved) + Saved<P>(a.n).retrieved(at.b);
}
template <class P>
__device__ __forceinline__ Straight<P> straight_to(const ForwardArgs& a, const Place<P>& at, int seg) {
  const int64_t row = a.n.H * P::V;
  const bool r = at.rg == 1 && a.saved;
  typename P::Store* const to = r ? retrieved<P>(a, at) : output<P>(a, at) - row;
  return {to + int64_t(seg) * P::steps * row + at.h * P::V + at.line(0), row, at.rg == 0, r};
}
template <class P>
__device__ __forceinline__ void finish_segment(const ForwardShared<P>& sm, const ForwardArgs& a, const Place<P>& at, int seg) {
  if constexpr (P::straight) return;
  finish<P>(sm.out[seg & 1][at.tw], output<P>(a, at), kUncut, a.n, at, seg * P::steps);
  if (P::keeps_r && a.saved) finish<P>(sm.out[P::buffers + (seg & 1)][at.tw], retrieved<P>(a, at), 1.f, a.n, at, seg * P::steps);
}
// The helpers of a team; they work one segment ahead of it or behind it.
template <class P>
__device__ __forceinline__ void help(ForwardShared<P>& sm, const ForwardArgs& a, const Place<P>& at, int segments) {
  Scalars<P> sc(a, at.h);
  const Folding<P> folding(a.param, at);
  auto bring = [&](int seg) {
    if (seg < segments) stage<P>(sm.raw[seg & 1], a.in, a.more, a.n, at.b, at.h, at.line0, seg * P::steps, at.tl);
    __pipeline_commit();
  };
  auto ready = [&](int seg) {
    if (seg < segments) make_ready<P, P::forward_ready>(sm.x[seg & 1], sm.raw[seg & 1], sc, folding, at.tl);
    if (seg + 1 < segments) sc.fetch(a.in, a.n, at.b, at.h, (seg + 1) * P::steps, at.tl);
  };
  sc.fetch(a.in, a.n, at.b, at.h, 0, at.tl);
  bring(0);
  bring(1);
  __pipeline_wait_prior(0);
  helpers_sync<P>(at.team);
  ready(0);
  team_sync<P>(at.team);
  for (int seg = 0; seg < segments; seg++) {
    bring(seg + 2);
    ready(seg + 1);
    if (seg > 0) finish_segment<P>(sm, a, at, seg - 1);
    __pipeline_wait_prior(0);
    team_sync<P>(at.team);
  }
  finish_segment<P>(sm, a, at, segments - 1);
}

template <class P>
__device__ __forceinline__ void recur_helped(ForwardShared<P>& sm, const ForwardArgs& a, const Place<P>& at, int segments) {
  float S[P::E];
  Constants<P> par;
  read_constants<P>(par, a.param, at);
  read_state<P>(S, a.s0, at, a.state_line, a.state_row);
  team_sync<P>(at.team);
  for (int seg = 0; seg < segments; seg++) {
    const auto save = [&](int s) { save_state<P>(a, at, (seg * P::steps + s) / P::interval, S); };
    const auto run = [&](auto... straight) {
      recur<P>({sm.x[seg & 1], sm.out[seg & 1][at.tw], at, par, S, straight...}, min(P::steps, a.n.T - seg * P::steps),
               special<P>(sm.x[seg & 1], a.in.mask, at.lane), save, [] {});
    };
    if constexpr (P::straight) run(straight_to<P>(a, at, seg));
    else run();
    team_sync<P>(at.team);
  }
  write_state<P>(a.s1, S, at, a.state_line, a.state_row);
}

// The helpers for sixteen steps at once work up to three segments ahead: one segment arrives, one is made ready, and for one a
// warp or two run make_block, which needs all of its rows.
template <class P>
__device__ __forceinline__ void help_blocked(ForwardShared<P>& sm, const ForwardArgs& a, const Place<P>& at, int segments) {
  Scalars<P> sc(a, at.h);
  const Folding<P> folding(a.param, at);
  int mine = at.tl - kSolvers<P>;
  auto bring = [&](int seg) {
    mine = afresh(at.tl - kSolvers<P>);
    if (seg < segments) stage<P, kCrew<P>>(sm.raw[seg & 1], a.in, a.more, a.n, at.b, at.h, at.line0, seg * P::steps, mine);
    __pipeline_commit();
  };
  auto ready = [&](int seg) {
    mine = afresh(at.tl - kSolvers<P>);
    if (seg < segments) make_ready<P, P::forward_ready, kCrew<P>>(sm.x[seg % 3], sm.raw[seg & 1], sc, folding, mine);
    if (seg + 1 < segments) sc.fetch(a.in, a.n, at.b, at.h, (seg + 1) * P::steps, mine);
  };
  auto block = [&](int seg) {
    if (at.tw < 2 && seg < segments) make_block<P, true>(sm.x[seg % 3], at);
  };
  const bool solves = mine < 0;
  if (!solves) {
    sc.fetch(a.in, a.n, at.b, at.h, 0, mine);
    bring(0);
    bring(1);
    __pipeline_wait_prior(0);
  }
  helpers_sync<P>(at.team);
  if (!solves) ready(0);
  helpers_sync<P>(at.team);
  for (int seg = -1; seg < segments; seg++) {
    if (solves) {
      block(seg + 1);
    } else {
      bring(seg + 3);
      if (kSolvers<P> == 0) block(seg + 1);
      ready(seg + 2);
      __pipeline_wait_prior(0);
    }
    team_sync<P>(at.team);
  }
}
template <class P>
__device__ __forceinline__ void recur_blocked(ForwardShared<P>& sm, const ForwardArgs& a, const Place<P>& at, int segments) {
  Lines<P> S;
  read_lines<P>(S, a.s0, at, a.state_line, a.state_row);
  team_sync<P>(at.team);
  for (int seg = 0; seg < segments; seg++) {
    if (seg % P::every == 0) save_lines<P>(a, at, seg / P::every, S);
    forward_block<P>(S, sm.x[seg % 3], a, at, seg);
    team_sync<P>(at.team);
  }
  write_lines<P>(a.s1, S, at, a.state_line, a.state_row);
}

template <class P>
__device__ __forceinline__ void recur_alone(ForwardShared<P>& sm, const ForwardArgs& a, const Place<P>& at, int segments) {
  float S[P::E];
  Constants<P> par;
  read_constants<P>(par, a.param, at);
  read_state<P>(S, a.s0, at, a.state_line, a.state_row);
  Scalars<P> sc(a, at.h);
  const Folding<P> folding(a.param, at);
  auto bring = [&](int seg) {
    if (seg < segments) stage<P>(sm.raw[0], a.in, a.more, a.n, at.b, at.h, at.line0, seg * P::steps, at.tl);
    __pipeline_commit();
  };
  sc.fetch(a.in, a.n, at.b, at.h, 0, at.tl);
  bring(0);
  for (int seg = 0; seg < segments; seg++) {
    __pipeline_wait_prior(0);
    team_sync<P>(at.team);
    make_ready<P, P::forward_ready>(sm.x[0], sm.raw[0], sc, folding, at.tl);
    team_sync<P>(at.team);
    bring(seg + 1);
    const auto save = [&](int s) { save_state<P>(a, at, (seg * P::steps + s) / P::interval, S); };
    recur<P>({sm.x[0], sm.out[0][at.tw], at, par, S}, min(P::steps, a.n.T - seg * P::steps),
             special<P>(sm.x[0], a.in.mask, at.lane), save, [&] {
               if (seg + 1 < segments) sc.fetch(a.in, a.n, at.b, at.h, (seg + 1) * P::steps, at.tl);
             });
    __syncwarp();
    finish<P>(sm.out[0][at.tw], output<P>(a, at), 1.f, a.n, at, seg * P::steps);
    if constexpr (P::WPH == 1) __syncwarp();
  }
  write_state<P>(a.s1, S, at, a.state_line, a.state_row);
}

template <class P>
__global__ void __launch_bounds__(P::threads, P::forward_blocks) forward_kernel(const __grid_constant__ ForwardArgs a) {
  static_assert(P::M == 2 || !P::tensor, "retrieval and readout are two columns of a product");
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const Place<P> at(a.n);
  ForwardShared<P>& sm = reinterpret_cast<ForwardShared<P>*>(shared_bytes)[at.active ? at.team : 0];
  const int segments = (a.n.T + P::steps - 1) / P::steps;
  if constexpr (P::large) {  // the two paths never join, so that each may have its own number of registers
    if (at.helper) {
      give_registers<P::forward_registers[1]>();
      if (!at.active) return;
      clear(&sm, P::TL + at.tl, 2 * P::TL);
      team_sync<P>(at.team);
      if constexpr (P::blocked) help_blocked<P>(sm, a, at, segments);
      else help<P>(sm, a, at, segments);
      return;
    }
    take_registers<P::forward_registers[0]>();
  }
  if (!at.active) return;
  clear(&sm, at.tl + (at.helper ? P::TL : 0), P::helped ? 2 * P::TL : P::TL);
  team_sync<P>(at.team);
  if constexpr (!P::helped) recur_alone<P>(sm, a, at, segments);
  else if (!P::large && at.helper) help<P>(sm, a, at, segments);
  else if constexpr (P::blocked) recur_blocked<P>(sm, a, at, segments);
  else recur_helped<P>(sm, a, at, segments);
}

}  // namespace elman::matrix
