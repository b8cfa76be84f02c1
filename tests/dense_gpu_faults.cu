// For test_kernels_dense_gpu.py: a kernel that keeps multiprocessors busy, and a launch of the dense skeleton with a block missing.
#include <elman/dense.cuh>

#include "dense_cuda_common.h"

namespace {

__global__ void hold_kernel(unsigned long long nanoseconds) {
  const unsigned long long start = elman::ptx::nanoseconds();
  while (elman::ptx::nanoseconds() - start < nanoseconds) __nanosleep(1000);
}

}  // namespace

// Holds `blocks` multiprocessors, whole, for a time.
ELMAN_EXPORT int hold(int blocks, int shared_bytes, std::uint64_t nanoseconds, std::uint64_t stream) {
  if (cudaFuncSetAttribute(hold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes) != cudaSuccess) return 1;
  hold_kernel<<<blocks, 32, shared_bytes, at<CUstream_st>(stream)>>>(nanoseconds);
  return cudaGetLastError() != cudaSuccess;
}

// The forward without its last block: the others wait for words that nobody writes.
ELMAN_EXPORT int forward_with_a_block_missing(const DenseCall* call) {
  namespace dense = elman::dense;
  constexpr int parts = (d + dense::kOwned<Elem> - 1) / dense::kOwned<Elem>;
  constexpr auto function =
      dense::dense_kernel<Cell, Elem, d, 1, 0, 1, dense::Exchange::Grid, true, dense::Input::Projected, false, false, false>;
  const Args g = describe<false>(*call);
  const auto stream = at<CUstream_st>(call->stream);
  const std::size_t plane = static_cast<std::size_t>(g.B) * d;
  const int bytes = dense::Layout<Elem, d, 0, 1, dense::Exchange::Grid>::bytes(1);
  if (cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess) return 1;
  if (cudaMemsetAsync(g.history + plane, 0xff, g.T * plane * sizeof(Elem), stream) != cudaSuccess) return 2;
  function<<<dim3(parts - 1, static_cast<unsigned>(call->groups)), dense::kThreads, bytes, stream>>>(g);
  return cudaGetLastError() == cudaSuccess ? 0 : 3;
}
