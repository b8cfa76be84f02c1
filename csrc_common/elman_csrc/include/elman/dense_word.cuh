// The epilogue of the dense skeleton: one thread's word (one or two neighbouring channels of one batch row) of each step.
//
// Its inputs are read two steps ahead, because a step is shorter than the latency of DRAM. Everything independent of the product is
// computed while blocks wait for each other. Results that no block waits for are written after the word is published.
#pragma once

#include <type_traits>

#include "dense_args.h"
#include "dense_cell.h"
#include <elman/dense_ptx.cuh>

namespace elman::dense {

template <class Elem>
struct Cursor {  // place of a thread's word in a step, and distance to the next step
  const Elem* at;
  ptrdiff_t forth;
  __device__ unsigned take() {
    const unsigned v = __ldcs(reinterpret_cast<const unsigned*>(at));
    at += forth;
    return v;
  }
};

// The input beside the state: u, everything that does not depend on the state; or x, which the same matrix multiplies; or z with x = SiLU(z).
enum class Input { Projected, Tied, TiedSilu };

template <class Elem>
__device__ float logistic(float x) {  // more accurate than Math::sigmoid; the time is hidden behind the wait for other blocks
  return std::is_same_v<Elem, float> ? Storage<Elem>::Math::sigmoid(x) : __fdividef(1.f, 1.f + __expf(-x));
}
template <class Elem, Input input>
__device__ float input_of(float x) {  // x from the stored input
  return input == Input::TiedSilu ? x * logistic<Elem>(x) : x;
}

// sum += x. If compensated, the error stays within a rounding or two for a sum of any length; `lost` is the rounding error of the last addition.
template <bool compensated>
__device__ __forceinline__ void add(float& sum, float& lost, float x) {
  const float y = compensated ? __fsub_rn(x, lost) : x, next = __fadd_rn(sum, y);
  if (compensated) lost = __fsub_rn(__fsub_rn(next, sum), y);
  sum = next;
}

// packed: a step where a document starts leaves out the product and passes no gradient back. The exchange keeps the state from
// before, since the derivative needs it.
//
// Tied weights: main is the next step's x, the published word is h_t + x_{t+1}, and the backward's product is the gradient of x_{t+1}.
template <class Cell, class Elem, int d, Input input, bool masked, bool packed, bool backward>
struct Word {
  using Args = DenseArgs<Elem, Cell::extras>;
  using S = Storage<Elem>;
  using Math = typename S::Math;
  static constexpr bool uses_a = UsesA<Cell>::value;  // a is one more extra of the backward
  static constexpr int VW = S::per_word, X = Cell::extras, XA = X > 0 ? X : 1, XI = uses_a ? X + 1 : XA;
  static constexpr bool carries = Cell::uses_prev || masked;  // part of the state passes a step other than through W

  struct Inputs {
    unsigned main, h, h_prev, x, extra[XI], live, fresh, follows;  // fresh: a document starts at this step; follows: at step t + 1
  };
  Cursor<Elem> main, of_h, of_h_prev, of_x, extra[XI];
  const unsigned char *of_mask, *of_starts;
  Inputs in, next, after;
  float x[VW], h[VW], h_prev[VW], kept[VW], gh[VW], y[VW], a[VW], e[VW][XA];  // y of a tied backward: the product
  DenseGrad<float, X> constant[VW], slope[VW];
  DenseReady<float> ready[VW];

  static constexpr bool in_steps = std::is_base_of_v<DenseSteps<Cell>, Cell>;  // its readout runs after the state is published
  static constexpr bool tied = input != Input::Projected, derives = backward && input == Input::TiedSilu;
  static constexpr int ahead = tied && !backward;  // main is read this many steps earlier

