// E72: S = a S' + k ((1 - a) g v)^T, a = sigmoid(alpha + b_a), g = sigmoid(d m + b_g), m = r = S'^T k, or -|r| where `inverse`.
#pragma once

#include <elman/matrix_state_cell.h>

namespace elman::e72 {

template <bool inverse>
struct Cell : MatrixCell {
  static constexpr int lines = 2, params = 3;  // v, alpha; d, b_g, b_a
  static constexpr bool squashes = false;

  template <class T>
  static ELMAN_HD T sign(MatrixIn<T> x) {  // of m and r
    return inverse && x.r > T(0) ? T(-1) : T(1);
  }

  template <class Math, class T>
  static ELMAN_HD T value_gate(MatrixIn<T> x) {
    return Math::sigmoid(x.par[0] * sign(x) * x.r + x.par[1]);
  }

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    const auto a = Math::gate(x.in[1] + x.par[2]);
    return {a.open, a.shut * value_gate<Math>(x) * x.in[0]};
  }

  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Cell, T> line_backward(MatrixLine<T> d, MatrixIn<T> x) {
    const auto a = Math::gate(x.in[1] + x.par[2]);
    const T g = value_gate<Math>(x), dw = a.shut * d.write, dm = dw * x.in[0] * g * (T(1) - g);
    const T da = (d.keep - d.write * g * x.in[0]) * a.open * a.shut;
    return {dm * x.par[0] * sign(x), {dw * g, da}, {}, {dm * sign(x) * x.r, dm, da}};
  }
};

}  // namespace elman::e72
