// {{Name}}: h = tanh(W h' + u), y = h.
#pragma once
#include <elman/dense_cell.h>

namespace elman::{{name}} {
struct Cell {
  static constexpr int extras = 0;
  static constexpr bool uses_prev = false;

  template <class Math, class T>
  static ELMAN_HD DenseOut<T> forward(T a, T, const T*) {
    const T h = Math::tanh(a);
    return {h, h};
  }

  template <class Math, class T>
  static ELMAN_HD DenseGrad<T, extras> backward(T gy, T gh, T h, T, const T*) {
    return {(gy + gh) * (T(1) - h * h), T(0), {T(0)}};
  }
};
}  // namespace elman::{{name}}
