// The backward kernel, and the sum over parts of a head.
#pragma once

#include "matrix_state_gradients.cuh"
#include "matrix_state_walk.cuh"
#include "matrix_state_walk_large.cuh"
#include "matrix_state_walk_tensor.cuh"

namespace elman::matrix {

template <class P, int TL = P::TL>
__device__ __forceinline__ void bring_inputs(BackwardShared<P>& sm, const BackwardArgs& a, const Place<P>& at, int seg, int raw) {
  const int t0 = seg * P::steps;
  stage<P, TL>(sm.raw[raw], a.in, a.more, a.n, at.b, at.h, at.line0, t0, at.tl);
  stage_rows<P::steps, P::piece_line, P::CB, TL>(
      &sm.dy[raw][0][0], P::row_pitch,
      static_cast<const typename P::Store*>(a.dy) + (int64_t(at.b) * a.n.T * a.n.H + at.h) * P::V + at.line0, int64_t(a.n.H) * P::V,
      t0, a.n.T, P::V - at.line0, at.tl);
  if constexpr (P::keeps_r)
    stage_rows<P::steps, P::piece_line, P::CB, TL>(
        &sm.r[raw][0][0], P::row_pitch,
        static_cast<const typename P::Store*>(a.saved) + Saved<P>(a.n).retrieved(at.b) + at.h * P::V + at.line0,
        int64_t(a.n.H) * P::V, t0, a.n.T, P::V - at.line0, at.tl);
}
template <class P>
__device__ __forceinline__ void bring_state(BackwardShared<P>& sm, const BackwardArgs& a, const Place<P>& at, int seg, int buf) {
  const Saved<P> saved(a.n);
#pragma unroll
  for (int m = 0; m < P::M; m++) {
    const typename P::Kept* from = static_cast<const typename P::Kept*>(a.saved) + saved.state(at, seg, at.line(m));
    if (at.mine(m))
#pragma unroll
      for (int n = 0; n < P::RV; n++) {
        const int i = (n * P::L + at.rg) * P::VW;
        if (i < P::N)
          __pipeline_memcpy_async(&sm.states.x[buf][at.tw][m][n][at.lane][0], from + i, P::VW * sizeof(typename P::Kept));
      }
  }
}
// The same, straight to registers.
template <class P>
__device__ __forceinline__ void read_saved(float (&S)[P::E], const BackwardArgs& a, const Place<P>& at, int seg) {
  const Saved<P> saved(a.n);
#pragma unroll
  for (int m = 0; m < P::M; m++) {
    const typename P::Kept* from = static_cast<const typename P::Kept*>(a.saved) + saved.state(at, seg, at.line(m));
#pragma unroll
    for (int n = 0; n < P::RV; n++) {
      const int i = (n * P::L + at.rg) * P::VW;
      float g[P::VW] = {};
      if (at.mine(m) && i < P::N) load<P::VW>(g, from + i);
#pragma unroll
      for (int e = 0; e < P::VW; e++) S[P::element(m, n * P::VW + e)] = g[e];
    }
  }
}
template <class P>
__device__ __forceinline__ void read_saved(float (&S)[P::E], const BackwardShared<P>& sm, const Place<P>& at, int buf) {
#pragma unroll
  for (int m = 0; m < P::M; m++)
#pragma unroll
    for (int n = 0; n < P::RV; n++) {
      float g[P::VW];
      load<P::VW>(g, &sm.states.x[buf][at.tw][m][n][at.lane][0]);
#pragma unroll
      for (int e = 0; e < P::VW; e++) S[P::element(m, n * P::VW + e)] = g[e];
    }
}
// Helpers replay segment number j, whose inputs they have just made ready, from the state before it. If only every second state was saved, they already
// hold that state. The walk over the previous segment tells them which places are free. The first segment has none before it; its last state passes to
// the walk through the space for results.
template <class P>
__device__ __forceinline__ void replay_ahead(BackwardShared<P>& sm, const BackwardArgs& a, const Place<P>& at, int segments, int j,
                                             int raw, const Constants<P>& par, Packed<P>& state) {
  if (j >= segments) {
    for (int i = 0; i < P::signals; i++) signal<P, true>(at.team, i);
    return;
  }
  if constexpr (P::every == 1) fetch_state<P>(state, a, at, segments - 1 - j);
  helpers_sync<P>(at.team);
  if (j == 0) {
    replay<P, true>(sm, 0, raw, at, par, state);
    hand_over<P, true>(sm, at, state);
  } else if (special<P>(sm.x[j & 1], a.in.mask, at.lane)) {
    replay<P, true, true>(sm, j & 1, raw, at, par, state);
  } else {
    replay<P, false, true>(sm, j & 1, raw, at, par, state);
  }
}
// Computes the state before segment number j if only every second one was saved: from the saved one, over segment number j + 1, whose inputs arrive in
// `raw`.
template <class P>
__device__ __forceinline__ void reach_state(Packed<P>& state, BackwardShared<P>& sm, const BackwardArgs& a, const Place<P>& at,
                                            int segments, int j, int raw, const Constants<P>& par, const Scalars<P>& sc,
                                            const Folding<P>& folding) {
  if (j >= segments || (segments - 1 - j) % P::every == 0) return;
  __pipeline_wait_prior(0);
  helpers_sync<P>(at.team);
  make_ready<P, P::backward_ready>(sm.x[j & 1], sm.raw[raw], sc, folding, at.tl);
  helpers_sync<P>(at.team);
  pass_over<P>(sm, j & 1, raw, at, par, state);
  helpers_sync<P>(at.team);
}
// The helpers of a team. Segments run from the last to the first: number j is segment `segments` - 1 - j. While j is walked, helpers fetch j + 2, make
// j + 1 ready and store the gradients of j - 1.
template <class P>
__device__ __forceinline__ void help(BackwardShared<P>& sm, const BackwardArgs& a,
                                     std::conditional_t<P::renews, Place<P>, const Place<P>&> at, int segments) {
  Scalars<P> sc(a, at.h), early = sc;  // early: for the segment to pass over
  HeadSums sums;
  Folding<P> folding(a.param, at);
  Constants<P> par;
  Packed<P> start;
  if constexpr (P::ahead) read_constants<P>(par, a.param, at);
  const auto renew = [&] {  // as in help_blocked
    if constexpr (P::renews) at.lane = afresh(threadIdx.x % 32), at.tl = at.tw * 32 + at.lane;
  };
  auto bring = [&](int j, int raw) {
    renew();
    if (j < segments) bring_inputs<P>(sm, a, at, segments - 1 - j, raw);
  };
  auto state = [&](int j) {
    if (j >= segments) return;
    if constexpr (P::large || P::tight) announce_state<P>(a, at, (segments - 1 - j) / P::every);
    else bring_state<P>(sm, a, at, segments - 1 - j, j & 1);
    if constexpr (P::every > 1) {
      fetch_state<P>(start, a, at, (segments - 1 - j) / P::every);
      early.fetch(a.in, a.n, at.b, at.h, max(segments - 2 - j, 0) * P::steps, at.tl);
    }
  };
  auto ready = [&](int j, int raw) {
    renew();
    if (j < segments) make_ready<P, P::backward_ready>(sm.x[j & 1], sm.raw[raw], sc, folding, at.tl);
    if (j + 1 < segments) sc.fetch(a.in, a.n, at.b, at.h, (segments - 2 - j) * P::steps, at.tl);
  };
  sc.fetch(a.in, a.n, at.b, at.h, (segments - 1) * P::steps, at.tl);
  bring(0, 0);
  bring(1, 1);
  state(0);
  __pipeline_commit();
  __pipeline_wait_prior(0);
  helpers_sync<P>(at.team);
  if constexpr (P::every > 1) reach_state<P>(start, sm, a, at, segments, 0, 1, par, early, folding);
  ready(0, 0);
  if constexpr (P::ahead) replay_ahead<P>(sm, a, at, segments, 0, 0, par, start);
  team_sync<P>(at.team);
  int before = 2, next = 1;  // two of the three places of raw inputs: those of j - 1 and j + 1
  for (int j = 0; j < segments; j++) {
    state(j + 1);
    __pipeline_commit();
    renew();
    if (j > 0) give_gradients<P>(a, sm, at, segments - j, (j - 1) & 1, before, sc, sums, folding);
    if constexpr (P::large && !P::ahead) team_sync<P>(at.team);
    __pipeline_wait_prior(1);  // the inputs of j + 1, requested a whole round ago
    helpers_sync<P>(at.team);
    bring(j + 2, before);
    __pipeline_commit();
    if constexpr (P::every > 1) reach_state<P>(start, sm, a, at, segments, j + 1, before, par, early, folding);
    ready(j + 1, next);
    if constexpr (P::ahead) replay_ahead<P>(sm, a, at, segments, j + 1, next, par, start);
    __pipeline_wait_prior(1);  // the state of j + 1
    team_sync<P>(at.team);
    const int now = 3 - before - next;
    next = before, before = now;
  }
  give_gradients<P>(a, sm, at, 0, (segments - 1) & 1, before, sc, sums, folding);
  float* room = P::large ? reinterpret_cast<float*>(&sm.dkq[segments & (P::result_buffers - 1)][0][0][0])
                         : &sm.dscalar[segments & (P::result_buffers - 1)][0][0][0];
  const auto sync = [&] { helpers_sync<P>(at.team); };
  give_heads<P>(a, at, sums, room, sync);
  give_folded<P>(a, at, folding, reinterpret_cast<float*>(&sm.dkq[segments & (P::result_buffers - 1)][0][0][0]), sync);
}

template <class P>
__device__ __forceinline__ void walk_helped(BackwardShared<P>& sm, const BackwardArgs& a, const Place<P>& at, int segments,
                                            const Constants<P>& par, float (&dS)[P::E], ConstantSums<P>& dpar) {
  float S0[P::E];
  if constexpr (P::tight) read_saved<P>(S0, a, at, segments - 1);
  team_sync<P>(at.team);
  for (int j = 0, raw = 0; j < segments; j++) {
    if constexpr (!P::tight) read_saved<P>(S0, sm, at, j & 1);
    if (special<P>(sm.x[j & 1], a.in.mask, at.lane) || (segments - j) * P::steps > a.n.T)
      walk_tensor<P, true>(sm, j & 1, raw, at, par, S0, dS, dpar);
    else walk_tensor<P, false>(sm, j & 1, raw, at, par, S0, dS, dpar);
    if (P::tight && j + 1 < segments) read_saved<P>(S0, a, at, segments - 2 - j);
    team_sync<P>(at.team);
    raw = raw == 2 ? 0 : raw + 1;
  }
}
// The same while helpers replay the next segment.
template <class P>
__device__ __forceinline__ void walk_replayed(BackwardShared<P>& sm, const BackwardArgs& a, const Place<P>& at, int segments,
                                              const Constants<P>& par, float (&dS)[P::E], ConstantSums<P>& dpar) {
  Packed<P> state;
  team_sync<P>(at.team);
  hand_over<P, false>(sm, at, state);
  for (int j = 0, raw = 0; j < segments; j++) {
    if (special<P>(sm.x[j & 1], a.in.mask, at.lane) || j == 0) walk_large<P, true>(sm, j & 1, raw, at, par, state, dS, dpar);
    else walk_large<P, false>(sm, j & 1, raw, at, par, state, dS, dpar);
    team_sync<P>(at.team);
    raw = raw == 2 ? 0 : raw + 1;
  }
}
// The same without replaying helpers: they store a segment's gradients while the next one is replayed, before it is walked.
template <class P>
__device__ __forceinline__ void walk_large_helped(BackwardShared<P>& sm, const BackwardArgs& a, const Place<P>& at, int segments,
                                                  const Constants<P>& par, float (&dS)[P::E], ConstantSums<P>& dpar) {
  Packed<P> state;
  fetch_state<P>(state, a, at, segments - 1);
  team_sync<P>(at.team);
  for (int j = 0, raw = 0; j < segments; j++) {
    if (special<P>(sm.x[j & 1], a.in.mask, at.lane) || (segments - j) * P::steps > a.n.T)
      replay<P, true>(sm, j & 1, raw, at, par, state);
    else replay<P, false>(sm, j & 1, raw, at, par, state);
    team_sync<P>(at.team);
    if (special<P>(sm.x[j & 1], a.in.mask, at.lane) || j == 0) walk_large<P, true>(sm, j & 1, raw, at, par, state, dS, dpar);
    else walk_large<P, false>(sm, j & 1, raw, at, par, state, dS, dpar);
    if (j + 1 < segments) fetch_state<P>(state, a, at, segments - 2 - j);
    team_sync<P>(at.team);
    raw = raw == 2 ? 0 : raw + 1;
  }
}

// The helpers for sixteen steps at once. While number j is walked, helpers first store the gradients of j - 1; the walk waits for them before it overwrites
// those results. Then they fetch j + 3 and make j + 2 ready, and one or two warps run make_block for j + 1, which needs all of its rows. With two buffers
// of ready inputs (lead 1), they fetch j + 2 and make all of j + 1; those that do not run make_block make the Passage over j + 2.
template <class P>
__device__ __forceinline__ void help_blocked(BackwardShared<P>& sm, const BackwardArgs& a, Place<P> at, int segments) {
  constexpr int lead = P::ready_buffers - 1;  // segments from the walked one to the one made ready
  Scalars<P> sc(a, at.h);
  HeadSums sums;
  Folding<P> folding(a.param, at);
  Place<P> crew = at;
  const auto renew = [&] {  // otherwise addresses that depend on the lane are computed before the loop and spilled
    at.lane = afresh(threadIdx.x % 32);
    at.tl = at.tw * 32 + at.lane, crew.tl = at.tl - kSolvers<P>;
  };
  auto bring = [&](int j) {
    renew();
    if (j < segments) bring_inputs<P, kCrew<P>>(sm, a, crew, segments - 1 - j, j % P::raw_buffers);
    __pipeline_commit();
  };
  auto fetch = [&](int j) {
    if (j < segments) sc.fetch(a.in, a.n, at.b, at.h, (segments - 1 - j) * P::steps, at.tl);
  };
  auto ready = [&](int j) {
    renew();
    Ready<P>& x = sm.x[j % P::ready_buffers];
    if (j < segments) make_ready<P, P::backward_ready, kCrew<P>>(x, sm.raw[j % P::raw_buffers], sc, folding, crew.tl);
    if (!P::passage && crew.tl < 32) {
      float all, scalar;
      const float behind = keeps_behind<P>(all, scalar, sc, at.lane);
      if (at.lane < 16) x.behind[at.lane] = behind;
      if (at.lane == 0) x.all = all;
    }
    fetch(j + 1);
  };
  auto block = [&](int j) {
    if (at.tw < 2 && j < segments) make_block<P, false>(sm.x[j % P::ready_buffers], at);
  };
  auto passage = [&](int j) {
    constexpr int busy = P::WPH > 2 ? 64 : 0;  // with make_block
    renew();
    if constexpr (P::passage)
      if (at.tl >= busy && j < segments && (segments - 1 - j) % 2 == 0)
        make_passage<P, P::TL - busy>(sm, j % P::raw_buffers, sc, at.lane, at.tl - busy);
  };
  auto give = [&](int j) {
    const Ready<P>& x = sm.x[j % P::ready_buffers];
    renew();
    for (int i = at.tl; i < 256; i += P::TL) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < P::WPH; w++) sum += sm.passing[w][i / 16][i % 16];
      sm.passing[0][i / 16][i % 16] = sum * x.products[i / 16][i % 16];
    }
    helpers_sync<P>(at.team);
    renew();
    give_gradients<P>(a, sm, at, segments - 1 - j, j % P::ready_buffers, j % P::raw_buffers, sc, sums, folding);
  };
  const bool solves = at.tl < kSolvers<P>;
  auto prepare = [&](int j) {
    if constexpr (lead == 1) {
      bring(j + 2), ready(j + 1);
      __pipeline_wait_prior(0);
      helpers_sync<P>(at.team);
      block(j + 1), passage(j + 2);
    } else if (solves) {
      block(j + 1);
    } else {
      bring(j + 3);
      if (kSolvers<P> == 0) block(j + 1);
      ready(j + 2);
      __pipeline_wait_prior(0);
    }
  };
  if (!solves) {
    fetch(0);
    for (int j = 0; j < lead; j++) bring(j);
    __pipeline_wait_prior(0);
  }
  helpers_sync<P>(at.team);
  if constexpr (lead > 1) {
    if (!solves) ready(0);
    helpers_sync<P>(at.team);
  }
  prepare(-1);
  team_sync<P>(at.team);
  for (int j = 0;; j++) {
    if (j + 1 < segments) announce_state<P>(a, at, (segments - 2 - j) / P::every);
    if (j > 0) give(j - 1);
    if (j == segments) break;
    team_sync<P>(at.team);
    prepare(j);
    team_sync<P>(at.team);
  }
  give_heads<P>(a, at, sums, reinterpret_cast<float*>(&sm.dkq[0][0][0][0]), [&] { helpers_sync<P>(at.team); });
}

