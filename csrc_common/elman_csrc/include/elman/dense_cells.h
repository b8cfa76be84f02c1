// Dense cells made of two parts that several variants share: what h becomes, and what is read from it.
//
//   using Cell = DenseCell<Tanh, SelfGate>;        h = tanh(a), y = h silu(h)
//
// An update has of(a) = h and slope(h) = dh/da. A readout has `extras` and, from h and the extras e, of = y and slopes = {dy/dh,
// {dy/de}}; a variant whose own is neither of these writes it in its header. Cells that h' enters other than through W are written
// whole, as dense_cell.h says.
#pragma once

#include "dense_cell.h"

namespace elman {

struct Linear {
  template <class Math, class T>
  static ELMAN_HD T of(T a) {
    return a;
  }
  template <class T>
  static ELMAN_HD T slope(T) {
    return T(1);
  }
};
struct Tanh {
  template <class Math, class T>
  static ELMAN_HD T of(T a) {
    return Math::tanh(a);
  }
  template <class T>
  static ELMAN_HD T slope(T h) {
    return T(1) - h * h;
  }
};

template <class T, int extras>
struct ReadoutSlopes {
  T h, e[extras > 0 ? extras : 1];
};
// y = h.
struct Plain {
  static constexpr int extras = 0;
  template <class Math, class T>
  static ELMAN_HD T of(T h, const T*) {
    return h;
  }
  template <class Math, class T>
  static ELMAN_HD ReadoutSlopes<T, extras> slopes(T, const T*) {
    return {T(1), {T(0)}};
  }
};
// y = h silu(h).
struct SelfGate {
  static constexpr int extras = 0;
  template <class Math, class T>
  static ELMAN_HD T of(T h, const T*) {
    return self_gate(h, Math::sigmoid(h));
  }
  template <class Math, class T>
  static ELMAN_HD ReadoutSlopes<T, extras> slopes(T h, const T*) {
    return {self_gate_derivative(h, Math::sigmoid(h)), {T(0)}};
  }
};
// y = h silu(e).
struct SiluGate {
  static constexpr int extras = 1;
  template <class Math, class T>
  static ELMAN_HD T of(T h, const T* e) {
    return h * silu(e[0], Math::sigmoid(e[0]));
  }
  template <class Math, class T>
  static ELMAN_HD ReadoutSlopes<T, extras> slopes(T h, const T* e) {
    const T s = Math::sigmoid(e[0]);
    return {silu(e[0], s), {h * silu_derivative(e[0], s)}};
  }
};

template <class Update, class Readout>
struct DenseCell {
  static constexpr int extras = Readout::extras;
  static constexpr bool uses_prev = false;

  template <class Math, class T>
  static ELMAN_HD DenseOut<T> forward(T a, T, const T* e) {
    const T h = Update::template of<Math>(a);
    return {h, Readout::template of<Math>(h, e)};
  }

  template <class Math, class T>
  static ELMAN_HD DenseGrad<T, extras> backward(T gy, T gh, T h, T, const T* e) {
    const auto slope = Readout::template slopes<Math>(h, e);
    DenseGrad<T, extras> grad{(gy * slope.h + gh) * Update::slope(h), T(0), {T(0)}};
    for (int k = 0; k < extras; ++k) grad.dextra[k] = gy * slope.e[k];
    return grad;
  }
};

}  // namespace elman
