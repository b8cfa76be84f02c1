// Binding of the matrix-state skeleton on the host, in double or float. Interface: matrix_state_call.h.
#include "matrix_state_common.h"

#include <elman/matrix_state_host.h>

#include <type_traits>

namespace {

namespace host = elman::matrix::host;
using T = std::conditional_t<ELMAN_DTYPE == static_cast<int>(elman::Dtype::f64), double, float>;
using Driver = host::Driver<Cell, Options, T>;

Driver driver(const MatrixCall& c) {
  host::Inputs<T> x{};
  x.k = at<T>(c.k.address), x.q = at<T>(c.q.address), x.a_log = at<T>(c.A_log), x.dt_bias = at<T>(c.dt_bias),
  x.mask = at<unsigned char>(c.mask), x.starts = at<unsigned char>(c.starts);
  for (int i = 0; i < Cell::vectors; i++) x.vector[i] = at<T>(c.vector[i].address);
  for (int i = 0; i < Cell::lines; i++) x.line[i] = at<T>(c.line[i].address);
  for (int i = 0; i < Cell::scalars; i++) x.scalar[i] = at<T>(c.scalar[i].address);
  for (int i = 0; i < Cell::params; i++) x.param[i] = at<T>(c.param[i]);
  return {{static_cast<int>(c.batch), static_cast<int>(c.steps), static_cast<int>(c.heads), ELMAN_ROWS, ELMAN_LINES},
          x,
          {c.state_line, c.state_row}};
}

}  // namespace

ELMAN_EXPORT void elman_matrix_info(std::int64_t* out) { out[0] = out[1] = 0, out[2] = 1; }

ELMAN_EXPORT const char* elman_matrix_forward(const MatrixCall* c) {
  if (const char* wrong = refuse(*c, false, elman::matrix::kInterval)) return wrong;
  const Driver run = driver(*c);
  run.forward(at<T>(c->S0), at<T>(c->s1), at<T>(c->o), at<T>(c->saved));
  return run.wrong;
}

ELMAN_EXPORT const char* elman_matrix_backward(const MatrixCall* c) {
  if (const char* wrong = refuse(*c, true, elman::matrix::kInterval)) return wrong;
  host::Gradients<T> g{};
  g.k = at<T>(c->dk.address), g.q = at<T>(c->dq.address), g.a_log = at<T>(c->da_log), g.dt_bias = at<T>(c->ddt_bias);
  for (int i = 0; i < Cell::vectors; i++) g.vector[i] = at<T>(c->dvector[i].address);
  for (int i = 0; i < Cell::lines; i++) g.line[i] = at<T>(c->dline[i].address);
  for (int i = 0; i < Cell::scalars; i++) g.scalar[i] = at<T>(c->dscalar[i].address);
  for (int i = 0; i < Cell::params; i++) g.param[i] = at<T>(c->dparam[i]);
  const Driver run = driver(*c);
  run.backward(at<T>(c->saved), at<T>(c->dy), at<T>(c->ds1), at<T>(c->ds0), g);
  return run.wrong;
}
