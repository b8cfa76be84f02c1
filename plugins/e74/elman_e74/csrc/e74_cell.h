// E74: S = phi(S' + k delta^T), delta = v - S'^T k, and its relatives; phi is tanh, or the identity where Linear.
#pragma once

#include <elman/matrix_state_cell.h>

namespace elman::e74 {

// S = phi(S' + k (v - S'^T p)^T), where p is k or, with `Z`, z k.
template <bool Linear, bool Z>
struct Edit : MatrixCell {
  static constexpr int vectors = Z ? 1 : 0, read_vector = Z ? 0 : -1;  // z
  static constexpr bool squashes = !Linear, backward_uses_r = false;

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    return {T(1), x.in[0] - x.r};
  }

  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Edit, T> line_backward(MatrixLine<T> d, MatrixIn<T>) {
    return {-d.write, {d.write}};
  }
};

template <bool Linear>
using Delta = Edit<Linear, false>;
template <bool Linear>
using Read = Edit<Linear, true>;

// S = phi(alpha S' + k v^T).
template <bool Linear>
struct Simple : MatrixCell {
  static constexpr int scalars = 1;  // alpha
  static constexpr bool retrieves = false, squashes = !Linear, scalar_keep = true, backward_uses_r = false;

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    return {x.c[0], x.in[0]};
  }

  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Simple, T> line_backward(MatrixLine<T> d, MatrixIn<T>) {
    return {T(0), {d.write}, {d.keep}};
  }
};

// S = phi(a S' + k ((1 - a) v)^T), a = sigmoid(alpha + b).
template <bool Linear>
struct Ema : MatrixCell {
  static constexpr int lines = 2, params = 1;  // v, alpha; b
  static constexpr bool retrieves = false, squashes = !Linear, backward_uses_r = false;

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    const auto a = Math::gate(x.in[1] + x.par[0]);
    return {a.open, a.shut * x.in[0]};
  }

  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Ema, T> line_backward(MatrixLine<T> d, MatrixIn<T> x) {
    const auto a = Math::gate(x.in[1] + x.par[0]);
    const T da = (d.keep - d.write * x.in[0]) * a.open * a.shut;
    return {T(0), {a.shut * d.write, da}, {}, {da}};
  }
};

// S = phi(S' + k (g delta)^T), g = sigmoid(gate + b).
template <bool Linear>
struct RetrievedGate : MatrixCell {
  static constexpr int lines = 2, params = 1;  // v, gate; b
  static constexpr bool squashes = !Linear;

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    return {T(1), Math::sigmoid(x.in[1] + x.par[0]) * (x.in[0] - x.r)};
  }

  template <class Math, class T>
  static ELMAN_HD MatrixGrad<RetrievedGate, T> line_backward(MatrixLine<T> d, MatrixIn<T> x) {
    const T g = Math::sigmoid(x.in[1] + x.par[0]), dg = d.write * (x.in[0] - x.r) * g * (T(1) - g);
    return {-g * d.write, {g * d.write, dg}, {}, {dg}};
  }
};

// S = phi(S' + k (g delta)^T), g = sigmoid(d energy + b).
template <bool Linear>
struct Sized : MatrixCell {
  static constexpr int params = 2;  // d, b
  static constexpr bool squashes = !Linear, energy = true;

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    return {T(1), Math::sigmoid(x.par[0] * x.energy + x.par[1]) * (x.in[0] - x.r)};
  }

  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Sized, T> line_backward(MatrixLine<T> d, MatrixIn<T> x) {
    const T g = Math::sigmoid(x.par[0] * x.energy + x.par[1]), dg = d.write * (x.in[0] - x.r) * g * (T(1) - g);
    return {-g * d.write, {g * d.write}, {}, {dg * x.energy, dg}, dg * x.par[0]};
  }
};

// S = phi(S' + rho tanh(k delta^T)).
template <bool Linear>
struct Residual : MatrixCell {
  static constexpr int params = 1;  // rho
  static constexpr bool squashes = !Linear, elementwise = true;

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    return {x.par[0], x.in[0] - x.r};
  }

  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Residual, T> line_backward(MatrixLine<T> d, MatrixIn<T>) {
    return {-d.write, {d.write}, {}, {d.keep}};
  }

  template <class Math, class T>
  static ELMAN_HD T element(T s, T k, MatrixLine<T> w) {
    return s + w.keep * Math::tanh(w.write * k);
  }

  template <class Math, class T>
  static ELMAN_HD MatrixElement<T> element_backward(T P, T, T k, MatrixLine<T> w) {
    const T t = Math::tanh(w.write * k), o = P * w.keep * (T(1) - t * t);
    return {P, o * w.write, {P * t, o * k}};
  }
};

// S = phi(S' (1 - k e^T) + k (w v)^T), e = sigmoid(erase + b_e), w = sigmoid(write + b_w).
template <bool Linear>
struct Ntm : MatrixCell {
  static constexpr int lines = 3, params = 2;  // v, erase, write; b_e, b_w
  static constexpr bool squashes = !Linear, elementwise = true, retrieves = false, backward_uses_r = false;

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    return {Math::sigmoid(x.in[1] + x.par[0]), Math::sigmoid(x.in[2] + x.par[1]) * x.in[0]};
  }

  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Ntm, T> line_backward(MatrixLine<T> d, MatrixIn<T> x) {
    const T e = Math::sigmoid(x.in[1] + x.par[0]), w = Math::sigmoid(x.in[2] + x.par[1]);
    const T de = d.keep * e * (T(1) - e), dw = d.write * x.in[0] * w * (T(1) - w);
    return {T(0), {w * d.write, de, dw}, {}, {de, dw}};
  }

  template <class Math, class T>
  static ELMAN_HD T element(T s, T k, MatrixLine<T> w) {
    return s * (T(1) - w.keep * k) + w.write * k;
  }

  template <class Math, class T>
  static ELMAN_HD MatrixElement<T> element_backward(T P, T s, T k, MatrixLine<T> w) {
    return {P * (T(1) - w.keep * k), P * (w.write - w.keep * s), {-P * s * k, P * k}};
  }
};

}  // namespace elman::e74