// The walk for sixteen steps at once.
template <class P>
__device__ __forceinline__ void walk_blocked(BackwardShared<P>& sm, const BackwardArgs& a, const Place<P>& at, int segments) {
  Lines<P> G;
  SavedLines<P> S;
  read_lines<P>(G, a.ds1, at, a.state_line, a.state_row);
  fetch_lines<P>(S, a, at, (segments - 1) / P::every);
  team_sync<P>(at.team);
  for (int j = 0; j < segments; j++) {
    if ((segments - 1 - j) % P::every) pass_over<P>(S, sm, j + 1, at);
    backward_block<P>(G, S, sm, j % P::ready_buffers, j % P::raw_buffers, at, [&] { team_sync<P>(at.team); });
    if (j + 1 < segments) fetch_lines<P>(S, a, at, (segments - 2 - j) / P::every);
    team_sync<P>(at.team);
  }
  write_lines<P>(a.ds0, G, at, a.state_line, a.state_row);
}

template <class P>
__device__ __forceinline__ void walk_alone(BackwardShared<P>& sm, const BackwardArgs& a, const Place<P>& at, int segments,
                                           const Constants<P>& par, float (&dS)[P::E], ConstantSums<P>& dpar) {
  Scalars<P> sc(a, at.h);
  HeadSums sums;
  Folding<P> folding(a.param, at);
  auto bring = [&](int seg) {
    bring_inputs<P>(sm, a, at, seg, seg & 1);
    bring_state<P>(sm, a, at, seg, 0);
    __pipeline_commit();
  };
  sc.fetch(a.in, a.n, at.b, at.h, (segments - 1) * P::steps, at.tl);
  bring(segments - 1);
  for (int seg = segments - 1; seg >= 0; seg--) {
    float S0[P::E];
    __pipeline_wait_prior(0);
    team_sync<P>(at.team);
    make_ready<P, P::backward_ready>(sm.x[0], sm.raw[seg & 1], sc, folding, at.tl);
    read_saved<P>(S0, sm, at, 0);
    team_sync<P>(at.team);
    if (seg > 0) {
      bring(seg - 1);
      sc.fetch(a.in, a.n, at.b, at.h, (seg - 1) * P::steps, at.tl);
    }
    if (special<P>(sm.x[0], a.in.mask, at.lane) || (seg + 1) * P::steps > a.n.T) walk<P, true>(sm, seg & 1, at, par, S0, dS, dpar);
    else walk<P, false>(sm, seg & 1, at, par, S0, dS, dpar);
    team_sync<P>(at.team);
    sums_over_lines<P>(sm, seg & 1, at);
    team_sync<P>(at.team);
    give_gradients<P>(a, sm, at, seg, 0, seg & 1, sc, sums, folding);
  }
  const auto sync = [&] { team_sync<P>(at.team); };
  give_heads<P>(a, at, sums, &sm.dscalar[0][0][0][0], sync);
  give_folded<P>(a, at, folding, &sm.s[0][0][0], sync);
}

