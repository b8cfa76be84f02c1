// Mamba-3: a trapezoidal rule writes the key and value of this step and the last one; keys are rotated by accumulated angles.
//   S = decay S' + gain k v^T + gain_past k_past v_past^T        angle = angle' + turn
#pragma once

#include <elman/elementwise_cell.h>
#include <elman/matrix_state_cell.h>

namespace elman::mamba3 {

struct Cell : MatrixCell {
  static constexpr int lines = 2, scalars = 3, vectors = 1, second_vector = 0;  // v, v_past; decay, gain, gain_past; k_past
  static constexpr bool retrieves = false, squashes = false, scalar_keep = true, backward_uses_r = false;
  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    return {x.c[0], x.c[1] * x.in[0], x.c[2] * x.in[1]};
  }
  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Cell, T> line_backward(MatrixLine<T> d, MatrixIn<T> x) {
    return {T(0), {x.c[1] * d.write, x.c[2] * d.second}, {d.keep, x.in[0] * d.write, x.in[1] * d.second}};
  }
};

struct Angle {
  static constexpr int streams = 1, vectors = 0, states = 1;

  template <class Math, class T>
  static ELMAN_HD ElementwiseOut<Angle, T> forward(const T* prev, const T* x, const T*) {
    const T angle = prev[0] + x[0];
    return {{angle}, angle};
  }
  template <class Math, class T>
  static ELMAN_HD ElementwiseGrad<Angle, T> backward(T gy, const T* gh, const T*, const T*, const T*, const T*) {
    const T g = gy + gh[0];
    return {{g}, {g}, {}};
  }
};

}  // namespace elman::mamba3
