// E97: S = tanh(decay S' + write k (sigmoid(w) v - S'^T (erase k))^T), without the second product where `Raw`.
#pragma once

#include <elman/matrix_state_cell.h>

namespace elman::e97 {

template <bool Linear, bool WriteGate, bool Raw>
struct Edit : MatrixCell {
  static constexpr int lines = 2, folded = 1, scalars = WriteGate ? 2 : 1;  // v, w; sigmoid(w) v; decay, write
  static constexpr int vectors = Raw ? 0 : 1, read_vector = Raw ? -1 : 0;
  static constexpr bool retrieves = !Raw, squashes = !Linear, scalar_keep = true, backward_uses_r = WriteGate && !Raw;

  template <class Math, class T>
  static ELMAN_HD void fold(T (&x)[folded], const T* in, const T*) {
    x[0] = Math::sigmoid(in[1]) * in[0];
  }

  template <class Math, class T>
  static ELMAN_HD void fold_backward(T (&din)[lines], T*, const T* dx, const T* in, const T*) {
    const T w = Math::sigmoid(in[1]);
    din[0] = w * dx[0], din[1] = in[0] * din[0] * (T(1) - w);
  }

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    const T delta = Raw ? x.in[0] : x.in[0] - x.r;
    return {x.c[0], WriteGate ? x.c[scalars - 1] * delta : delta};
  }

  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Edit, T> line_backward(MatrixLine<T> d, MatrixIn<T> x) {
    MatrixGrad<Edit, T> g;
    g.in[0] = WriteGate ? x.c[scalars - 1] * d.write : d.write;
    g.r = Raw ? T(0) : -g.in[0];
    g.c[0] = d.keep;
    if (WriteGate) g.c[scalars - 1] = d.write * (Raw ? x.in[0] : x.in[0] - x.r);
    return g;
  }
};

template <bool Linear, bool WriteGate>
using Cell = Edit<Linear, WriteGate, false>;
template <bool Linear, bool WriteGate>
using RawCell = Edit<Linear, WriteGate, true>;

}  // namespace elman::e97