  // The inputs of step t. A thread whose channel lies beyond d reads the last one.
  __device__ void aim(const Args& g, int t, int row, int channel) {
    const ptrdiff_t plane = static_cast<ptrdiff_t>(g.B) * d;
    auto cursor = [&](const StridedView<Elem>& v) {
      return Cursor<Elem>{v.data + t * v.t + row * v.b + min(channel, d - VW), backward ? -v.t : v.t};
    };
    main = cursor(backward ? g.gy : g.u);
    main.at += ahead * main.forth;
#pragma unroll
    for (int i = 0; i < X; ++i) extra[i] = cursor(g.extra[i]);
    if (backward) of_h = cursor({g.history + plane, plane, d});
    if (backward && Cell::uses_prev) of_h_prev = cursor({g.history, plane, d});
    if (backward && uses_a) extra[X] = cursor({g.a, plane, d});
    if (derives) {  // the product's x is that of step t + 1
      of_x = cursor(g.u);
      of_x.at += t + 1 < g.T ? g.u.t : 0;
    }
    if (masked) of_mask = g.mask + static_cast<ptrdiff_t>(t) * g.B + row;
    if (packed) of_starts = g.starts + static_cast<ptrdiff_t>(t) * g.B + row;
  }
  // Reads the inputs of step s and moves on to the next step. Does nothing if the thread has no row, or after the last step.
  __device__ Inputs fetch(const Args& g, bool works, int s) {
    Inputs v{};
    if (works && s < g.T) {
      if (s + ahead < g.T) v.main = main.take();
#pragma unroll
      for (int i = 0; i < X; ++i) v.extra[i] = extra[i].take();
      if (backward) v.h = of_h.take();
      if (backward && Cell::uses_prev) v.h_prev = of_h_prev.take();
      if (backward && uses_a) v.extra[X] = extra[X].take();
      if (masked) v.live = *of_mask, of_mask += backward ? -g.B : g.B;
    }
    if (derives && works && s > 0 && s <= g.T) v.x = of_x.take();
    if (packed && works) {
      if (s < g.T) v.fresh = *of_starts;
      if (backward ? s > 0 && s <= g.T : tied && s + 1 < g.T) v.follows = of_starts[g.B];
      of_starts += backward ? -g.B : g.B;
    }
    return v;
  }
  // Runs before the wait. The backward is affine in gh: two evaluations of the cell give both coefficients before gh is known.
  __device__ void prepare(bool has_kept, const float* carry) {
#pragma unroll
    for (int i = 0; i < VW; ++i) kept[i] = 0.f;
    if (carries || has_kept)
#pragma unroll
      for (int i = 0; i < VW; ++i) kept[i] = packed && (backward ? in.follows : in.fresh) ? 0.f : carry[i];
    S::unpack(in.main, x);
    if constexpr (ahead)
#pragma unroll
      for (int i = 0; i < VW; ++i) x[i] = input_of<Elem, input>(x[i]);
#pragma unroll
    for (int j = 0; j < X; ++j) {
      float v[VW];
      S::unpack(in.extra[j], v);
#pragma unroll
      for (int i = 0; i < VW; ++i) e[i][j] = v[i];
    }
    if constexpr (backward) {
      S::unpack(in.h, h);
      S::unpack(packed && in.fresh ? 0u : in.h_prev, h_prev);
      if constexpr (uses_a) S::unpack(in.extra[X], a);
#pragma unroll
      for (int i = 0; i < VW; ++i) {
        constant[i] = dense_cell_backward<Cell, Math, float>(x[i], 0.f, h[i], h_prev[i], uses_a ? a[i] : 0.f, e[i]);
        slope[i] = dense_cell_backward<Cell, Math, float>(0.f, 1.f, h[i], h_prev[i], uses_a ? a[i] : 0.f, e[i]);
      }
    } else if constexpr (in_steps) {
#pragma unroll
      for (int i = 0; i < VW; ++i) {
        ready[i] = Cell::template ready<Math, float>(kept[i], e[i]);
        ptx::pin(ready[i].kept), ptx::pin(ready[i].write);
      }
    }
  }
  __device__ bool live() const { return !masked || in.live; }
  // The word that other blocks wait for, from the product: h_t or da_t.
  __device__ unsigned finish(const float* sum, const float* bias) {
    float out[VW];
#pragma unroll
    for (int i = 0; i < VW; ++i) {
      if constexpr (backward) {
        if constexpr (tied) y[i] = sum[i];
        gh[i] = (packed && in.follows ? 0.f : sum[i]) + kept[i];
        out[i] = live() ? constant[i].da + gh[i] * slope[i].da : 0.f;
      } else {
        a[i] = (packed && !tied && in.fresh ? 0.f : sum[i]) + (tied ? bias[i] : x[i]);
        if constexpr (in_steps) {
          h[i] = live() ? Cell::template state<Math, float>(a[i], ready[i]) : kept[i];
        } else {
          const auto made = Cell::template forward<Math, float>(a[i], kept[i], e[i]);
          h[i] = live() ? made.h : kept[i];
          y[i] = live() ? made.y : 0.f;
        }
        out[i] = tied ? (packed && in.follows ? 0.f : h[i]) + x[i] : h[i];
      }
    }
    return S::pack(out);
  }
  // After it is published: y and the tensors saved for the backward, or the gradients of the extras. `at`: the word's place in a contiguous [T,B,d] tensor.
  __device__ void write_rest(const Args& g, ptrdiff_t at) {
    // This branch is never taken. It keeps the compiler from starting the code after it before the word is sent.
    if (in_steps && (backward ? static_cast<void*>(g.dextra[0]) : g.y) == nullptr) return;
    if constexpr (backward) {
#pragma unroll
      for (int j = 0; j < X; ++j) {
        float de[VW];
#pragma unroll
        for (int i = 0; i < VW; ++i) de[i] = live() ? constant[i].dextra[j] + gh[i] * slope[i].dextra[j] : 0.f;
        __stcs(reinterpret_cast<unsigned*>(g.dextra[j] + at), S::pack(de));
      }
    } else {
      if constexpr (in_steps)
#pragma unroll
        for (int i = 0; i < VW; ++i) y[i] = live() ? Cell::template readout<Math, float>(h[i], e[i]) : 0.f;
      __stcs(reinterpret_cast<unsigned*>(g.y + at), S::pack(y));
      if constexpr (uses_a) __stcs(reinterpret_cast<unsigned*>(g.a + at), S::pack(a));
      if constexpr (tied) __stcs(reinterpret_cast<unsigned*>(g.history + static_cast<ptrdiff_t>(g.B) * d + at), S::pack(h));
    }
  }
  // Tied weights: the backward's product, W^T da_{t+1}, is the gradient of x_{t+1}.
  __device__ void write_dx(const Args& g, ptrdiff_t at) {
    if constexpr (derives) {
      float v[VW];
      S::unpack(in.x, v);
#pragma unroll
      for (int i = 0; i < VW; ++i) {
        const float p = logistic<Elem>(v[i]);
        y[i] *= fmaf(v[i] * p, 1.f - p, p);
      }
    }
    __stcs(reinterpret_cast<unsigned*>(g.dx + static_cast<ptrdiff_t>(g.B) * d + at), S::pack(y));
  }
  // Carries to the next step: the state, or the part of gh that does not pass through W. At the end, h_T or dL/dh_0.
  __device__ void keep(float* carry, bool last) const {
#pragma unroll
    for (int i = 0; i < VW; ++i) {
      if constexpr (!backward) carry[i] = h[i];
      else if (last) carry[i] = gh[i];
      else if (carries) carry[i] = !live() ? gh[i] : Cell::uses_prev ? constant[i].dprev + gh[i] * slope[i].dprev : 0.f;
    }
  }
};

}  // namespace elman::dense
