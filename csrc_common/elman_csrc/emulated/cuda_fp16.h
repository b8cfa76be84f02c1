// float16, the compiler's own type.
#pragma once

#include "cuda_runtime.h"

struct __half {
  _Float16 value;
  __half() = default;
  explicit __half(float x) : value(static_cast<_Float16>(x)) {}
  explicit operator float() const { return static_cast<float>(value); }
};
struct alignas(4) __half2 {
  __half x, y;
};
inline float __half2float(__half x) { return static_cast<float>(x); }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
inline __half __float2half(float x) { return __half(x); }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half(x), __float2half(y)}; }
