// E34: h = tanh(x0 + p0 h'), y = h silu(h).
#pragma once

#include <elman/elementwise_cell.h>

namespace elman::e34 {

struct Cell {
  static constexpr int streams = 1, vectors = 1, states = 1;

  template <class Math, class T>
  static ELMAN_HD ElementwiseOut<Cell, T> forward(const T* prev, const T* x, const T* p) {
    const T h = Math::tanh(x[0] + p[0] * prev[0]);
    return {{h}, self_gated<Math>(h)};
  }

  template <class Math, class T>
  static ELMAN_HD ElementwiseGrad<Cell, T> backward(T gy, const T* gh, const T* h, const T* prev, const T*, const T* p) {
    const T total = through_self_gate<Math>(gy, gh[0], h[0]);
    const T da = total * (T(1) - h[0] * h[0]);
    return {{da * p[0]}, {da}, {da * prev[0]}};
  }
};

}  // namespace elman::e34
