// Binding of the matrix-state skeleton on the GPU: one cell, storage type and size of state. Interface: matrix_state_call.h.
#include "matrix_state_common.h"

#include <elman/matrix_state.cuh>
#include <elman/stored.cuh>

#include <algorithm>

namespace {

namespace matrix = elman::matrix;

struct OneGroup : Options {
  static constexpr bool one_group = true;
};

template <class O, int lines, int steps, int heads, bool forward = false>
using Plan = matrix::Plan<ELMAN_ROWS, ELMAN_LINES, elman::Stored<ELMAN_DTYPE>, Cell, O, lines, steps, heads, forward>;
template <int heads, class O = Options>
using ForwardPlan = Plan<O, 2, 16, heads, true>;  // lines per lane, steps per segment
template <int heads, class O = Options>
using BackwardPlan = Plan<O, ForwardPlan<4>::most_lines, ForwardPlan<4>::segment, heads>;

template <std::size_t of_one>
using Fitting = std::conditional_t<of_one <= matrix::kMostShared, Options, OneGroup>;
using ForwardOptions = Fitting<matrix::forward_shared<ForwardPlan<1>>()>;
using BackwardOptions = Fitting<matrix::backward_shared<BackwardPlan<1>>()>;

constexpr int heads_that_fit(std::size_t of_one) {
  return 4 * of_one <= matrix::kMostShared ? 4 : 2 * of_one <= matrix::kMostShared ? 2 : 1;
}
template <class O>
constexpr int most_forward_heads() {  // 7: a head uses two barriers, and a block has 16
  constexpr std::size_t of_one = matrix::forward_shared<ForwardPlan<1, O>>();
  return ForwardPlan<1>::straight ? std::min<int>(7, matrix::kMostShared / of_one) : heads_that_fit(of_one);
}
template <class O>
using Forwards = ForwardPlan<most_forward_heads<O>(), O>;
template <class O>
using Backwards = BackwardPlan<heads_that_fit(matrix::backward_shared<BackwardPlan<1, O>>()), O>;
using Forward = Forwards<ForwardOptions>;
using Backward = Backwards<BackwardOptions>;
// Where so few heads run that each has more than one multiprocessor, blocks with fewer warps are faster.
using FewForward = std::conditional_t<(Forward::WPH > Forward::group) && (Cell::vectors > 0), Forwards<OneGroup>, Forward>;
using FewBackward = std::conditional_t<(Backward::WPH > Backward::group) && (Cell::vectors > 0), Backwards<OneGroup>, Backward>;
template <class Few>
bool few(std::int64_t heads) {
  return Few::PARTS * heads <= elman::multiprocessors();
}

matrix::Sizes sizes(const MatrixCall& c) {
  return {static_cast<int>(c.batch), static_cast<int>(c.steps), static_cast<int>(c.heads), 0};
}

matrix::Inputs inputs(const MatrixCall& c) {
  matrix::Inputs x{};
  x.k = at<void>(c.k.address), x.q = at<void>(c.q.address), x.k_step = c.k.step, x.q_step = c.q.step;
  for (int i = 0; i < Cell::lines; i++) x.line[i] = at<void>(c.line[i].address), x.line_step[i] = c.line[i].step;
  for (int i = 0; i < Cell::scalars && i < 2; i++) x.scalar[i] = at<void>(c.scalar[i].address), x.scalar_step[i] = c.scalar[i].step;
  x.a_log = at<float>(c.A_log), x.dt_bias = at<float>(c.dt_bias), x.mask = at<unsigned char>(c.mask);
  return x;
}

matrix::ThirdScalar third(const MatrixCall& c) {
  return {at<void>(c.scalar[2].address), at<void>(c.dscalar[2].address), c.scalar[2].step, c.dscalar[2].step};
}

matrix::Vectors vectors(const MatrixCall& c) {
  matrix::Vectors x{};
  for (int i = 0; i < Cell::vectors; i++) x.x[i] = at<void>(c.vector[i].address), x.step[i] = c.vector[i].step;
  return x;
}

const char* refused(const MatrixCall& c, bool back) {
  if (Options::packed != (c.starts != 0)) return "the module was compiled for calls with starts of documents, or for calls without";
  return refuse(c, back, Forward::interval);
}

const char* said(cudaError_t e) { return e == cudaSuccess ? nullptr : cudaGetErrorString(e); }

}  // namespace

