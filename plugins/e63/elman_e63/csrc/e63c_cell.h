// E63, form c: h = s(p1 + u1) h' + s(p2 + u2) tanh(p0 + u0), p = [W_h; U_alpha; U_beta] h'. Kept: the three sums.
#pragma once

#include <elman/gates_cell.h>

namespace elman::e63 {

struct CellC {
  static constexpr int gates = 3, kept = 3;
  static constexpr bool memory = false, splits = false, staged = false;

  template <class Math, class T>
  static ELMAN_HD GatesState<T> forward(const T* p, const T* u, T h, T, T* kept) {
    for (int q = 0; q < 3; ++q) kept[q] = p[q] + u[q];
    return {Math::gate(kept[1]).open * h + Math::gate(kept[2]).open * Math::tanh(kept[0]), T(0)};
  }
  template <class Math, class T>
  static ELMAN_HD GatesGrad<T, 3> backward(T gh, T, const T* kept, T h, T, T) {
    const Gate<T> keep = Math::gate(kept[1]), write = Math::gate(kept[2]);
    const T c = Math::tanh(kept[0]);
    return {{gh * write.open * (T(1) - c * c), gh * h * keep.open * keep.shut, gh * c * write.open * write.shut},
            {},
            gh * keep.open,
            T(0)};
  }
};

}  // namespace elman::e63
