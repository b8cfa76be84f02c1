// E23 on the GPU: all time steps in one launch, forward and backward.
//
// A cluster of d / 32 blocks takes up to 8 batch rows. A block owns 32 channels of W_h and W_w (of their transposes, in the
// backward) and holds them in registers for the whole launch (elman/dense_product.cuh). A warp has a row, a lane has a channel
// and holds its tape, or the gradient of it, in registers, one number per slot. Sums over channels run over the warp, then over
// blocks.
//
// Blocks exchange, for each row, a vector [d] and one number per slot and block, through distributed shared memory: 16-byte
// pieces, counted by an mbarrier of the receiver. Two halves alternate. A half is free again once the next exchange has arrived
// from all blocks, since a warp sends that one after it has read this one.
//
//   forward   h_t, M_{t-1}[n] h_t  ->  W_h h_t, W_w h_t = w_t, write scores s;   then one number: w_t h_t, which gives the next read
//             scores without another product: M_t h_t = (1 - a_n) s_n + a_n w_t h_t.
//   backward  the gradient of w_t, G[n] (w_t - M_{t-1}[n])  ->  its part in that of h_t;   then δ_t, M_{t-1}[n] δ_t  ->  that of h_{t-1}.
#pragma once

#include "e23_cluster.cuh"

namespace elman::e23 {

template <class Elem, int d, bool masked, bool packed>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const __grid_constant__ Args<Elem> g) {
  char* const shared = ptx::dynamic_shared();
  using Math = typename Storage<Elem>::Math;
  const int row0 = blockIdx.y * g.rows;
  Cluster<Elem, d, false> c(g, shared, min(g.rows, g.B - row0));
  const bool mine = c.warp < c.rows;  // uniform in a warp
  const int lane = c.lane, channel = c.rank * kOwned + lane, row = row0 + c.warp;
  const std::ptrdiff_t plane = static_cast<std::ptrdiff_t>(g.B) * d, place = static_cast<std::ptrdiff_t>(row) * d + channel;
  const float kappa = rsqrtf(static_cast<float>(d));

  float h = 0.f, tape[kSlots] = {}, reads[kSlots] = {}, of_slot[kSlots], from_h = 0.f;
  auto score = [&] {
#pragma unroll
    for (int n = 0; n < kSlots; ++n) of_slot[n] = tape[n] * h;
    return slot_sums(of_slot);
  };
  struct Inputs {
    float u;
    bool live, fresh;
  };
  auto fetch = [&](int t) {
    Inputs in{0.f, true, false};
    if (!mine || t >= g.T) return in;
    in.u = load(g.main + t * plane + place);
    if (masked) in.live = g.mask[static_cast<std::ptrdiff_t>(t) * g.B + row] != 0;
    if (packed) in.fresh = g.starts[static_cast<std::ptrdiff_t>(t) * g.B + row] != 0;
    return in;
  };
  float share = 0.f;  // share of slot lane % 8 in the read
  if (mine) {
    h = g.h0[place];
#pragma unroll
    for (int n = 0; n < kSlots; ++n) tape[n] = g.m0[(static_cast<std::ptrdiff_t>(row) * kSlots + n) * d + channel];
    g.history[place] = static_cast<Elem>(h);
    c.send(h, score());
  }
  Inputs next = fetch(0);
  c.wait();
  c.partials(c.h_part, 0);
  __syncthreads();
  if (mine) from_h = c.product(0), share = softmax<Elem>(kappa * c.slots_received()), spread(share, reads);

  for (int t = 0; t < g.T; ++t) {
    const Inputs in = next;
    next = fetch(t + 1);
    const bool live = !masked || in.live;
    const std::ptrdiff_t at = t * plane + place, of_slots = (static_cast<std::ptrdiff_t>(t) * g.B + row) * kSlots;
    c.e++;
    if (packed && in.fresh) {  // uniform in a warp; h = 0, so all scores are 0
      h = from_h = 0.f, share = 1.f / kSlots;
#pragma unroll
      for (int n = 0; n < kSlots; ++n) tape[n] = g.initial[n * d + channel], reads[n] = share;
    }
    if (mine) {
      float a = in.u + from_h;
#pragma unroll
      for (int n = 0; n < kSlots; ++n) a += reads[n] * tape[n];
      if (live) h = Math::tanh(a);
      c.send(h, score());
      g.history[at + plane] = static_cast<Elem>(h);
      g.y[at] = static_cast<Elem>(live ? h : 0.f);
      if (g.tape) {
#pragma unroll
        for (int n = 0; n < kSlots; ++n) g.tape[(of_slots + n) * d + channel] = static_cast<Elem>(tape[n]);
        if (c.rank == 0 && lane < kSlots) g.reads[of_slots + lane] = share;
      }
    }
    c.wait();
    c.partials(c.h_part, 0);
    c.partials(c.w_part, 1);
    __syncthreads();
    float score_now = 0.f, written = 0.f, w = 0.f;
    if (mine) {
      from_h = c.product(0), w = c.product(1);
      score_now = c.slots_received(), written = softmax<Elem>(kappa * score_now);
    }
    c.e++;
    if (mine) {
      c.send_number(warp_sum(w * h));
      float writes[kSlots];
      spread(written, writes);
      if (live)
#pragma unroll
        for (int n = 0; n < kSlots; ++n) tape[n] += writes[n] * (w - tape[n]);
      if (g.tape) {
        g.w[at] = static_cast<Elem>(w);
        if (c.rank == 0 && lane < kSlots) g.writes[of_slots + lane] = written;
      }
    }
    c.wait();
    if (mine && live) {
      share = softmax<Elem>(kappa * ((1.f - written) * score_now + written * c.number_received()));
      spread(share, reads);
    }
  }
  if (mine) {
    g.h1[place] = h;
#pragma unroll
    for (int n = 0; n < kSlots; ++n) g.m1[(static_cast<std::ptrdiff_t>(row) * kSlots + n) * d + channel] = tape[n];
  }
  c.leave();
}

