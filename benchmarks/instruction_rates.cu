// How often one scheduler issues the instructions that the matrix-state kernels are made of: the time of many independent ones.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace {

constexpr int kRounds = 64, kAtOnce = 8;
enum { kTanh, kTf32, kBf16, kBf16Half, kMovmatrix, kShuffle, kLoad4, kLoad8, kLoad16 };

template <int what>
__device__ __forceinline__ void issue(float (&c)[kAtOnce][4], unsigned a, unsigned b, unsigned address) {
#pragma unroll
  for (int i = 0; i < kAtOnce; i++) {
    float* x = c[i];
    if constexpr (what == kTanh) asm volatile("tanh.approx.f32 %0, %0;" : "+f"(x[0]));
    if constexpr (what == kTf32)
      asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%4,%5}, {%5,%4}, {%0,%1,%2,%3};"
                   : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
                   : "r"(a), "r"(b));
    if constexpr (what == kBf16)
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%4,%5}, {%5,%4}, {%0,%1,%2,%3};"
                   : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
                   : "r"(a), "r"(b));
    if constexpr (what == kBf16Half)
      asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%5}, {%0,%1,%2,%3};"
                   : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
                   : "r"(a), "r"(b));
    if constexpr (what == kMovmatrix)
      asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(*reinterpret_cast<unsigned*>(&x[0])));
    if constexpr (what == kShuffle) asm volatile("shfl.sync.bfly.b32 %0, %0, 1, 31, -1;" : "+f"(x[0]));
    if constexpr (what == kLoad4) asm volatile("ld.volatile.shared.f32 %0, [%1];" : "=f"(x[0]) : "r"(address + 512 * i));
    if constexpr (what == kLoad8)
      asm volatile("ld.volatile.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(address + 512 * i));
    if constexpr (what == kLoad16)
      asm volatile("ld.volatile.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                   : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                   : "r"(address + 512 * i));
  }
}

// Loads: as the kernels do, four addresses a warp, adjacent, each for eight lanes.
template <int what>
__global__ void rate(std::int64_t* clocks, float* sink, unsigned seed) {
  __shared__ __align__(16) float memory[2048];
  for (int i = threadIdx.x; i < 2048; i += blockDim.x) memory[i] = float(seed + i) * 1e-4f;
  const unsigned wide = what == kLoad16 ? 16 : what == kLoad8 ? 8 : 4;
  const unsigned address = unsigned(__cvta_generic_to_shared(memory)) + threadIdx.x % 4 * wide;
  float c[kAtOnce][4];
  for (int i = 0; i < kAtOnce; i++)
    for (int j = 0; j < 4; j++) c[i][j] = float(threadIdx.x + seed + i + j) * 1e-3f;
  __syncthreads();
  const std::int64_t start = clock64();
#pragma unroll 4
  for (int r = 0; r < kRounds; r++) issue<what>(c, seed * 3u, seed * 5u, address);
  float sum = 0;
  for (int i = 0; i < kAtOnce; i++)
    for (int j = 0; j < 4; j++) sum += c[i][j];
  const std::int64_t end = clock64();
  sink[threadIdx.x] = sum;
  if (threadIdx.x % 32 == 0) clocks[threadIdx.x / 32] = end - start;
}

template <int what>
double measure(int warps) {
  std::int64_t* clocks;
  float* sink;
  if (cudaMallocManaged(&clocks, 64 * sizeof(*clocks)) != cudaSuccess) return -1;
  if (cudaMallocManaged(&sink, 2048 * sizeof(*sink)) != cudaSuccess) return -1;
  double best = 1e30;
  for (int i = 0; i < 5; i++) {
    rate<what><<<1, warps * 128>>>(clocks, sink, 1);
    if (cudaDeviceSynchronize() != cudaSuccess) return -1;
    std::int64_t longest = 0;
    for (int w = 0; w < warps * 4; w++) longest = std::max(longest, clocks[w]);
    best = std::min(best, double(longest) / (double(kRounds) * kAtOnce * warps));
  }
  cudaFree(clocks), cudaFree(sink);
  return best;
}

}  // namespace

// Clocks of a scheduler for one instruction of kind `what` (the order of the enumeration), with `warps` (1 to 8) on each scheduler; -1 if
// the GPU would not run it.
extern "C" double elman_rate(int what, int warps) {
  switch (what) {
    case kTanh:
      return measure<kTanh>(warps);
    case kTf32:
      return measure<kTf32>(warps);
    case kBf16:
      return measure<kBf16>(warps);
    case kBf16Half:
      return measure<kBf16Half>(warps);
    case kMovmatrix:
      return measure<kMovmatrix>(warps);
    case kShuffle:
      return measure<kShuffle>(warps);
    case kLoad4:
      return measure<kLoad4>(warps);
    case kLoad8:
      return measure<kLoad8>(warps);
    case kLoad16:
      return measure<kLoad16>(warps);
  }
  return -1;
}
