// Cells of test_kernels_elementwise.py.
#pragma once

#include <elman/elementwise_cell.h>

namespace elman::made_up {

// h = f h' + (1 - f) tanh(v) sigmoid(p0 h' + p1), y = h silu(h), f = sigmoid(x0), v = x1
struct GatedValue {
  static constexpr int streams = 2, vectors = 2, states = 1;
  template <class Math, class T>
  static ELMAN_HD ElementwiseOut<GatedValue, T> forward(const T* prev, const T* x, const T* p) {
    const auto f = Math::gate(x[0]);
    const T h = f.open * prev[0] + f.shut * Math::tanh(x[1]) * Math::gate(p[0] * prev[0] + p[1]).open;
    return {{h}, self_gate(h, Math::gate(h).open)};
  }
  template <class Math, class T>
  static ELMAN_HD ElementwiseGrad<GatedValue, T> backward(T gy, const T* gh, const T* h, const T* prev, const T* x, const T* p) {
    const auto f = Math::gate(x[0]), q = Math::gate(p[0] * prev[0] + p[1]);
    const T c = Math::tanh(x[1]), total = gy * self_gate_derivative(h[0], Math::gate(h[0]).open) + gh[0];
    const T dv = total * f.shut, dq = dv * c * q.open * q.shut;
    return {{total * f.open + dq * p[0]},
            {total * (prev[0] - c * q.open) * f.open * f.shut, dv * q.open * (T(1) - c * c)},
            {dq * prev[0], dq}};
  }
};

// An LSTM whose recurrent weights are diagonal: i, f, o = sigmoid(x + p h'), z = tanh(x + p h'), c = f c' + i z, h = o tanh(c)
struct DiagonalLstm {
  static constexpr int streams = 4, vectors = 4, states = 2;
  template <class Math, class T>
  static ELMAN_HD ElementwiseOut<DiagonalLstm, T> forward(const T* prev, const T* x, const T* p) {
    const T i = Math::gate(x[0] + p[0] * prev[0]).open, f = Math::gate(x[1] + p[1] * prev[0]).open;
    const T o = Math::gate(x[2] + p[2] * prev[0]).open, z = Math::tanh(x[3] + p[3] * prev[0]);
    const T c = f * prev[1] + i * z, h = o * Math::tanh(c);
    return {{h, c}, h};
  }
  template <class Math, class T>
  static ELMAN_HD ElementwiseGrad<DiagonalLstm, T> backward(T gy, const T* gh, const T* h, const T* prev, const T* x, const T* p) {
    const auto i = Math::gate(x[0] + p[0] * prev[0]), f = Math::gate(x[1] + p[1] * prev[0]), o = Math::gate(x[2] + p[2] * prev[0]);
    const T z = Math::tanh(x[3] + p[3] * prev[0]), u = Math::tanh(h[1]), dh = gy + gh[0];
    const T dc = gh[1] + dh * o.open * (T(1) - u * u);
    const T d[4] = {dc * z * i.open * i.shut, dc * prev[1] * f.open * f.shut, dh * u * o.open * o.shut,
                    dc * i.open * (T(1) - z * z)};
    return {{d[0] * p[0] + d[1] * p[1] + d[2] * p[2] + d[3] * p[3], dc * f.open},
            {d[0], d[1], d[2], d[3]},
            {d[0] * prev[0], d[1] * prev[0], d[2] * prev[0], d[3] * prev[0]}};
  }
};

}  // namespace elman::made_up
