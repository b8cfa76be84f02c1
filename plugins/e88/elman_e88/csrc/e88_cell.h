// E88: S = tanh(decay S' + write k (v - S'^T k)^T), line by line: a line is a column of S.
#pragma once

#include <elman/matrix_state_cell.h>

namespace elman::e88 {

template <bool Linear, bool WriteGate>
struct Cell {
  static constexpr int lines = 1;                    // v
  static constexpr int scalars = WriteGate ? 2 : 1;  // decay, write
  static constexpr bool retrieves = true, squashes = !Linear, scalar_keep = true;
  static constexpr bool backward_uses_r = WriteGate;

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(T r, const T* in, const T* c) {
    const T delta = in[0] - r;
    return {c[0], WriteGate ? c[scalars - 1] * delta : delta};
  }

  template <class Math, class T>
  static ELMAN_HD MatrixLineGrad<T, lines, scalars> line_backward(T dkeep, T dwrite, T r, const T* in, const T* c) {
    MatrixLineGrad<T, lines, scalars> g;
    g.din[0] = WriteGate ? c[scalars - 1] * dwrite : dwrite;
    g.dr = -g.din[0];
    g.dc[0] = dkeep;
    if (WriteGate) g.dc[scalars - 1] = dwrite * (in[0] - r);
    return g;
  }
};

}  // namespace elman::e88
