// Definition of an elementwise cell. If the recurrence has no product inside the loop, every channel of every row is independent:
//
//   (h_t, y_t) = Cell::forward(h_{t-1}, x_t, p)      h: `states` values; x: `streams` values, computed before the loop; p: `vectors`
//                                                   learned values, the same at all times and in all rows
//
// and, walking back, with gy_t = dL/dy_t given and gh_t = dL/dh_t arriving from step t+1,
//
//   (gh_{t-1}, dx_t, dp_t) = Cell::backward(gy_t, gh_t, h_t, h_{t-1}, x_t, p)
//
// The gradient of p is the sum of dp_t over times and rows. A cell is a struct with
//
//   static constexpr int streams, vectors, states;   streams at least 1 and at most 6; vectors at most 8; states 1 to 4
//   template <class Math, class T> static ElementwiseOut<Cell, T>  forward(const T* prev, const T* x, const T* p);
//   template <class Math, class T> static ElementwiseGrad<Cell, T> backward(T gy, const T* gh, const T* h, const T* prev, const T* x,
//                                                                           const T* p);
//
// T is float on the GPU and double or float in the host build; only streams and y are stored in fewer bits. Arrays are indexed
// with constants only, so they live in registers. A gate uses Math::gate, which is accurate even if the gate is nearly shut or
// nearly open (portable.h).
//
// The skeleton handles two things for the cell. Where the mask is 0 the state is held, y is 0, and gradients flow back only through the state.
// Where `starts` is 1 a document begins: before that step, held or not, the state is the initial one, a learned vector or zero.
#pragma once

#include "portable.h"

namespace elman {

template <class Cell, class T>
struct ElementwiseOut {
  T h[Cell::states];
  T y;
};

template <class Cell, class T>
struct ElementwiseGrad {
  T prev[Cell::states];
  T x[Cell::streams];
  T p[Cell::vectors > 0 ? Cell::vectors : 1];
};

// For y = h silu(h): y, and the whole gradient of h. gh arrives from the next step.
template <class Math, class T>
ELMAN_HD T self_gated(T h) {
  return self_gate(h, Math::gate(h).open);
}
template <class Math, class T>
ELMAN_HD T through_self_gate(T gy, T gh, T h) {
  return gy * self_gate_derivative(h, Math::gate(h).open) + gh;
}

namespace elementwise {
constexpr int kSteps = 16;  // steps of a segment: the forward saves the state before each, and the backward replays from there
constexpr int kMostStreams = 6, kMostVectors = 8, kMostStates = 4;

template <class Cell>
constexpr bool kWithinLimits = Cell::streams >= 1 && Cell::streams <= kMostStreams && Cell::vectors >= 0 &&
                               Cell::vectors <= kMostVectors && Cell::states >= 1 && Cell::states <= kMostStates;
}  // namespace elementwise
}  // namespace elman
