// Definition of a gated cell: k products of the same h in every step, and up to three more states outside the products.
//
//   p_t = W h_{t-1} + b              W [k d,d]: the rows of one product (a gate) follow those of another
//   (h_t, s_t) = Cell::forward(p_t, u_t, h_{t-1}, s_{t-1})        u_t [k d]: everything that does not depend on the state
//
// With heads, each head is such a recurrence of d / heads channels: its W, p and u follow those of the previous head.
//
// and, walking back, with gh_t and gs_t the whole gradients of h_t and s_t,
//
//   (dp_t, du_t, dh', ds') = Cell::backward(gh_t, gs_t, kept_t, h_{t-1}, s_{t-1}, s_t)
//   gh_{t-1} = W^T dp_t + dh' + dL/dy_{t-1},   gs_{t-1} = ds'          y_t = h_t
//
// A cell is pointwise: it sees one channel of one row. It is a struct with
//
//   static constexpr int  gates;   k, 1 to 4
//   static constexpr int  kept;    numbers per channel that the forward saves for the backward, in the storage type
//   static constexpr int  memory;  numbers in s, 0 to 3 (1: the LSTM's); if 0, its arguments are 0
//   static constexpr bool splits;  whether du differs from dp (the GRU's)
//   static constexpr bool staged;  whether the last product multiplies a result of the others instead of h:
//
//   (p_t)_k = W_k inner(p_t, u_t, h_{t-1}) + b_k          inner reads the first k - 1 of p
//
//   template <class Math, class T> static GatesState<T>       forward(const T* p, const T* u, T h, T s, T* kept);
//   template <class Math, class T> static GatesGrad<T, gates> backward(T gh, T gs, const T* kept, T h, T s, T s_new);
//
// and, if it is staged (then without s, du is dp, and dp_k from `backward` is final),
//
//   template <class Math, class T> static T                   inner(const T* p, const T* u, T h);
//   template <class Math, class T> static GatesGrad<T, gates> inner_backward(T gi, const T* kept, T h);
//
// The second returns, for the gradient gi of inner, the terms to add to the first k - 1 of dp and to dh.
//
// If s has several numbers, the arguments s, gs and s_new are GatesMemory<T, memory> instead of T, and the results
// GatesState<T, memory> and GatesGrad<T, gates, memory>.
//
// The backward is linear in (gh, gs): the GPU evaluates it twice, before gh is known. It reads kept, h and s rounded to the storage
// type. T is float on the GPU and double in the host build. Arrays are indexed with constants only.
#pragma once

#include <type_traits>

#include "portable.h"

namespace elman {

template <class T, int n>
struct GatesNumbers {
  T s[n];
  ELMAN_HD T operator[](int i) const { return s[i]; }
};
template <class T, int n>
using GatesMemory = std::conditional_t<n == 1, T, GatesNumbers<T, n>>;
template <class Cell>
constexpr int kGatesMemory = Cell::memory > 1 ? Cell::memory : 1;  // numbers of a GatesMemory
template <class T>
ELMAN_HD T number(T s, int) {
  return s;
}
template <class T, int n>
ELMAN_HD T number(GatesNumbers<T, n> s, int i) {
  return s.s[i];
}
template <class T, int n, class Make>
ELMAN_HD GatesMemory<T, n> numbers(const Make& make) {  // make(i) for each
  if constexpr (n == 1) {
    return make(0);
  } else {
    GatesNumbers<T, n> s;
#pragma unroll
    for (int i = 0; i < n; ++i) s.s[i] = make(i);
    return s;
  }
}

template <class T, int memory = 1>
struct GatesState {
  T h;
  GatesMemory<T, memory> s;
};

template <class T, int gates, int memory = 1>
struct GatesGrad {
  T dp[gates], du[gates];  // du: only if it differs
  T dh;
  GatesMemory<T, memory> ds;
};

}  // namespace elman
