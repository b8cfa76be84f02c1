// E67lr: h = f h' + (1 - f) tanh(e0), y = h silu(h), f = sigmoid(a), a = W h' + u with W = U V.
#pragma once

#include <elman/dense_cell.h>

namespace elman::e67lr {

struct Cell {
  static constexpr int extras = 1;
  static constexpr bool uses_prev = true, uses_a = true;

  template <class Math, class T>
  static ELMAN_HD DenseOut<T> forward(T a, T prev, const T* e) {
    const Gate<T> f = Math::gate(a);
    const T h = f.open * prev + f.shut * Math::tanh(e[0]);
    return {h, self_gate(h, Math::gate(h).open)};
  }

  template <class Math, class T>
  static ELMAN_HD DenseGrad<T, extras> backward(T gy, T gh, T h, T prev, T a, const T* e) {
    const Gate<T> f = Math::gate(a);
    const T v = Math::tanh(e[0]), total = gy * self_gate_derivative(h, Math::gate(h).open) + gh;
    return {total * (prev - v) * f.open * f.shut, total * f.open, {total * f.shut * (T(1) - v * v)}};
  }
};

}  // namespace elman::e67lr
