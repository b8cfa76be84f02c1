// Launches on emulated threads, with the interface of launch.cuh. The GPU has one multiprocessor, so that small shapes run the code of large ones, or as
// many as EMULATED_MULTIPROCESSORS says.
#pragma once

#include <cuda_runtime.h>

#include <cstdlib>

namespace elman {

alignas(16) inline unsigned char shared_memory[227 << 10];

inline uint4* dynamic_shared() { return reinterpret_cast<uint4*>(shared_memory); }
inline int multiprocessors() {
  const char* const count = std::getenv("EMULATED_MULTIPROCESSORS");
  return count ? std::atoi(count) : 1;
}

template <class Args>
cudaError_t start(void (*function)(Args), const Args& g, long long blocks, int threads, int bytes, bool, cudaStream_t) {
  if (bytes > int(sizeof(shared_memory))) return cudaErrorInvalidConfiguration;
  return emulated::launch(unsigned(blocks), threads, shared_memory, bytes, [&] { function(g); });
}

}  // namespace elman
