// A row recurrence on the GPU as one module: one storage type and one size of a head's state. Compiled with
//   -DELMAN_DTYPE=code of the storage, of 16 bits (dtype.h)  -DELMAN_ROWS=K  -DELMAN_COLUMNS=V
// The interface is that of rows_call.h.
#include <elman/rows.cuh>
#include <elman/rows_call.h>
#include <elman/stored.cuh>

namespace {

namespace rows = elman::rows;
using elman::at;
using Elem = elman::Stored<ELMAN_DTYPE>;
using Plan = rows::Plan<Elem, ELMAN_ROWS, ELMAN_COLUMNS>;

template <bool back>
const char* run(const RowsCall& c) {
  if (c.batch < 1 || c.steps < 1 || c.heads < 1 || c.steps > (1 << 29)) return "a size is below 1, or too large";
  rows::Args<Elem> a{};
  a.T = static_cast<int>(c.steps), a.H = static_cast<int>(c.heads), a.shared = c.shared != 0;
  a.q = at<Elem>(c.q.address), a.k = at<Elem>(c.k.address), a.v = at<Elem>(c.v.address);
  a.q_step = c.q.step, a.k_step = c.k.step, a.v_step = c.v.step;
  a.f = at<float>(c.f), a.w = at<Elem>(c.w), a.mask = at<unsigned char>(c.mask), a.starts = at<unsigned char>(c.starts);
  a.s0 = at<float>(c.S0), a.s1 = at<float>(c.last), a.o = at<Elem>(c.o), a.saved = at<float>(c.saved);
  a.dy = at<Elem>(c.dy), a.ds1 = at<float>(c.ds1), a.ds0 = at<float>(c.ds0), a.dq = at<Elem>(c.dq), a.dk = at<Elem>(c.dk);
  a.dv = at<Elem>(c.dv), a.df = at<float>(c.df), a.dw = at<float>(c.dw);
  const cudaError_t status = elman::start(back ? rows::backward_kernel<Plan> : rows::forward_kernel<Plan>, a, c.batch * c.heads,
                                          Plan::threads, sizeof(rows::Shared<Plan, back>), false, at<CUstream_st>(c.stream));
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

}  // namespace

ELMAN_EXPORT std::int64_t elman_rows_dtype() { return ELMAN_DTYPE; }
ELMAN_EXPORT const char* elman_rows_forward(const RowsCall* c) { return run<false>(*c); }
ELMAN_EXPORT const char* elman_rows_backward(const RowsCall* c) { return run<true>(*c); }
