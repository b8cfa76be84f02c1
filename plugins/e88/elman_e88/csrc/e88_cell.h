// E88: S = tanh(decay S' + write k (v - S'^T k)^T), line by line: a line is a column of S.
#pragma once

#include <elman/matrix_state_cell.h>

namespace elman::e88 {

template <bool Linear, bool WriteGate>
struct Cell : MatrixCell {
  static constexpr int scalars = WriteGate ? 2 : 1;  // decay, write
  static constexpr bool squashes = !Linear, delta = Linear, scalar_keep = true, backward_uses_r = WriteGate;

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    const T delta = x.in[0] - x.r;
    return {x.c[0], WriteGate ? x.c[scalars - 1] * delta : delta};
  }

  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Cell, T> line_backward(MatrixLine<T> d, MatrixIn<T> x) {
    MatrixGrad<Cell, T> g;
    g.in[0] = WriteGate ? x.c[scalars - 1] * d.write : d.write;
    g.r = -g.in[0];
    g.c[0] = d.keep;
    if (WriteGate) g.c[scalars - 1] = d.write * (x.in[0] - x.r);
    return g;
  }
};

}  // namespace elman::e88
