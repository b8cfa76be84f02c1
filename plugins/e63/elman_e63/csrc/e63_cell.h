// E63: h = keep h' + write tanh(W h' + u), y = h silu(h), with the gates of forms a, b and d.
#pragma once

#include <elman/dense_cells.h>

namespace elman::e63 {

// keep = sigmoid(e0), write = sigmoid(e1).
struct Independent {
  static constexpr int extras = 2;
  template <class Math, class T>
  static ELMAN_HD LeakyGates<T> of(const T* e) {
    return {Math::gate(e[0]).open, Math::gate(e[1]).open};
  }
  template <class Math, class T>
  static ELMAN_HD void slopes(T (&slope)[2], T h_prev, T c, const T* e) {
    const Gate<T> keep = Math::gate(e[0]), write = Math::gate(e[1]);
    slope[0] = h_prev * keep.open * keep.shut, slope[1] = c * write.open * write.shut;
  }
};
// keep = 1, write = sigmoid(e0).
struct Accumulate {
  static constexpr int extras = 1;
  template <class Math, class T>
  static ELMAN_HD LeakyGates<T> of(const T* e) {
    return {T(1), Math::gate(e[0]).open};
  }
  template <class Math, class T>
  static ELMAN_HD void slopes(T (&slope)[1], T, T c, const T* e) {
    const Gate<T> write = Math::gate(e[0]);
    slope[0] = c * write.open * write.shut;
  }
};

using Cell = LeakyCell<Interpolate>;
using CellB = LeakyCell<Independent>;
using CellD = LeakyCell<Accumulate>;

}  // namespace elman::e63