ELMAN_EXPORT void elman_matrix_info(std::int64_t* out) {
  out[0] = std::max<std::int64_t>(matrix::forward_shared<Forward>(), matrix::backward_shared<Backward>());
  out[1] = Backward::part_width;
  out[2] = Options::wide ? 16 : 1;
  for (int piece : {Forward::piece_kq, Forward::piece_line, Backward::piece_line}) out[2] = std::max<std::int64_t>(out[2], piece);
}
// The blocks that share a head in the backward of `batch` rows of `heads` heads.
ELMAN_EXPORT std::int64_t elman_matrix_parts(std::int64_t batch, std::int64_t heads) {
  return few<FewBackward>(batch * heads) ? FewBackward::PARTS : Backward::PARTS;
}

ELMAN_EXPORT const char* elman_matrix_forward(const MatrixCall* c) {
  if (const char* wrong = refused(*c, false)) return wrong;
  matrix::ForwardArgs a{};
  a.n = sizes(*c), a.in = inputs(*c), a.more = vectors(*c);
  a.s0 = at<float>(c->S0), a.s1 = at<float>(c->s1), a.state_line = c->state_line, a.state_row = c->state_row;
  a.o = at<void>(c->o), a.saved = at<void>(c->saved);
  for (int i = 0; i < Cell::params; i++) a.param[i] = at<float>(c->param[i]);
  a.starts = at<unsigned char>(c->starts), a.third = third(*c);
  const bool narrow = few<FewForward>(c->batch * c->heads);
  return said((narrow ? matrix::launch_forward<FewForward> : matrix::launch_forward<Forward>)(a, at<CUstream_st>(c->stream)));
}

ELMAN_EXPORT const char* elman_matrix_backward(const MatrixCall* c) {
  if (const char* wrong = refused(*c, true)) return wrong;
  matrix::BackwardArgs a{};
  a.n = sizes(*c), a.in = inputs(*c), a.more = vectors(*c);
  a.dy = at<void>(c->dy), a.saved = at<void>(c->saved), a.ds1 = at<float>(c->ds1), a.ds0 = at<float>(c->ds0);
  a.state_line = c->state_line, a.state_row = c->state_row;
  a.dk = at<void>(c->dk.address), a.dq = at<void>(c->dq.address), a.dk_step = c->dk.step, a.dq_step = c->dq.step;
  for (int i = 0; i < Cell::vectors; i++) a.dvector[i] = at<void>(c->dvector[i].address), a.dvector_step[i] = c->dvector[i].step;
  for (int i = 0; i < Cell::lines; i++) a.dline[i] = at<void>(c->dline[i].address), a.dline_step[i] = c->dline[i].step;
  for (int i = 0; i < Cell::scalars && i < 2; i++)
    a.dscalar[i] = at<void>(c->dscalar[i].address), a.dscalar_step[i] = c->dscalar[i].step;
  for (int i = 0; i < Cell::params; i++) a.param[i] = at<float>(c->param[i]), a.dparam[i] = at<float>(c->dparam[i]);
  a.dhead = at<float>(c->dhead), a.parts = at<float>(c->parts), a.starts = at<unsigned char>(c->starts);
  a.third = third(*c);
  const bool narrow = few<FewBackward>(c->batch * c->heads);
  return said((narrow ? matrix::launch_backward<FewBackward> : matrix::launch_backward<Backward>)(a, at<CUstream_st>(c->stream)));
}
