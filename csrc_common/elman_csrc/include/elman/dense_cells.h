// Dense cells made of two parts that several variants share: an update of h and a readout.
//
//   using Cell = DenseCell<Tanh, SelfGate>;        h = tanh(a), y = h silu(h)
//
// An update has of(a) = h and slope(h) = dh/da. A readout has `extras` and, from h and the extras e, of = y and slopes = {dy/dh,
// {dy/de}}. A variant with another update or readout writes it in its own header.
//
//   using Cell = LeakyCell<Interpolate>;           h = s(e) h' + (1 - s(e)) tanh(a), y = h silu(h)
//
// The gates of a leaky update map the extras e to the factors of the old state and of the candidate.
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
struct DenseCell : DenseSteps<DenseCell<Update, Readout>> {
  static constexpr int extras = Readout::extras;
  static constexpr bool uses_prev = false;

  template <class Math, class T>
  static ELMAN_HD DenseReady<T> ready(T, const T*) {
    return {};
  }
  template <class Math, class T>
  static ELMAN_HD T state(T a, DenseReady<T>) {
    return Update::template of<Math>(a);
  }
  template <class Math, class T>
  static ELMAN_HD T readout(T h, const T* e) {
    return Readout::template of<Math>(h, e);
  }

  template <class Math, class T>
  static ELMAN_HD DenseGrad<T, extras> backward(T gy, T gh, T h, T, const T* e) {
    const auto slope = Readout::template slopes<Math>(h, e);
    DenseGrad<T, extras> grad{(gy * slope.h + gh) * Update::slope(h), T(0), {T(0)}};
    for (int k = 0; k < extras; ++k) grad.dextra[k] = gy * slope.e[k];
    return grad;
  }
};

// h = keep h' + write tanh(a), y = h silu(h). Gates have `extras` and of = {keep, write}; slopes are the derivatives of h with
// respect to the extras, for the candidate c = tanh(a).
template <class T>
struct LeakyGates {
  T keep, write;
};
// keep = sigmoid(e), write = 1 - keep.
struct Interpolate {
  static constexpr int extras = 1;
  template <class Math, class T>
  static ELMAN_HD LeakyGates<T> of(const T* e) {
    const Gate<T> g = Math::gate(e[0]);
    return {g.open, g.shut};
  }
  template <class Math, class T>
  static ELMAN_HD void slopes(T (&slope)[1], T h_prev, T c, const T* e) {
    const Gate<T> g = Math::gate(e[0]);
    slope[0] = (h_prev - c) * g.open * g.shut;
  }
};

template <class Gates>
struct LeakyCell : DenseSteps<LeakyCell<Gates>> {
  static constexpr int extras = Gates::extras;
  static constexpr bool uses_prev = true, uses_a = true;

  template <class Math, class T>
  static ELMAN_HD DenseReady<T> ready(T h_prev, const T* e) {
    const LeakyGates<T> g = Gates::template of<Math>(e);
    return {g.keep * h_prev, g.write};
  }
  template <class Math, class T>
  static ELMAN_HD T state(T a, DenseReady<T> ready) {
    return ready.kept + ready.write * Math::tanh(a);
  }
  template <class Math, class T>
  static ELMAN_HD T readout(T h, const T*) {
    return self_gate(h, Math::sigmoid(h));
  }

  template <class Math, class T>
  static ELMAN_HD DenseGrad<T, extras> backward(T gy, T gh, T h, T h_prev, T a, const T* e) {
    const LeakyGates<T> g = Gates::template of<Math>(e);
    const T c = Math::tanh(a), total = gy * self_gate_derivative(h, Math::sigmoid(h)) + gh;
    DenseGrad<T, extras> grad{total * g.write * (T(1) - c * c), total * g.keep, {}};
    Gates::template slopes<Math>(grad.dextra, h_prev, c, e);
    for (T& slope : grad.dextra) slope *= total;
    return grad;
  }
};

}  // namespace elman
