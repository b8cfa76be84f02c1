// The diagonal-plus-low-rank transition of RWKV-7:  S = diag(decay) S' + k v^T + again (S'^T read)^T
#pragma once

#include <elman/matrix_state_cell.h>

namespace elman {
namespace dplr {

struct Cell : MatrixCell {
  static constexpr int vectors = 3, keep_vector = 0, read_vector = 1, second_vector = 2;
  static constexpr bool squashes = false, reads_with_k = false, backward_uses_r = false;
  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    return {T(1), x.in[0], x.r};
  }
  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Cell, T> line_backward(MatrixLine<T> d, MatrixIn<T>) {
    return {d.second, {d.write}};
  }
};

}  // namespace dplr
}  // namespace elman
