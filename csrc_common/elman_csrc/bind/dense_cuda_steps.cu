// Dense cells for matrices that no persistent launch holds: the caller computes each step's product, and a kernel follows it.
// Compiled as dense_cuda.cu, without ELMAN_KIND and ELMAN_SPILL.
#include <elman/dense_steps.cuh>

#include "dense_cuda_common.h"

namespace {

// product [B,d] float: W h_{t-1} or W^T da_{t+1}. state [B,d] float: h, or the part of gh that does not pass through W; updated.
template <bool backward>
const char* step(const DenseCall& call) {
  if (const char* why = refuse(call)) return why;
  const Args g = describe<backward>(call);
  const dim3 grid((d + 127) / 128, g.B);
  const auto stream = at<CUstream_st>(call.stream);
  const auto* product = at<const float>(call.product);
  const int t = static_cast<int>(call.t);
  if (backward) elman::dense::step_backward<Cell, Elem, packed><<<grid, 128, 0, stream>>>(g, d, t, product, at<float>(call.state));
  else elman::dense::step_forward<Cell, Elem, packed><<<grid, 128, 0, stream>>>(g, d, t, product, at<float>(call.state));
  Outcome outcome;
  outcome.failed(cudaGetLastError(), "launch");
  return outcome.said;
}

}  // namespace

ELMAN_EXPORT const char* elman_dense_forward_step(const DenseCall* call) { return step<false>(*call); }
ELMAN_EXPORT const char* elman_dense_backward_step(const DenseCall* call) { return step<true>(*call); }
