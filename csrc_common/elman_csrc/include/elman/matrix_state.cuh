// The matrix-state skeleton on the GPU: forward and backward over all T steps in one launch each. Cells: matrix_state_cell.h.
//
// Mapping. L lanes of a warp share one line, each with R = ceil(N/L) <= 8 of its N elements in registers; a warp holds C = 32/L
// lines, a team of up to WPH warps all lines of a head, or a part of them when there are many. Sums over a line take log2(L)
// shuffles; for bf16 and N <= 32 (`tensor`, with L = 4) they are products on the tensor cores. Inputs of 16 steps travel by
// cp.async while the previous 16 are computed, and become fp32 in shared memory once (with SiLU, the L2 norm and the decay, if
// asked for). Nothing in the loop over steps waits for memory or for another warp.
//
// Backward. The state is saved in fp32 every 16 steps; a segment is replayed into registers (bit for bit the forward's arithmetic)
// and walked back. Sums over lines (dq, dk, the scalars) are off the critical path: each step leaves S and P = dS phi' in shared
// memory, and after the walk dq_t = S_t dy_t and dk_t = P_t write_t + S_{t-1} dr_t are taken from there, for bf16 storage by
// the tensor cores (bf16 operands, fp32 sums), otherwise in fp32; the tensor form needs no shared memory for it (walk_tensor).
// No atomics: every sum has one owner and one order.
#pragma once

#include "matrix_state_backward.cuh"
#include "matrix_state_forward.cuh"

namespace elman::matrix {

// Launches return cudaSuccess, or the error.
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
  if (cudaError_t e = allow_shared(forward_kernel<P>, forward_shared<P>()); e != cudaSuccess) return e;
  forward_kernel<P><<<unsigned((a.n.units + P::HB - 1) / P::HB), P::threads, forward_shared<P>(), stream>>>(a);
  return cudaGetLastError();
}

template <class P>
cudaError_t launch_backward(BackwardArgs a, cudaStream_t stream) {
  a.n.units = int64_t(a.n.B) * a.n.H * P::PARTS;
  if (cudaError_t e = allow_shared(backward_kernel<P>, backward_shared<P>()); e != cudaSuccess) return e;
  backward_kernel<P><<<unsigned((a.n.units + P::HB - 1) / P::HB), P::threads, backward_shared<P>(), stream>>>(a);
  cudaError_t e = cudaGetLastError();
  if (e != cudaSuccess || P::PARTS == 1) return e;
  const int64_t total = int64_t(a.n.B) * a.n.T * a.n.H * (2 * P::N + 2), blocks = (total + 255) / 256;
  add_parts_kernel<P><<<unsigned(blocks < 65536 ? blocks : 65536), 256, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace elman::matrix
