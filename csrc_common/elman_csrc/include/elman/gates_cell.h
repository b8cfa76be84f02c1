// Definition of a gated cell: k products of the same h in every step, and optionally one more state that enters no product.
//
//   p_t = W h_{t-1} + b              W [k d,d], the rows of a product (a gate) below those of another
//   (h_t, s_t) = Cell::forward(p_t, u_t, h_{t-1}, s_{t-1})        u_t [k d]: everything that does not depend on the state
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
//   static constexpr bool memory;  whether there is s (the LSTM's); if not, its arguments are 0
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
// The backward is linear in (gh, gs): the GPU evaluates it twice, before gh is known. It reads kept, h and s rounded to the storage
// type. T is float on the GPU and double in the host build. Arrays are indexed with constants only.
#pragma once

#include "portable.h"

namespace elman {

template <class T>
struct GatesState {
  T h, s;
};

template <class T, int gates>
struct GatesGrad {
  T dp[gates], du[gates];  // du: only if it differs
  T dh, ds;
};

}  // namespace elman
