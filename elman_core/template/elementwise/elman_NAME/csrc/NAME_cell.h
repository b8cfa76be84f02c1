// {{Name}}: h = f h' + (1 - f) tanh(x1 + p0 h'), y = h, f = sigmoid(x0).
#pragma once
#include <elman/elementwise_cell.h>

namespace elman::{{name}} {
struct Cell {
  static constexpr int streams = 2, vectors = 1, states = 1;

  template <class Math, class T>
  static ELMAN_HD ElementwiseOut<Cell, T> forward(const T* prev, const T* x, const T* p) {
    const auto f = Math::gate(x[0]);
    const T h = f.open * prev[0] + f.shut * Math::tanh(x[1] + p[0] * prev[0]);
    return {{h}, h};
  }

  template <class Math, class T>
  static ELMAN_HD ElementwiseGrad<Cell, T> backward(T gy, const T* gh, const T*, const T* prev, const T* x, const T* p) {
    const auto f = Math::gate(x[0]);
    const T c = Math::tanh(x[1] + p[0] * prev[0]), total = gy + gh[0], dc = total * f.shut * (T(1) - c * c);
    return {{total * f.open + dc * p[0]}, {total * (prev[0] - c) * f.open * f.shut, dc}, {dc * prev[0]}};
  }
};
}  // namespace elman::{{name}}
