// Launches of the matrix-state kernels: they return cudaSuccess, or the error.
#pragma once

#include "matrix_state_backward.cuh"
#include "matrix_state_forward.cuh"

namespace elman::matrix {

template <class P>
constexpr size_t forward_shared() {
  return P::HB * sizeof(ForwardShared<P>);
}
template <class P>
constexpr size_t backward_shared() {
  return P::HB * sizeof(BackwardShared<P>);
}

template <class K>
cudaError_t allow_shared(K kernel, size_t bytes) {
  int device, most;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (e != cudaSuccess) return e;
  if (bytes > size_t(most)) return cudaErrorInvalidConfiguration;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
}

template <class P>
cudaError_t launch_forward(ForwardArgs a, cudaStream_t stream) {
  a.n.units = int64_t(a.n.B) * a.n.H * P::PARTS;
  const int heads = forward_heads<P>(a.n.units);
  const size_t bytes = forward_shared<P>() / P::HB * heads;
  if (cudaError_t e = allow_shared(forward_kernel<P>, bytes); e != cudaSuccess) return e;
  forward_kernel<P><<<unsigned((a.n.units + heads - 1) / heads), P::threads / P::HB * heads, bytes, stream>>>(a);
  return cudaGetLastError();
}

template <class P>
cudaError_t launch_backward(BackwardArgs a, cudaStream_t stream) {
  a.n.units = int64_t(a.n.B) * a.n.H * P::PARTS;
  if (cudaError_t e = allow_shared(backward_kernel<P>, backward_shared<P>()); e != cudaSuccess) return e;
  backward_kernel<P><<<unsigned((a.n.units + P::HB - 1) / P::HB), P::threads, backward_shared<P>(), stream>>>(a);
  cudaError_t e = cudaGetLastError();
  if (e != cudaSuccess || P::PARTS == 1) return e;
  const int64_t blocks = (int64_t(a.n.B) * a.n.T * a.n.H + 7) / 8;  // one warp per row
  add_parts_kernel<P><<<unsigned(blocks < 65536 ? blocks : 65536), 256, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace elman::matrix
