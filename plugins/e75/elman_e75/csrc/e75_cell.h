// E75: S = tanh(g S' + k (v - S'^T k)^T), g = sigmoid(beta + b) of each line.
#pragma once

#include <elman/matrix_state_cell.h>

namespace elman::e75 {

template <bool Linear>
struct Cell : MatrixCell {
  static constexpr int lines = 2, params = 1, folded = 2;  // v, beta; b; v, g
  static constexpr bool squashes = !Linear, backward_uses_r = false;

  template <class Math, class T>
  static ELMAN_HD void fold(T (&x)[folded], const T* in, const T* par) {
    x[0] = in[0], x[1] = Math::gate(in[1] + par[0]).open;
  }

  template <class Math, class T>
  static ELMAN_HD void fold_backward(T (&din)[lines], T* dpar, const T* dx, const T* in, const T* par) {
    const auto g = Math::gate(in[1] + par[0]);
    din[0] = dx[0], din[1] = dpar[0] = dx[1] * g.open * g.shut;
  }

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    return {x.in[1], x.in[0] - x.r};
  }

  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Cell, T> line_backward(MatrixLine<T> d, MatrixIn<T>) {
    return {-d.write, {d.write, d.keep}};
  }
};

}  // namespace elman::e75
