// bfloat16, rounded to nearest even.
#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  unsigned short bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {
    const unsigned y = __float_as_uint(x);
    bits = static_cast<unsigned short>(x != x ? 0x7fff : (y + 0x7fff + ((y >> 16) & 1)) >> 16);
  }
  explicit operator float() const { return __uint_as_float(unsigned(bits) << 16); }
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float __bfloat162float(__nv_bfloat16 x) { return static_cast<float>(x); }
inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16(x), __float2bfloat16(y)}; }
