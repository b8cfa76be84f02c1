// E70: S = decay S' + k v^T.
#pragma once

#include <elman/matrix_state_cell.h>

namespace elman::e70 {

struct Cell : MatrixCell {
  static constexpr int scalars = 1;  // decay
  static constexpr bool retrieves = false, squashes = false, scalar_keep = true, backward_uses_r = false;

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    return {x.c[0], x.in[0]};
  }

  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Cell, T> line_backward(MatrixLine<T> d, MatrixIn<T>) {
    return {T(0), {d.write}, {d.keep}};
  }
};

}  // namespace elman::e70
