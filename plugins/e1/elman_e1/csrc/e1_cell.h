// E1: h = tanh(W h' + u), y = h silu(z).
#pragma once

#include <elman/dense_cell.h>

namespace elman::e1 {

struct Cell {
  static constexpr int extras = 1;  // z, the gate input
  static constexpr bool uses_prev = false;

  template <class Math, class T>
  static ELMAN_HD DenseOut<T> forward(T a, T, const T* e) {
    const T h = Math::tanh(a), z = e[0];
    return {h, h * silu(z, Math::sigmoid(z))};
  }

  template <class Math, class T>
  static ELMAN_HD DenseGrad<T, extras> backward(T gy, T gh, T h, T, const T* e) {
    const T z = e[0], s = Math::sigmoid(z);
    const T total = gy * silu(z, s) + gh;
    return {total * (T(1) - h * h), T(0), {gy * h * silu_derivative(z, s)}};
  }
};

}  // namespace elman::e1
