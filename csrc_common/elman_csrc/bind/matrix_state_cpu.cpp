// Binding of the matrix-state skeleton on a CPU, in float or bfloat16. Interface: matrix_state_call.h.
#include "matrix_state_common.h"

#include <elman/matrix_state_cpu.h>

namespace {

namespace cpu = elman::matrix::cpu;
using Stored = elman::simd::Storage<ELMAN_DTYPE>;
using Skeleton = cpu::Skeleton<Cell, Options, Stored, ELMAN_ROWS, ELMAN_LINES>;

template <class T>
cpu::Rows<T> rows(const CallRows& x) {
  return {at<T>(x.address), x.step};
}

const char* run(const MatrixCall& c, bool back) {
  if (const char* wrong = refuse(c, back, elman::matrix::kInterval)) return wrong;
  cpu::Arguments<Stored> a{};
  a.B = c.batch, a.T = c.steps, a.H = c.heads, a.threads = c.threads;
  a.k = rows<Stored>(c.k), a.q = rows<Stored>(c.q), a.dk = rows<Stored>(c.dk), a.dq = rows<Stored>(c.dq);
  for (int i = 0; i < Cell::vectors; i++) a.vector[i] = rows<void>(c.vector[i]), a.dvector[i] = rows<void>(c.dvector[i]);
  for (int i = 0; i < Cell::lines; i++) a.line[i] = rows<Stored>(c.line[i]), a.dline[i] = rows<Stored>(c.dline[i]);
  for (int i = 0; i < Cell::scalars; i++) a.scalar[i] = rows<void>(c.scalar[i]), a.dscalar[i] = rows<void>(c.dscalar[i]);
  for (int i = 0; i < Cell::params; i++) a.param[i] = at<float>(c.param[i]), a.dparam[i] = at<float>(c.dparam[i]);
  a.a_log = at<float>(c.A_log), a.dt_bias = at<float>(c.dt_bias), a.mask = at<unsigned char>(c.mask);
  a.starts = at<unsigned char>(c.starts);
  a.layout = {c.state_line, c.state_row};
  a.s0 = at<float>(c.S0), a.s1 = at<float>(c.s1), a.saved = at<float>(c.saved), a.o = at<Stored>(c.o);
  a.dy = at<Stored>(c.dy), a.ds1 = at<float>(c.ds1), a.ds0 = at<float>(c.ds0), a.dhead = at<float>(c.dhead);
  return elman::simd::guarded([&] { back ? Skeleton{a}.backward() : Skeleton{a}.forward(); });
}

}  // namespace

ELMAN_EXPORT void elman_matrix_info(std::int64_t* out) { out[0] = out[1] = 0, out[2] = 1; }

ELMAN_EXPORT const char* elman_matrix_forward(const MatrixCall* c) { return run(*c, false); }

ELMAN_EXPORT const char* elman_matrix_backward(const MatrixCall* c) { return run(*c, true); }
