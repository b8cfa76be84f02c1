// Launches on emulated threads, with the interface of matrix_state_launch.cuh.
#pragma once

#include <elman/matrix_state_backward.cuh>
#include <elman/matrix_state_forward.cuh>

namespace elman::matrix {

alignas(16) inline unsigned char shared_bytes[227 << 10];

template <class P>
constexpr std::size_t forward_shared() {
  return P::HB * sizeof(ForwardShared<P>);
}
template <class P>
constexpr std::size_t backward_shared() {
  return P::HB * sizeof(BackwardShared<P>);
}

template <class P>
cudaError_t launch_forward(ForwardArgs a, cudaStream_t) {
  if (forward_shared<P>() > sizeof(shared_bytes)) return cudaErrorInvalidConfiguration;
  a.n.units = int64_t(a.n.B) * a.n.H * P::PARTS;
  const int heads = forward_heads<P>(a.n.units);
  return emulated::launch(unsigned((a.n.units + heads - 1) / heads), P::threads / P::HB * heads, shared_bytes,
                          forward_shared<P>() / P::HB * heads, [&] { forward_kernel<P>(a); });
}
template <class P>
cudaError_t launch_backward(BackwardArgs a, cudaStream_t) {
  if (backward_shared<P>() > sizeof(shared_bytes)) return cudaErrorInvalidConfiguration;
  a.n.units = int64_t(a.n.B) * a.n.H * P::PARTS;
  const cudaError_t status = emulated::launch(unsigned((a.n.units + P::HB - 1) / P::HB), P::threads, shared_bytes,
                                              sizeof(shared_bytes), [&] { backward_kernel<P>(a); });
  if (P::PARTS == 1 || status != cudaSuccess) return status;
  return emulated::launch(1, 256, shared_bytes, sizeof(shared_bytes), [&] { add_parts_kernel<P>(a); });
}

}  // namespace elman::matrix
