// Definition of a dense cell. The dense skeleton computes, for every time step,
//
//   a_t = W h_{t-1} + u_t            the only product inside the loop; u_t holds everything that does not depend on h
//   (h_t, y_t) = Cell::forward(a_t, h_{t-1}, e_t)
//
// (where W projects the input too, u_t = W x_t + b, the skeleton can multiply h_{t-1} + x_t instead: Input in dense_word.cuh) and,
// walking back, with gy_t = dL/dy_t given and gh_t = dL/dh_t arriving from step t+1,
//
//   (da_t, dp_t, de_t) = Cell::backward(gy_t, gh_t, h_t, h_{t-1}, e_t)
//   gh_{t-1} = W^T da_t + dp_t
//
// A cell is pointwise: it sees one channel of one row. It is a struct with
//
//   static constexpr int  extras;      how many tensors [T,B,d] beside u it reads (gates computed before the loop): E1 has one, z
//   static constexpr bool uses_prev;   whether h_{t-1} enters other than through W (leaky and gated updates); if not, dp_t = 0
//   static constexpr bool uses_a;      optional: whether the backward gets a_t, too, which the forward then saves
//   template <class Math, class T> static DenseOut<T>          forward(T a, T h_prev, const T* e);
//   template <class Math, class T> static DenseGrad<T, extras> backward(T gy, T gh, T h, T h_prev, const T* e);
//                                                              backward(T gy, T gh, T h, T h_prev, T a, const T* e) where it uses a
//
// A cell may be split as in DenseSteps: terms without a are computed before the product is ready, and y after h is sent, so that h reaches the
// other blocks sooner.
//
// A gated update, h = f h' + (1 - f) c(a), needs a: from h and h', both rounded to the storage type, it would recover c as
// (h - f h') / (1 - f), which has few significant digits where 1 - f is small.
//
// T is float on the GPU and double in the host build. The arrays are indexed with constants only, so they live in registers.
#pragma once

#include "portable.h"

namespace elman {

template <class T>
struct DenseOut {
  T h, y;
};

template <class T, int extras>
struct DenseGrad {
  T da, dprev;
  T dextra[extras > 0 ? extras : 1];
};

// Known before the product: h = kept + write c(a). A cell may use neither.
template <class T>
struct DenseReady {
  T kept, write;
};

// Base of a cell that splits its forward into three functions:
//
//   template <class Math, class T> static DenseReady<T> ready(T h_prev, const T* e);
//   template <class Math, class T> static T             state(T a, DenseReady<T> ready);     h
//   template <class Math, class T> static T             readout(T h, const T* e);            y
template <class Cell>
struct DenseSteps {
  template <class Math, class T>
  static ELMAN_HD DenseOut<T> forward(T a, T h_prev, const T* e) {
    const T h = Cell::template state<Math>(a, Cell::template ready<Math>(h_prev, e));
    return {h, Cell::template readout<Math>(h, e)};
  }
};

template <class Cell, class = void>
struct UsesA {
  static constexpr bool value = false;
};
template <class Cell>
struct UsesA<Cell, decltype(void(Cell::uses_a))> {
  static constexpr bool value = Cell::uses_a;
};
template <class Cell, class Math, class T>
ELMAN_HD DenseGrad<T, Cell::extras> dense_cell_backward(T gy, T gh, T h, T h_prev, T a, const T* e) {
  if constexpr (UsesA<Cell>::value) return Cell::template backward<Math, T>(gy, gh, h, h_prev, a, e);
  else return Cell::template backward<Math, T>(gy, gh, h, h_prev, e);
}

}  // namespace elman
