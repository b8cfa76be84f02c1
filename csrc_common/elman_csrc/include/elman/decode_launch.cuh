// Launches of decode.cuh.
#pragma once

#include <cuda_runtime.h>

#include "decode.cuh"
#include "decode_draw.cuh"
#include "decode_norm.cuh"

namespace elman::decode {

// Two blocks per multiprocessor, so that the next kernel loads its weights while this one finishes. With many rows, one: they need the registers.
template <class Elem, class Cell, int tiles>
__global__ void __launch_bounds__(kThreads, tiles > 2 ? 1 : 2) kernel(const __grid_constant__ Args<Elem> g) {
  extern __shared__ uint4 shared[];
  block<Elem, Cell, tiles>(g, shared);
}

template <class Elem>
__global__ void __launch_bounds__(kNormThreads) norm_kernel(const __grid_constant__ NormArgs<Elem> g) {
  extern __shared__ uint4 shared[];
  norm_block(g, reinterpret_cast<float*>(shared));
}
template <class Elem>
__global__ void __launch_bounds__(kDrawThreads) draw_kernel(const __grid_constant__ DrawArgs<Elem> g) {
  __shared__ DrawShared shared;
  draw_block(g, shared);
}

// Shared memory that a block of the current device may have; the usual limit if the device cannot say.
inline int most_shared_bytes() {
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 48 << 10;
  if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) return 48 << 10;
  return bytes;
}

template <class Given>
cudaError_t start(void (*function)(Given), const Given& g, int blocks, int threads, int bytes, bool early, cudaStream_t stream) {
  constexpr int usual = 48 << 10;  // bytes of shared memory that a kernel need not ask for
  if (bytes > usual) {
    const auto status = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (status != cudaSuccess) return status;
  }
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.gridDim = dim3(blocks), config.blockDim = dim3(threads), config.dynamicSmemBytes = bytes, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, function, g);
}

template <class Elem, class Cell, int tiles>
cudaError_t launch(const Args<Elem>& g, bool early, cudaStream_t stream) {
  const int bytes = shared_bytes<Cell, tiles>(g.rows, g.inputs, g.outputs);
  int blocks = blocks_for(g.outputs);
  for (int i = 0; i < g.maps; ++i) blocks += blocks_for(g.extra_step[i]);
  return start(kernel<Elem, Cell, tiles>, g, blocks, kThreads, bytes, early, stream);
}
template <class Elem>
cudaError_t launch_norm(const NormArgs<Elem>& g, int rows, bool early, cudaStream_t stream) {
  return start(norm_kernel<Elem>, g, rows, kNormThreads, norm_shared_bytes(g.width), early, stream);
}
template <class Elem>
cudaError_t launch_draw(const DrawArgs<Elem>& g, int rows, bool early, cudaStream_t stream) {
  return start(draw_kernel<Elem>, g, rows, kDrawThreads, 0, early, stream);
}

}  // namespace elman::decode
