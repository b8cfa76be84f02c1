// E73: S = tanh(z S' z + k v^T): z multiplies the elements of a line (column), the line itself (row), or both.
// Delta: S = tanh(S' + k (v - S'^T (z k))^T).
#pragma once

#include <elman/matrix_state_cell.h>

namespace elman::e73 {

template <bool column, bool row>
struct Cell : MatrixCell {
  static constexpr int lines = row ? 2 : 1, vectors = column ? 1 : 0, keep_vector = column ? 0 : -1;  // v, logit of z; z
  static constexpr bool retrieves = false, backward_uses_r = false;

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    return {row ? Math::tanh(x.in[lines - 1]) : T(1), x.in[0]};
  }

  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Cell, T> line_backward(MatrixLine<T> d, MatrixIn<T> x) {
    MatrixGrad<Cell, T> g;
    g.r = T(0);
    if (row) {
      const T z = Math::tanh(x.in[lines - 1]);
      g.in[lines - 1] = d.keep * (T(1) - z * z);
    }
    g.in[0] = d.write;
    return g;
  }
};

struct Delta : MatrixCell {
  static constexpr int vectors = 1, read_vector = 0;  // z
  static constexpr bool backward_uses_r = false;

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    return {T(1), x.in[0] - x.r};
  }

  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Delta, T> line_backward(MatrixLine<T> d, MatrixIn<T>) {
    return {-d.write, {d.write}};
  }
};

}  // namespace elman::e73
