// E61: h = f h' + w v, y = h silu(h), f = sigmoid(x0).
#pragma once

#include <elman/elementwise_cell.h>

namespace elman::e61 {

// w = 1 - f where `convex`, else 1; v = tanh(x1) where `bounded`, else x1.
template <bool convex, bool bounded>
struct Decay {
  static constexpr int streams = 2, vectors = 0, states = 1;

  template <class Math, class T>
  static ELMAN_HD ElementwiseOut<Decay, T> forward(const T* prev, const T* x, const T*) {
    const auto f = Math::gate(x[0]);
    const T v = bounded ? Math::tanh(x[1]) : x[1];
    const T h = f.open * prev[0] + (convex ? f.shut * v : v);
    return {{h}, self_gated<Math>(h)};
  }

  template <class Math, class T>
  static ELMAN_HD ElementwiseGrad<Decay, T> backward(T gy, const T* gh, const T* h, const T* prev, const T* x, const T*) {
    const auto f = Math::gate(x[0]);
    const T v = bounded ? Math::tanh(x[1]) : x[1], total = through_self_gate<Math>(gy, gh[0], h[0]);
    const T df = total * (convex ? prev[0] - v : prev[0]) * f.open * f.shut;
    const T dv = convex ? total * f.shut : total;
    return {{total * f.open}, {df, bounded ? dv * (T(1) - v * v) : dv}, {}};
  }
};
using A = Decay<true, false>;
using B = Decay<false, false>;
using Tanh = Decay<true, true>;

}  // namespace elman::e61
