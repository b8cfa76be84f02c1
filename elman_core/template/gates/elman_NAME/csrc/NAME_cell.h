// {{Name}}: h = f h' + (1 - f) c, f = sigmoid(a_0), c = tanh(a_1), a = p + u.
#pragma once
#include <elman/gates_cell.h>

namespace elman::{{name}} {
struct Cell {
  static constexpr int gates = 2, kept = 2;
  static constexpr bool memory = false, splits = false, staged = false;

  template <class Math, class T>
  static ELMAN_HD GatesState<T> forward(const T* p, const T* u, T h, T, T* kept) {
    for (int q = 0; q < gates; ++q) kept[q] = p[q] + u[q];
    const auto f = Math::gate(kept[0]);
    return {f.open * h + f.shut * Math::tanh(kept[1]), T(0)};
  }

  template <class Math, class T>
  static ELMAN_HD GatesGrad<T, gates> backward(T gh, T, const T* kept, T h, T, T) {
    const auto f = Math::gate(kept[0]);
    const T c = Math::tanh(kept[1]);
    return {{gh * (h - c) * f.open * f.shut, gh * f.shut * (T(1) - c * c)}, {}, gh * f.open, T(0)};
  }
};
}  // namespace elman::{{name}}
