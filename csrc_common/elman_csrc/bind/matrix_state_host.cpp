// Binding of the matrix-state skeleton on the host, in double or float. The interface: matrix_state_call.h.
#include "matrix_state_call.h"

#include <elman/matrix_state_host.h>

#include <type_traits>

namespace {

namespace host = elman::matrix::host;
using T = std::conditional_t<ELMAN_DTYPE == static_cast<int>(elman::Dtype::f64), double, float>;
using Driver = host::Driver<Cell, T>;

Driver driver(const MatrixCall& c) {
  host::Inputs<T> x{};
  x.k = at<T>(c.k), x.q = at<T>(c.q), x.a_log = at<T>(c.a_log), x.dt_bias = at<T>(c.dt_bias), x.mask = at<unsigned char>(c.mask);
  for (int i = 0; i < 4; i++) x.line[i] = at<T>(c.line[i]);
  for (int i = 0; i < 2; i++) x.scalar[i] = at<T>(c.scalar[i]);
  return {{static_cast<int>(c.batch), static_cast<int>(c.steps), static_cast<int>(c.heads), ELMAN_ROWS, ELMAN_LINES},
          {ELMAN_SILU, ELMAN_L2, {static_cast<elman::ScalarKind>(ELMAN_KIND0), static_cast<elman::ScalarKind>(ELMAN_KIND1)}},
          x,
          {c.state_line, c.state_row}};
}

}  // namespace

ELMAN_EXPORT void elman_matrix_info(std::int64_t* out) { out[0] = 1, out[1] = out[2] = 0, out[3] = 1; }

ELMAN_EXPORT const char* elman_matrix_forward(const MatrixCall* c) {
  driver(*c).forward(at<T>(c->s0), at<T>(c->s1), at<T>(c->o), at<T>(c->saved));
  return nullptr;
}

ELMAN_EXPORT const char* elman_matrix_backward(const MatrixCall* c) {
  host::Gradients<T> g{};
  g.k = at<T>(c->dk), g.q = at<T>(c->dq), g.a_log = at<T>(c->da_log), g.dt_bias = at<T>(c->ddt_bias);
  for (int i = 0; i < 4; i++) g.line[i] = at<T>(c->dline[i]);
  for (int i = 0; i < 2; i++) g.scalar[i] = at<T>(c->dscalar[i]);
  driver(*c).backward(at<T>(c->saved), at<T>(c->dy), at<T>(c->ds1), at<T>(c->ds0), g);
  return nullptr;
}
