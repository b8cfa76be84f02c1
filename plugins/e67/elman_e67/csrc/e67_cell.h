// E67: h = f h' + (1 - f) tanh(x1), y = h silu(h), f = sigmoid(x0 + p0 h').
#pragma once

#include <elman/elementwise_cell.h>

namespace elman::e67 {

struct Cell {
  static constexpr int streams = 2, vectors = 1, states = 1;

  template <class Math, class T>
  static ELMAN_HD ElementwiseOut<Cell, T> forward(const T* prev, const T* x, const T* p) {
    const auto f = Math::gate(x[0] + p[0] * prev[0]);
    const T h = f.open * prev[0] + f.shut * Math::tanh(x[1]);
    return {{h}, self_gated<Math>(h)};
  }

  template <class Math, class T>
  static ELMAN_HD ElementwiseGrad<Cell, T> backward(T gy, const T* gh, const T* h, const T* prev, const T* x, const T* p) {
    const auto f = Math::gate(x[0] + p[0] * prev[0]);
    const T v = Math::tanh(x[1]), total = through_self_gate<Math>(gy, gh[0], h[0]);
    const T da = total * (prev[0] - v) * f.open * f.shut;
    return {{total * f.open + da * p[0]}, {da, total * f.shut * (T(1) - v * v)}, {da * prev[0]}};
  }
};

}  // namespace elman::e67
