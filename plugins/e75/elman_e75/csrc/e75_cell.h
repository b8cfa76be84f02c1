// E75: S = tanh(g S' + k (v - S'^T k)^T), g = sigmoid(beta + b) of each line.
#pragma once

#include <elman/matrix_state_cell.h>

namespace elman::e75 {

template <bool Linear>
struct Cell : MatrixCell {
  static constexpr int lines = 2, params = 1;  // v, beta; b
  static constexpr bool squashes = !Linear, backward_uses_r = false;

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    return {Math::gate(x.in[1] + x.par[0]).open, x.in[0] - x.r};
  }

  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Cell, T> line_backward(MatrixLine<T> d, MatrixIn<T> x) {
    const auto g = Math::gate(x.in[1] + x.par[0]);
    const T db = d.keep * g.open * g.shut;
    return {-d.write, {d.write, db}, {}, {db}};
  }
};

}  // namespace elman::e75
