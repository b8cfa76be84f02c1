// mLSTM: S = decay S' + gain k v^T, a delta rule without its correction, and the stabiliser from which decay and gain follow:
// m = max(log f + m', i~), y = m'.
#pragma once

#include <elman/elementwise_cell.h>
#include <elman/matrix_state_cell.h>

namespace elman::mlstm {

struct Cell : MatrixCell {
  static constexpr int scalars = 2;  // decay, gain
  static constexpr bool squashes = false, delta = true, scalar_keep = true, backward_uses_r = false;

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    return {x.c[0], x.c[1] * x.in[0]};
  }
  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Cell, T> line_backward(MatrixLine<T> d, MatrixIn<T> x) {
    return {T(0), {x.c[1] * d.write}, {d.keep, x.in[0] * d.write}};
  }
};

struct Stabiliser {
  static constexpr int streams = 2, vectors = 0, states = 1;  // i~, log f

  template <class Math, class T>
  static ELMAN_HD ElementwiseOut<Stabiliser, T> forward(const T* prev, const T* x, const T*) {
    const T past = x[1] + prev[0];
    return {{past > x[0] ? past : x[0]}, prev[0]};
  }
  template <class Math, class T>
  static ELMAN_HD ElementwiseGrad<Stabiliser, T> backward(T gy, const T* gh, const T*, const T* prev, const T* x, const T*) {
    const bool ahead = x[1] + prev[0] > x[0];
    return {{gy + (ahead ? gh[0] : T(0))}, {ahead ? T(0) : gh[0], ahead ? gh[0] : T(0)}, {}};
  }
};

}  // namespace elman::mlstm
