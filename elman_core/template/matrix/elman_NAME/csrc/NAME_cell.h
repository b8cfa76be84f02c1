// {{Name}}: S = tanh(f S' + k (v - S'^T k)^T), f = sigmoid(beta) of each line.
#pragma once
#include <elman/matrix_state_cell.h>

namespace elman::{{name}} {
struct Cell : MatrixCell {
  static constexpr int lines = 2;  // v, beta
  static constexpr bool backward_uses_r = false;

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    return {Math::gate(x.in[1]).open, x.in[0] - x.r};
  }

  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Cell, T> line_backward(MatrixLine<T> d, MatrixIn<T> x) {
    const auto f = Math::gate(x.in[1]);
    return {-d.write, {d.write, d.keep * f.open * f.shut}};
  }
};
}  // namespace elman::{{name}}
