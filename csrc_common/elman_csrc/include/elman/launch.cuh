// Launches of kernels that take one structure of arguments. elman_csrc/emulated has the same functions for a processor.
#pragma once

#include <cuda_runtime.h>

namespace elman {

__device__ __forceinline__ uint4* dynamic_shared() {
  extern __shared__ uint4 bytes[];
  return bytes;
}

// Number of multiprocessors of the current device; an H200's if the device cannot say.
inline int multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 132;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 132;
  return count;
}

// early: the kernel may start before the previous one has ended, and waits for it itself (decode::wait_for_previous).
template <class Args>
cudaError_t start(void (*function)(Args), const Args& g, long long blocks, int threads, int shared_bytes, bool early,
                  cudaStream_t stream) {
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidConfiguration;
  constexpr int usual = 48 << 10;  // bytes of shared memory that a kernel need not ask for
  cudaError_t status = cudaSuccess;
  if (shared_bytes > 0)  // as many blocks per multiprocessor as its shared memory holds
    status = cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (status == cudaSuccess && shared_bytes > usual)
    status = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.gridDim = dim3(static_cast<unsigned>(blocks)), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared_bytes;
  config.stream = stream, config.attrs = &attribute, config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, function, g);
}

}  // namespace elman
