// E97: S = tanh(decay S' + write k (sigmoid(w) v - S'^T (erase k))^T), without the second product where `Raw`.
#pragma once

#include <elman/matrix_state_cell.h>

namespace elman::e97 {

template <bool Linear, bool WriteGate, bool Raw>
struct Edit : MatrixCell {
  static constexpr int lines = 2, scalars = WriteGate ? 2 : 1;  // v, w; decay, write
  static constexpr int vectors = Raw ? 0 : 1, read_vector = Raw ? -1 : 0;
  static constexpr bool retrieves = !Raw, squashes = !Linear, scalar_keep = true, backward_uses_r = WriteGate && !Raw;

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    const T delta = Math::sigmoid(x.in[1]) * x.in[0] - (Raw ? T(0) : x.r);
    return {x.c[0], WriteGate ? x.c[scalars - 1] * delta : delta};
  }

  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Edit, T> line_backward(MatrixLine<T> d, MatrixIn<T> x) {
    const T w = Math::sigmoid(x.in[1]), d_delta = WriteGate ? x.c[scalars - 1] * d.write : d.write;
    MatrixGrad<Edit, T> g;
    g.r = Raw ? T(0) : -d_delta;
    g.in[0] = w * d_delta;
    g.in[1] = x.in[0] * d_delta * w * (T(1) - w);
    g.c[0] = d.keep;
    if (WriteGate) g.c[scalars - 1] = d.write * (w * x.in[0] - (Raw ? T(0) : x.r));
    return g;
  }
};

template <bool Linear, bool WriteGate>
using Cell = Edit<Linear, WriteGate, false>;
template <bool Linear, bool WriteGate>
using RawCell = Edit<Linear, WriteGate, true>;

}  // namespace elman::e97
