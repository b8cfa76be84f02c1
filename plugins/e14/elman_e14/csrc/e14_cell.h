// E14: S = sigmoid(decay) S' + k tanh(v)^T.
#pragma once

#include <elman/matrix_state_cell.h>

namespace elman::e14 {

struct Cell : MatrixCell {
  static constexpr int lines = 2;  // v, decay
  static constexpr bool retrieves = false, squashes = false, backward_uses_r = false;

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    return {Math::gate(x.in[1]).open, Math::tanh(x.in[0])};
  }

  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Cell, T> line_backward(MatrixLine<T> d, MatrixIn<T> x) {
    const auto a = Math::gate(x.in[1]);
    const T v = Math::tanh(x.in[0]);
    return {T(0), {d.write * (T(1) - v * v), d.keep * a.open * a.shut}};
  }
};

}  // namespace elman::e14
