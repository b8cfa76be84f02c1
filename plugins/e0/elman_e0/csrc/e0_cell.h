// E0: h = tanh(W h' + u), y = h silu(h + m), m = x + b_g. With a gate of its own (wgate): y = h silu(m), m = W_g x + b_g.
#pragma once

#include <elman/dense_cells.h>

namespace elman::e0 {

struct SumGate {
  static constexpr int extras = 1;
  template <class Math, class T>
  static ELMAN_HD T of(T h, const T* e) {
    return h * silu(h + e[0], Math::sigmoid(h + e[0]));
  }
  template <class Math, class T>
  static ELMAN_HD ReadoutSlopes<T, extras> slopes(T h, const T* e) {
    const T m = h + e[0], s = Math::sigmoid(m), through = h * silu_derivative(m, s);
    return {silu(m, s) + through, {through}};
  }
};

using Cell = DenseCell<Tanh, SumGate>;
using Projected = DenseCell<Tanh, SiluGate>;

}  // namespace elman::e0