template <class P>
__global__ void __launch_bounds__(P::threads, P::backward_blocks) backward_kernel(const __grid_constant__ BackwardArgs a) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const Place<P> at(a.n);
  BackwardShared<P>& sm = reinterpret_cast<BackwardShared<P>*>(shared_bytes)[at.active ? at.team : 0];
  const int segments = (a.n.T + P::steps - 1) / P::steps;
  if constexpr (P::helped) {
    if (at.helper) {  // the two paths never join, so that each may have its own number of registers
      if constexpr (P::moves) give_registers<P::helper_registers>();
      if (!at.active) return;
      clear(&sm, P::TL + at.tl, 2 * P::TL);
      team_sync<P>(at.team);
      if constexpr (P::blocked) help_blocked<P>(sm, a, at, segments);
      else help<P>(sm, a, at, segments);
      return;
    }
    if constexpr (P::moves) take_registers<P::own_registers>();
  }
  if (!at.active) return;
  clear(&sm, at.tl, P::helped ? 2 * P::TL : P::TL);
  if constexpr (P::blocked) {
    team_sync<P>(at.team);
    walk_blocked<P>(sm, a, at, segments);
  } else {
    float dS[P::E];
    Constants<P> par;
    ConstantSums<P> dpar = {};
    read_constants<P>(par, a.param, at);
    read_state<P>(dS, a.ds1, at, a.state_line, a.state_row);
    team_sync<P>(at.team);
    if constexpr (P::ahead) walk_replayed<P>(sm, a, at, segments, par, dS, dpar);
    else if constexpr (P::large) walk_large_helped<P>(sm, a, at, segments, par, dS, dpar);
    else if constexpr (P::helped) walk_helped<P>(sm, a, at, segments, par, dS, dpar);
    else walk_alone<P>(sm, a, at, segments, par, dS, dpar);
    write_state<P>(a.ds0, dS, at, a.state_line, a.state_row);
#pragma unroll
    for (int i = 0; i < P::NC; i++)
#pragma unroll
      for (int m = 0; m < P::M; m++)
        if (at.rg == 0 && at.mine(m)) a.dparam[i][at.bh * P::V + at.line(m)] = dpar[m][i];
  }
}

