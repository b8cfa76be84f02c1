// bfloat16, rounded to nearest even.
#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  unsigned short bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16(float x) {
  unsigned y = __float_as_uint(x);
  if (x != x) return {0x7fff};
  y += 0x7fff + ((y >> 16) & 1);
  return {static_cast<unsigned short>(y >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16(x), __float2bfloat16(y)}; }
