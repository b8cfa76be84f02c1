// E65: h = f h' + (1 - f) tanh(x1 + p0 h'), y = h silu(h), f = sigmoid(x0).
#pragma once

#include <elman/elementwise_cell.h>

namespace elman::e65 {

struct Cell {
  static constexpr int streams = 2, vectors = 1, states = 1;

  template <class Math, class T>
  static ELMAN_HD ElementwiseOut<Cell, T> forward(const T* prev, const T* x, const T* p) {
    const auto f = Math::gate(x[0]);
    const T h = f.open * prev[0] + f.shut * Math::tanh(x[1] + p[0] * prev[0]);
    return {{h}, self_gated<Math>(h)};
  }

  template <class Math, class T>
  static ELMAN_HD ElementwiseGrad<Cell, T> backward(T gy, const T* gh, const T* h, const T* prev, const T* x, const T* p) {
    const auto f = Math::gate(x[0]);
    const T v = Math::tanh(x[1] + p[0] * prev[0]);
    const T total = through_self_gate<Math>(gy, gh[0], h[0]);
    const T kappa = total * f.shut * (T(1) - v * v);
    return {{total * f.open + kappa * p[0]}, {total * (prev[0] - v) * f.open * f.shut, kappa}, {kappa * prev[0]}};
  }
};

}  // namespace elman::e65
