// diagonal: h = p0 h' + x0, under tanh where `bounded`; y = h silu(x1 + p1).
#pragma once

#include <elman/elementwise_cell.h>

namespace elman::diagonal {

template <bool bounded>
struct Cell {
  static constexpr int streams = 2, vectors = 2, states = 1;

  template <class Math, class T>
  static ELMAN_HD ElementwiseOut<Cell, T> forward(const T* prev, const T* x, const T* p) {
    const T a = p[0] * prev[0] + x[0], h = bounded ? Math::tanh(a) : a, m = x[1] + p[1];
    return {{h}, h * silu(m, Math::gate(m).open)};
  }

  template <class Math, class T>
  static ELMAN_HD ElementwiseGrad<Cell, T> backward(T gy, const T* gh, const T* h, const T* prev, const T* x, const T* p) {
    const T m = x[1] + p[1], s = Math::gate(m).open;
    const T total = gy * silu(m, s) + gh[0], da = bounded ? total * (T(1) - h[0] * h[0]) : total;
    const T dm = gy * h[0] * silu_derivative(m, s);
    return {{da * p[0]}, {da, dm}, {da * prev[0], dm}};
  }
};

}  // namespace elman::diagonal
