// E62: h = f h' + k v, y = h silu(h), k = sigmoid(x0).
#pragma once

#include <elman/elementwise_cell.h>

namespace elman::e62 {

// f = 1 - k, v = tanh(x1).
struct A {
  static constexpr int streams = 2, vectors = 0, states = 1;

  template <class Math, class T>
  static ELMAN_HD ElementwiseOut<A, T> forward(const T* prev, const T* x, const T*) {
    const auto k = Math::gate(x[0]);
    const T h = k.shut * prev[0] + k.open * Math::tanh(x[1]);
    return {{h}, self_gated<Math>(h)};
  }

  template <class Math, class T>
  static ELMAN_HD ElementwiseGrad<A, T> backward(T gy, const T* gh, const T* h, const T* prev, const T* x, const T*) {
    const auto k = Math::gate(x[0]);
    const T v = Math::tanh(x[1]), total = through_self_gate<Math>(gy, gh[0], h[0]), dv = total * k.open;
    return {{total * k.shut}, {dv * (v - prev[0]) * k.shut, dv * (T(1) - v * v)}, {}};
  }
};

// f = sigmoid(x1) (1 - k), v = tanh(x2).
struct B {
  static constexpr int streams = 3, vectors = 0, states = 1;

  template <class Math, class T>
  static ELMAN_HD ElementwiseOut<B, T> forward(const T* prev, const T* x, const T*) {
    const auto k = Math::gate(x[0]);
    const T h = Math::gate(x[1]).open * k.shut * prev[0] + k.open * Math::tanh(x[2]);
    return {{h}, self_gated<Math>(h)};
  }

  template <class Math, class T>
  static ELMAN_HD ElementwiseGrad<B, T> backward(T gy, const T* gh, const T* h, const T* prev, const T* x, const T*) {
    const auto k = Math::gate(x[0]), a = Math::gate(x[1]);
    const T v = Math::tanh(x[2]), total = through_self_gate<Math>(gy, gh[0], h[0]);
    const T dprev = total * a.open * k.shut, dv = total * k.open;
    return {{dprev}, {dv * (v - a.open * prev[0]) * k.shut, dprev * prev[0] * a.shut, dv * (T(1) - v * v)}, {}};
  }
};

}  // namespace elman::e62
