// The delta rule with a decay for each channel of the key, of Kimi delta attention and Gated DeltaNet 2:
//   S = diag(decay) S' + k (v - S'^T (erase * k))^T
// erase: the erase gate times the decay, since the retrieved state has decayed. v: times the write gate.
#pragma once

#include <elman/matrix_state_cell.h>

namespace elman {
namespace kda {

struct Cell : MatrixCell {
  static constexpr int vectors = 2, keep_vector = 0, read_vector = 1;
  static constexpr bool squashes = false, backward_uses_r = false;
  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    return {T(1), x.in[0] - x.r};
  }
  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Cell, T> line_backward(MatrixLine<T> d, MatrixIn<T>) {
    return {-d.write, {d.write}};
  }
};

}  // namespace kda
}  // namespace elman
