// Add and RMS norm of few rows, one block per row. It belongs to the chain of kernels that may begin early (decode_ptx.cuh).
#pragma once

#include <elman/decode_ptx.cuh>

#include <cstddef>

namespace elman::decode {

constexpr int kNormThreads = 256, kNormEach = 8;  // each: columns per thread that are loaded together

template <class Elem>
struct NormArgs {
  const Elem *x, *weight;
  const float* residual;  // or null
  float* stream;
  Elem* out;
  std::ptrdiff_t x_step;
  int width;
  float eps;
};

// shared: the row, the gains, and a number for each warp.
inline int norm_shared_bytes(int width) { return (2 * width + kNormThreads / 32) * 4; }

template <class Elem>
__device__ __forceinline__ void norm_block(const NormArgs<Elem>& g, float* shared) {
  float *gains = shared + g.width, *sums = gains + g.width;
  const Elem* x = g.x + blockIdx.x * g.x_step;
  const std::ptrdiff_t row = static_cast<std::ptrdiff_t>(blockIdx.x) * g.width;
  let_next_begin();
#pragma unroll 8
  for (int c = threadIdx.x; c < g.width; c += kNormThreads) gains[c] = wide(g.weight[c]);
  wait_for_previous();
  float sum = 0.f;
  for (int from = threadIdx.x; from < g.width; from += kNormThreads * kNormEach) {
    float v[kNormEach], r[kNormEach];
#pragma unroll
    for (int i = 0; i < kNormEach; ++i) {
      const int c = from + i * kNormThreads;
      v[i] = c < g.width ? load_fresh(x + c) : 0.f;
      r[i] = c < g.width && g.residual ? load_fresh(g.residual + row + c) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kNormEach; ++i) {
      const int c = from + i * kNormThreads;
      v[i] += r[i];
      sum += v[i] * v[i];
      if (c < g.width) shared[c] = g.stream[row + c] = v[i];
    }
  }
  for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.f;
  for (int w = 0; w < kNormThreads / 32; ++w) sum += sums[w];
  const float scale = 1.f / sqrtf(sum / g.width + g.eps);
  for (int c = threadIdx.x; c < g.width; c += kNormThreads) g.out[row + c] = narrow<Elem>(shared[c] * scale * gains[c]);
}

}  // namespace elman::decode
