// Numbers of the matrix-state skeleton: storage types to and from fp32, and vectors in memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include <elman/matrix_state_ptx.cuh>

namespace elman::matrix {

using bf16 = __nv_bfloat16;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return __float2bfloat16(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half(x);
}

// The tensor cores cut fp32 operands to tf32's 10 bits of mantissa. The average loss is ln 2 / 2 of a unit in the last place; this factor corrects it.
// (Rounding first would cost three instructions per element.)
constexpr float kUncut = 1.000338f;

constexpr int largest_power(int bytes, int cap) {  // the widest access that divides `bytes`
  int p = cap;
  while (bytes % p) p /= 2;
  return p;
}

template <int E, class T>
struct alignas(largest_power(E* int(sizeof(T)), 16)) Vec {
  T x[E];
};
template <int E, class T>
__device__ __forceinline__ void load(float (&f)[E], const T* p) {
  const Vec<E, T> v = *reinterpret_cast<const Vec<E, T>*>(p);
#pragma unroll
  for (int i = 0; i < E; i++) f[i] = to_float(v.x[i]);
}
__device__ __forceinline__ unsigned pack(float low, float high, bf16) {
  const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&x);
}
__device__ __forceinline__ unsigned pack(float low, float high, __half) {
  const __half2 x = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&x);
}
__device__ __forceinline__ float unpack(unsigned x, int upper, bf16) { return __uint_as_float(upper ? x & 0xffff0000u : x << 16); }
__device__ __forceinline__ float unpack(unsigned x, int upper, __half) {
  const __half2 both = *reinterpret_cast<const __half2*>(&x);
  return __half2float(upper ? both.y : both.x);
}
// Like `load`. For sixteen steps at once, 16-bit types are read as words, which saves an instruction for each upper half.
template <class P, int E, class T>
__device__ __forceinline__ void load_stored(float (&f)[E], const T* p) {
  if constexpr (P::blocked && E % 2 == 0) {
    const auto v = *reinterpret_cast<const Vec<E / 2, unsigned>*>(p);
#pragma unroll
    for (int i = 0; i < E; i++) f[i] = unpack(v.x[i / 2], i % 2, T());
  } else {
    load<E>(f, p);
  }
}
template <int E, class T>
__device__ __forceinline__ void store(T* p, const float (&f)[E]) {
  if constexpr (sizeof(T) == 2 && E % 2 == 0) {  // as words: the compiler may store halves one by one
    Vec<E / 2, unsigned> v;
#pragma unroll
    for (int i = 0; i < E; i += 2) v.x[i / 2] = pack(f[i], f[i + 1], T());
    *reinterpret_cast<Vec<E / 2, unsigned>*>(p) = v;
  } else {
    Vec<E, T> v;
#pragma unroll
    for (int i = 0; i < E; i++) v.x[i] = from_float<T>(f[i]);
    *reinterpret_cast<Vec<E, T>*>(p) = v;
  }
}

template <int L>
__device__ __forceinline__ float line_sum(float x) {
#pragma unroll
  for (int m = 1; m < L; m *= 2) x += __shfl_xor_sync(~0u, x, m);
  return x;
}

template <int R>
__device__ __forceinline__ float dot(const float (&a)[R], const float (&b)[R]) {
  float x = a[0] * b[0], y = 0;
#pragma unroll
  for (int i = 1; i < R; i++) {
    if (i & 1) y = i == 1 ? a[i] * b[i] : fmaf(a[i], b[i], y);
    else x = fmaf(a[i], b[i], x);
  }
  return R > 1 ? x + y : x;
}

// Returns x, hidden from the compiler, which then recomputes values that depend on x after this call instead of keeping them in registers.
__device__ __forceinline__ int afresh(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace elman::matrix
