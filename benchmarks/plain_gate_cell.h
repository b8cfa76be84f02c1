// h = f h' + (1 - f) x1, f = sigmoid(x0), y = h: what peers of the elementwise kernels compute.
#pragma once

#include <elman/elementwise_cell.h>

namespace elman::plain_gate {

struct Cell {
  static constexpr int streams = 2, vectors = 0, states = 1;

  template <class Math, class T>
  static ELMAN_HD ElementwiseOut<Cell, T> forward(const T* prev, const T* x, const T*) {
    const auto f = Math::gate(x[0]);
    const T h = f.open * prev[0] + f.shut * x[1];
    return {{h}, h};
  }

  template <class Math, class T>
  static ELMAN_HD ElementwiseGrad<Cell, T> backward(T gy, const T* gh, const T*, const T* prev, const T* x, const T*) {
    const auto f = Math::gate(x[0]);
    const T total = gy + gh[0];
    return {{total * f.open}, {total * (prev[0] - x[1]) * f.open * f.shut, total * f.shut}, {}};
  }
};

}  // namespace elman::plain_gate
