// What a matrix-state cell is. The state of one head is a set of V independent *lines* of n elements each (the columns of
// E88, the rows of E70-E75 and E14). All lines of a head share two vectors of a step, k and q. For every line x and step t
//
//   r   = sum_i k_i S_i                      retrieval (only if Cell::retrieves)
//   (keep, write) = Cell::line(r, in, c)     in: the line's own inputs (in[0] is its value v); c: the head's scalars
//   S_i = phi(keep S_i + k_i write)          phi is tanh (Cell::squashes) or the identity
//   o   = sum_i q_i S_i                      readout
//
// and, walking back, with dS arriving from step t+1 and do given,
//
//   dS_i += q_i do;   P_i = dS_i phi';   dkeep = sum_i P_i S'_i;   dwrite = sum_i P_i k_i        (S' is the state before)
//   (dr, din, dc) = Cell::line_backward(dkeep, dwrite, r, in, c)
//   dS'_i = keep P_i + k_i dr
//
// while dq_i = sum_x S_i do and dk_i = sum_x (P_i write + S'_i dr) are sums over lines that nothing in the recurrence waits for.
// A cell is a struct with
//
//   static constexpr int  lines;         inputs per line, at least 1
//   static constexpr int  scalars;       inputs per head, at least 1, at most 2
//   static constexpr bool retrieves, squashes;
//   static constexpr bool scalar_keep;   keep is c[0] itself: then dkeep arrives unsummed over i, and dc[0] must be dkeep
//   static constexpr bool backward_uses_r;  keep or line_backward depend on r
//   template <class Math, class T> static MatrixLine<T> line(T r, const T* in, const T* c);
//   template <class Math, class T> static MatrixLineGrad<T, lines, scalars> line_backward(T dkeep, T dwrite, T r, const T* in, const T* c);
//
// T is float on the GPU and double in the host build. Arrays are indexed with constants only, so they live in registers.
#pragma once

#include "portable.h"

namespace elman {

template <class T>
struct MatrixLine {
  T keep, write;
};

template <class T, int lines, int scalars>
struct MatrixLineGrad {
  T dr;
  T din[lines];
  T dc[scalars];
};

// What the inputs of the skeleton are before they reach the cell.
//   silu    q, k and the first line input pass through SiLU
//   l2      q and k are scaled by (|k|^2 + 1e-12)^(-1/2) afterwards
//   scalars each is either given as it is (fp32), or raw: sigmoid(x), or exp(-exp(A_log) softplus(x + dt_bias))
enum class ScalarKind { given, sigmoid, mamba };

namespace matrix {

constexpr int kInterval = 16;  // steps between checkpoints
constexpr double kNormEps = 1e-12;

template <class T>
ELMAN_HD T softplus(T x) {
  return x > T(20) ? x : ::log1p(::exp(x));
}

// y = s(x) and, from dL/dy, dL/dx. For `mamba` g = dy y; the gradients of A_log and dt_bias are sums over steps of the two others.
template <class T>
ELMAN_HD T scalar_forward(ScalarKind kind, T x, T a_log, T dt_bias) {
  if (kind == ScalarKind::given) return x;
  if (kind == ScalarKind::sigmoid) return T(1) / (T(1) + ::exp(-x));
  return ::exp(-::exp(a_log) * softplus(x + dt_bias));
}

template <class T>
struct ScalarGrad {
  T dx, da_log;
};

template <class T>
ELMAN_HD ScalarGrad<T> scalar_backward(ScalarKind kind, T dy, T y, T x, T a_log, T dt_bias) {
  if (kind == ScalarKind::given) return {dy, T(0)};
  if (kind == ScalarKind::sigmoid) return {dy * y * (T(1) - y), T(0)};
  const T g = -dy * y * ::exp(a_log), z = x + dt_bias;
  return {g / (T(1) + ::exp(-z)), g * softplus(z)};
}

}  // namespace matrix
}  // namespace elman