// Adds up the parts of a head, in order.
template <class P>
__global__ void __launch_bounds__(256) add_parts_kernel(const __grid_constant__ BackwardArgs a) {
  using Store = typename P::Store;
  constexpr int N = P::N, M = (2 + P::NX) * N;
  const int64_t rows = int64_t(a.n.B) * a.n.T * a.n.H;
  const int lane = threadIdx.x % 32;
  for (int64_t row = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32; row < rows; row += gridDim.x * (blockDim.x / 32)) {
    const int64_t token = row / a.n.H, h = row % a.n.H;
    const float* from = a.parts + row * P::part_width;
    for (int e = lane * 4; e < M; e += 128) {
      float d[4] = {};
#pragma unroll
      for (int p = 0; p < P::PARTS; p++) {
        float more[4];
        load<4>(more, vectors_of<P>(from + p * rows * P::part_width) + e);
#pragma unroll
        for (int i = 0; i < 4; i++) d[i] += more[i];
      }
      const int which = e / N;
      if (P::Opt::wide && which > 1) {
        store_further<P, 4>(a.dvector[which - 2], which - 2, token * a.dvector_step[which - 2] + h * N + e % N, d);
        continue;
      }
      Store* to;
      if (which == 0) to = static_cast<Store*>(a.dk) + token * a.dk_step;
      else if (which == 1) to = static_cast<Store*>(a.dq) + token * a.dq_step;
      else to = static_cast<Store*>(a.dvector[which - 2]) + token * a.dvector_step[which - 2];
      store<4>(to + h * N + e % N, d);
    }
    if (lane >= P::NS) continue;
    float d = 0;
    for (int p = 0; p < P::PARTS; p++) d += from[(p * rows + 1) * P::part_width - 4 + lane];
    const bool third = P::NS > 2 && lane == 2;
    const int64_t to = token * (third ? a.third.dx_step : a.dscalar_step[lane]) + h;
    void* at = third ? a.third.dx : a.dscalar[lane];
    if ((third ? P::kind2 : lane ? P::kind1 : P::kind0) == ScalarKind::given) static_cast<float*>(at)[to] = d;
    else static_cast<Store*>(at)[to] = from_float<Store>(d);
  }
}

}  // namespace elman::matrix
