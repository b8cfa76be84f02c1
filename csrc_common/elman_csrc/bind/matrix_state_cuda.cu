// Binding of the matrix-state skeleton on the GPU: one cell, one storage type, one size of state. The interface: matrix_state_call.h.
#include "matrix_state_call.h"

#include <elman/matrix_state.cuh>
#include <elman/stored.cuh>

#include <algorithm>

namespace {

namespace matrix = elman::matrix;

struct Options {
  static constexpr bool silu = ELMAN_SILU, l2 = ELMAN_L2;
  static constexpr elman::ScalarKind kind0 = static_cast<elman::ScalarKind>(ELMAN_KIND0),
                                     kind1 = static_cast<elman::ScalarKind>(ELMAN_KIND1);
};
template <int lines, int steps>
using Plan = matrix::Plan<ELMAN_ROWS, ELMAN_LINES, elman::Stored<ELMAN_DTYPE>, Cell, Options, lines, steps>;
using Forward = Plan<2, 16>;  // lines a lane, steps a segment
using Backward = Plan<Forward::most_lines, Forward::interval>;

matrix::Sizes sizes(const MatrixCall& c) {
  return {static_cast<int>(c.batch), static_cast<int>(c.steps), static_cast<int>(c.heads), 0};
}

matrix::Inputs inputs(const MatrixCall& c) {
  matrix::Inputs x{};
  x.k = at<void>(c.k), x.q = at<void>(c.q), x.k_step = c.k_step, x.q_step = c.q_step;
  for (int i = 0; i < 4; i++) x.line[i] = at<void>(c.line[i]), x.line_step[i] = c.line_step[i];
  for (int i = 0; i < 2; i++) x.scalar[i] = at<void>(c.scalar[i]), x.scalar_step[i] = c.scalar_step[i];
  x.a_log = at<float>(c.a_log), x.dt_bias = at<float>(c.dt_bias), x.mask = at<unsigned char>(c.mask);
  return x;
}

const char* said(cudaError_t e) { return e == cudaSuccess ? nullptr : cudaGetErrorString(e); }

}  // namespace

ELMAN_EXPORT void elman_matrix_info(std::int64_t* out) {
  out[0] = Backward::PARTS;
  out[1] = matrix::forward_shared<Forward>();
  out[2] = matrix::backward_shared<Backward>();
  out[3] = 1;
  for (int piece : {Forward::piece_kq, Forward::piece_line, Backward::piece_line}) out[3] = std::max<std::int64_t>(out[3], piece);
}

ELMAN_EXPORT const char* elman_matrix_forward(const MatrixCall* c) {
  matrix::ForwardArgs a{};
  a.n = sizes(*c), a.in = inputs(*c);
  a.s0 = at<float>(c->s0), a.s1 = at<float>(c->s1), a.state_line = c->state_line, a.state_row = c->state_row;
  a.o = at<void>(c->o), a.saved = at<void>(c->saved);
  return said(matrix::launch_forward<Forward>(a, at<CUstream_st>(c->stream)));
}

ELMAN_EXPORT const char* elman_matrix_backward(const MatrixCall* c) {
  matrix::BackwardArgs a{};
  a.n = sizes(*c), a.in = inputs(*c);
  a.dy = at<void>(c->dy), a.saved = at<void>(c->saved), a.ds1 = at<float>(c->ds1), a.ds0 = at<float>(c->ds0);
  a.state_line = c->state_line, a.state_row = c->state_row;
  a.dk = at<void>(c->dk), a.dq = at<void>(c->dq), a.dk_step = c->dk_step, a.dq_step = c->dq_step;
  for (int i = 0; i < 4; i++) a.dline[i] = at<void>(c->dline[i]), a.dline_step[i] = c->dline_step[i];
  for (int i = 0; i < 2; i++) a.dscalar[i] = at<void>(c->dscalar[i]), a.dscalar_step[i] = c->dscalar_step[i];
  a.dhead = at<float>(c->dhead), a.parts = at<float>(c->parts);
  return said(matrix::launch_backward<Backward>(a, at<CUstream_st>(c->stream)));
}
