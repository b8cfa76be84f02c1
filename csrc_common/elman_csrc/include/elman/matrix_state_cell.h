// Definition of a matrix-state cell. The state of one head is a set of V independent *lines* of n elements each (the columns of
// E88, the rows of E70-E75 and E14). All lines of a head share the vectors of a step: k, q and up to three more. For every line
// x and step t
//
//   r   = sum_i p_i S_i                          retrieval (only if Cell::retrieves)
//   (keep, write, second) = Cell::line({r, in, c, par})
//   S_i = phi(keep g_i S_i + k_i write + l_i second)    phi is tanh (Cell::squashes) or the identity
//   o   = sum_i q_i S_i                          readout
//
// where p is k, k times another vector element by element (read_vector), or that vector itself (unless reads_with_k); g is 1 or
// another vector (keep_vector); l is 0 or another vector (second_vector). `in` are the line's own inputs of this step (in[0] is
// its value v), `c` the head's scalars of this step, and `par` the line's learned constants. Walking back, with dS arriving
// from step t+1 and do given,
//
//   dS_i += q_i do;   P_i = dS_i phi';   d.keep = sum_i P_i g_i S'_i;   d.write = sum_i P_i k_i;   d.second = sum_i P_i l_i
//   (g.r, g.in, g.c, g.par) = Cell::line_backward(d, {r, in, c, par})                              (S' is the state before)
//   dS'_i = keep g_i P_i + p_i g.r
//
// and dq_i = sum_x S_i do, dk_i = sum_x P_i write, dp_i = sum_x S'_i g.r, dg_i = sum_x keep P_i S'_i, dl_i = sum_x P_i second
// are sums over lines that nothing in the recurrence waits for.
//
// With `energy` the cell also gets the mean of S_i^2 over i, and returns its gradient g.energy. An `elementwise` cell replaces
// the sum above by its own update, S_i = phi(element(S_i, k_i, (keep, write, second))), and has no keep_vector and no
// second_vector.
//
// A cell is a struct derived from MatrixCell, whose defaults are those of a cell with the input v alone:
//
//   lines            inputs per line, v among them: 1 to 4, each [B,T,H,V]
//   scalars          inputs per head: 0 to 3, each [B,T,H]
//   params           learned constants per line: 0 to 4, each [H,V]
//   vectors          vectors of a step besides k and q: 0 to 3, each [B,T,H,N]
//   read_vector      which of them retrieves; -1: none. keep_vector, second_vector: the same for g and l
//   reads_with_k     whether k multiplies the read_vector
//   retrieves        whether r exists; else it is 0
//   squashes         whether phi is tanh
//   squash_scalar    the scalar that is 0 in steps without phi; -1: none. If a token takes several steps, only the last has phi; the
//                    scalar's gradient is 0
//   scalar_keep      keep is c[0] itself: d.keep arrives unsummed over i, g.c[0] must be d.keep, and nothing else may read it
//   backward_uses_r  keep or line_backward depends on r; in an elementwise cell, anything does
//   delta            write is a - b r, where b depends on c[1] alone: then, in 16-bit storage and with 227 KB of shared memory,
//                    states of more than 32 elements take 16 steps at once. Needs scalar_keep and retrieves, no squashes, at most
//                    two scalars, and neither params, folded, vectors, elementwise nor energy
//   energy           whether there is an energy; else it is 0
//   elementwise      whether it has `element` and `element_backward`
//   folded           numbers per line that `line` gets as `in` in place of the inputs and learned constants: `fold` computes them
//                    from these, once and outside the recurrence; 0: `line` gets these themselves
//   template <class Math, class T> static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x);
//   template <class Math, class T> static ELMAN_HD MatrixGrad<Cell, T> line_backward(MatrixLine<T> d, MatrixIn<T> x);
//   template <class Math, class T> static ELMAN_HD void fold(T (&x)[folded], const T* in, const T* par);
//   template <class Math, class T>
//   static ELMAN_HD void fold_backward(T (&din)[lines], T* dpar, const T* dx, const T* in, const T* par);
//   template <class Math, class T> static ELMAN_HD T element(T s, T k, MatrixLine<T> w);
//   template <class Math, class T> static ELMAN_HD MatrixElement<T> element_backward(T P, T s, T k, MatrixLine<T> w);
//
// T is float on the GPU, and double or float in the host build. Arrays are indexed with constants only, so they live in
// registers. `Math` (portable.h) has `tanh` and `sigmoid`, the hardware's approximations for 16-bit storage, and `gate`:
// sigmoid(x) and 1 - sigmoid(x), both accurate even if the gate is nearly shut or nearly open. Use `gate` for what multiplies
// `keep` step after step. ::exp, ::log, ::log1p and their like come from <cmath>.
#pragma once

#include "portable.h"

