// E71: S = a S' + k ((1 - a) v)^T, a = sigmoid(alpha + d S'^T k + b) of each line.
#pragma once

#include <elman/matrix_state_cell.h>

namespace elman::e71 {

struct Cell : MatrixCell {
  static constexpr int lines = 2, params = 2;  // v, alpha; d, b
  static constexpr bool squashes = false;

  template <class Math, class T>
  static ELMAN_HD auto alpha(MatrixIn<T> x) {
    return Math::gate(x.in[1] + x.par[0] * x.r + x.par[1]);
  }

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    const auto a = alpha<Math>(x);
    return {a.open, a.shut * x.in[0]};
  }

  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Cell, T> line_backward(MatrixLine<T> d, MatrixIn<T> x) {
    const auto a = alpha<Math>(x);
    const T da = (d.keep - d.write * x.in[0]) * a.open * a.shut;
    return {da * x.par[0], {a.shut * d.write, da}, {}, {da * x.r, da}};
  }
};

}  // namespace elman::e71
