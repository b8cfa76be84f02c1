// E68: h = f h' + (1 - f) tanh(x1) q, y = h silu(h), f = sigmoid(x0), q = sigmoid(p0 h' + p1), or sigmoid(p1 - p0 |h'|).
#pragma once

#include <elman/elementwise_cell.h>

namespace elman::e68 {

template <bool inverse>
struct Cell {
  static constexpr int streams = 2, vectors = 2, states = 1;

  // The factor of p0, and its derivative.
  template <class T>
  static ELMAN_HD T seen(T prev) {
    return inverse ? (prev > T(0) ? -prev : prev) : prev;
  }
  template <class T>
  static ELMAN_HD T slope(T prev) {
    return inverse ? T(prev < T(0)) - T(prev > T(0)) : T(1);
  }

  template <class Math, class T>
  static ELMAN_HD ElementwiseOut<Cell, T> forward(const T* prev, const T* x, const T* p) {
    const auto f = Math::gate(x[0]), q = Math::gate(p[0] * seen(prev[0]) + p[1]);
    const T h = f.open * prev[0] + f.shut * Math::tanh(x[1]) * q.open;
    return {{h}, self_gated<Math>(h)};
  }

  template <class Math, class T>
  static ELMAN_HD ElementwiseGrad<Cell, T> backward(T gy, const T* gh, const T* h, const T* prev, const T* x, const T* p) {
    const auto f = Math::gate(x[0]), q = Math::gate(p[0] * seen(prev[0]) + p[1]);
    const T c = Math::tanh(x[1]), total = through_self_gate<Math>(gy, gh[0], h[0]);
    const T dv = total * f.shut, dq = dv * c * q.open * q.shut;
    return {{total * f.open + dq * p[0] * slope(prev[0])},
            {total * (prev[0] - c * q.open) * f.open * f.shut, dv * q.open * (T(1) - c * c)},
            {dq * seen(prev[0]), dq}};
  }
};

}  // namespace elman::e68