namespace elman {

template <class T>
struct MatrixLine {
  T keep, write, second;  // second: 0 unless given
};

template <class T>
struct MatrixElement {  // dL/ds, dL/dk, and one element's share of the gradients of (keep, write, second)
  T s, k;
  MatrixLine<T> line;
};

struct MatrixCell {
  static constexpr int lines = 1, folded = 0, scalars = 0, params = 0, vectors = 0;
  static constexpr int read_vector = -1, keep_vector = -1, second_vector = -1, squash_scalar = -1;
  static constexpr bool retrieves = true, squashes = true, scalar_keep = false, backward_uses_r = true, reads_with_k = true;
  static constexpr bool delta = false, energy = false, elementwise = false;
  template <class Math, class T>
  static ELMAN_HD T element(T s, T k, MatrixLine<T> w);
  template <class Math, class T>
  static ELMAN_HD MatrixElement<T> element_backward(T P, T s, T k, MatrixLine<T> w);
};

template <class T>
struct MatrixIn {
  T r;
  const T *in, *c, *par;
  T energy;
};

template <class Cell>  // numbers per line in the recurrence
constexpr int kGivenLines = Cell::folded > 0 ? Cell::folded : Cell::lines;

template <class Cell, class T>
struct MatrixGrad {
  T r;
  T in[kGivenLines<Cell>];
  T c[Cell::scalars > 0 ? Cell::scalars : 1];
  T par[Cell::params > 0 ? Cell::params : 1];
  T energy;
};

// What the skeleton does to its inputs before they reach the cell.
//   SiLU    of k, q and lines, each on request
//   L2      then scales k and q, each on request, by (|k|^2 + 1e-12)^(-1/2)
//   scalars each is used as given (fp32), or raw: sigmoid(x), or, the first, exp(-exp(A_log) softplus(x + dt_bias))
// k, q and lines may be shared by all heads.
enum class ScalarKind { given, sigmoid, mamba };

namespace matrix {

constexpr int kMostLines = 4, kMostScalars = 3, kMostParams = 4, kMostVectors = 3;
constexpr int kInterval = 16;  // steps between checkpoints
constexpr double kNormEps = 1e-12;

// Fails to compile, with a message, for a cell beyond the limits of the skeleton.
template <class Cell>
constexpr bool within_limits() {
  static_assert(Cell::lines >= 1 && Cell::lines <= kMostLines && Cell::folded >= 0 && Cell::folded <= kMostLines &&
                    Cell::scalars >= 0 && Cell::scalars <= kMostScalars && Cell::params >= 0 && Cell::params <= kMostParams &&
                    Cell::vectors >= 0 && Cell::vectors <= kMostVectors,
                "a cell has 1 to 4 lines, 0 to 4 of them folded, 0 to 3 scalars, 0 to 4 params and 0 to 3 vectors");
  static_assert(Cell::read_vector < Cell::vectors && Cell::keep_vector < Cell::vectors && Cell::second_vector < Cell::vectors,
                "read_vector, keep_vector and second_vector count from 0 and are below `vectors`");
  static_assert(!Cell::scalar_keep || Cell::scalars > 0, "scalar_keep means that keep is c[0], so there must be a scalar");
  static_assert(Cell::squash_scalar < Cell::scalars && (Cell::squashes || Cell::squash_scalar < 0),
                "squash_scalar counts from 0, is below `scalars`, and needs squashes");
  static_assert(!Cell::elementwise || (Cell::keep_vector < 0 && Cell::second_vector < 0),
                "an elementwise cell has neither keep_vector nor second_vector");
  static_assert(!Cell::elementwise || !Cell::retrieves || Cell::backward_uses_r,
                "an elementwise cell that retrieves needs backward_uses_r");
  static_assert(
      !Cell::delta || (Cell::scalar_keep && Cell::retrieves && !Cell::squashes && Cell::scalars <= 2 && Cell::params == 0 &&
                       Cell::folded == 0 && Cell::vectors == 0 && !Cell::elementwise && !Cell::energy),
      "delta needs scalar_keep and retrieves, no squashes, at most two scalars, and neither params, folded, vectors, "
      "elementwise nor energy");
  return true;
}

// Whether phi is tanh in a step with scalars c.
template <class Cell, class T>
ELMAN_HD constexpr bool squashes(const T* c) {
  if constexpr (Cell::squash_scalar >= 0) return c[Cell::squash_scalar] != T(0);
  else return Cell::squashes;
}

// Sets of inputs are bits: of k, of q, then of the lines in their order.
constexpr unsigned kOfK = 1, kOfQ = 2;
ELMAN_HD constexpr bool of_line(unsigned set, int line) { return set >> (2 + line) & 1; }
// Whether k (w = 0) or q is in the set; tested at run time only if exactly one of them is.
ELMAN_HD constexpr bool of_key(unsigned set, int w) { return (set & 3) == 3 || ((set & 3) != 0 && (set >> w & 1)); }

// y = s(x), and dL/dx from dL/dy. For `mamba` g = dy y; the gradients of A_log and dt_bias are sums of the others over steps.
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