template <class Elem, int d, bool masked, bool packed>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ Args<Elem> g) {
  char* const shared = ptx::dynamic_shared();
  const int row0 = blockIdx.y * g.rows;
  Cluster<Elem, d, true> c(g, shared, min(g.rows, g.B - row0));
  const bool mine = c.warp < c.rows;
  const int lane = c.lane, channel = c.rank * kOwned + lane, row = row0 + c.warp;
  const std::ptrdiff_t plane = static_cast<std::ptrdiff_t>(g.B) * d, place = static_cast<std::ptrdiff_t>(row) * d + channel;
  const float kappa = rsqrtf(static_cast<float>(d));

  struct Inputs {
    float gy, h_prev, w, reads, writes, tape[kSlots];
    bool live, fresh;
  };
  auto fetch = [&](int t) {
    Inputs in{};
    if (!mine || t < 0) return in;
    const std::ptrdiff_t at = t * plane + place, of_slots = (static_cast<std::ptrdiff_t>(t) * g.B + row) * kSlots;
    in.gy = load(g.main + at), in.h_prev = load(g.history + at), in.w = load(g.w + at);
    in.reads = g.reads[of_slots + lane % kSlots], in.writes = g.writes[of_slots + lane % kSlots];
#pragma unroll
    for (int n = 0; n < kSlots; ++n) in.tape[n] = load(g.tape + (of_slots + n) * d + channel);
    in.live = !masked || g.mask[static_cast<std::ptrdiff_t>(t) * g.B + row] != 0;
    if (packed) in.fresh = g.starts[static_cast<std::ptrdiff_t>(t) * g.B + row] != 0;
    return in;
  };
  float r = 0.f, h = 0.f, gm[kSlots] = {}, of_slot[kSlots];  // gradients that arrive at h and at the tape
  float of_initial[packed ? kSlots : 1] = {};
  if (mine) {
    r = g.h0[place], h = load(g.history + g.T * plane + place);
#pragma unroll
    for (int n = 0; n < kSlots; ++n) gm[n] = g.m0[(static_cast<std::ptrdiff_t>(row) * kSlots + n) * d + channel];
  }
  Inputs next = fetch(g.T - 1);
  for (int t = g.T - 1; t >= 0; --t) {
    const Inputs in = next;
    next = fetch(t - 1);
    const std::ptrdiff_t at = t * plane + place;
    float writes[kSlots], reads[kSlots], slopes[kSlots], delta = 0.f;
    if (mine) {
      spread(in.writes, writes), spread(in.reads, reads);
      float dw = 0.f;
#pragma unroll
      for (int n = 0; n < kSlots; ++n) dw += writes[n] * gm[n], of_slot[n] = gm[n] * (in.w - in.tape[n]);
      if (!in.live) dw = 0.f;
      c.send(dw, slot_sums(of_slot));
      g.dw[at] = static_cast<Elem>(dw);
    }
    c.wait();
    c.partials(c.w_part, 1);
    __syncthreads();
    float total = 0.f;
    if (mine) {
      spread(kappa * softmax_gradient(in.writes, c.slots_received()), slopes);
      total = in.gy + r + c.product(1);
#pragma unroll
      for (int n = 0; n < kSlots; ++n) total += slopes[n] * in.tape[n];
      if (in.live) {
        delta = total * (1.f - h * h);
#pragma unroll
        for (int n = 0; n < kSlots; ++n) gm[n] += slopes[n] * h - writes[n] * gm[n];
      }
#pragma unroll
      for (int n = 0; n < kSlots; ++n) of_slot[n] = delta * in.tape[n];
    }
    c.e++;
    if (mine) {
      c.send(delta, slot_sums(of_slot));
      g.y[at] = static_cast<Elem>(delta);
    }
    c.wait();
    c.partials(c.h_part, 0);
    __syncthreads();
    if (mine) {
      spread(kappa * softmax_gradient(in.reads, c.slots_received()), slopes);
      float through = c.product(0);
#pragma unroll
      for (int n = 0; n < kSlots; ++n) through += slopes[n] * in.tape[n];
      if (in.live) {
        r = through;
#pragma unroll
        for (int n = 0; n < kSlots; ++n) gm[n] += reads[n] * delta + slopes[n] * (packed && in.fresh ? 0.f : in.h_prev);
      }
      if constexpr (packed)
        if (in.fresh) {
          r = 0.f;
#pragma unroll
          for (int n = 0; n < kSlots; ++n) of_initial[n] += gm[n], gm[n] = 0.f;
        }
      h = in.h_prev;
    }
    c.e++;
  }
  if (mine) {
    g.h1[place] = r;
#pragma unroll
    for (int n = 0; n < kSlots; ++n) {
      const std::ptrdiff_t at = (static_cast<std::ptrdiff_t>(row) * kSlots + n) * d + channel;
      g.m1[at] = gm[n];
      if constexpr (packed) g.dinitial[at] = of_initial[n];
    }
  }
  c.leave();
}

}  // namespace elman::e23
