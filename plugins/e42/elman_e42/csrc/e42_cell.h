// E42: h = W h' + u, y = h silu(h). Linear in the state; the self-gate is the only nonlinearity.
#pragma once

#include <elman/dense_cell.h>

namespace elman::e42 {

struct Cell {
  static constexpr int extras = 0;
  static constexpr bool uses_prev = false;

  template <class Math, class T>
  static ELMAN_HD DenseOut<T> forward(T a, T, const T*) {
    return {a, self_gate(a, Math::sigmoid(a))};
  }

  template <class Math, class T>
  static ELMAN_HD DenseGrad<T, extras> backward(T gy, T gh, T h, T, const T*) {
    return {gy * self_gate_derivative(h, Math::sigmoid(h)) + gh, T(0), {T(0)}};
  }
};

}  // namespace elman::e42
