// float16, as the compiler has it.
#pragma once

#include "cuda_runtime.h"

struct __half {
  _Float16 value;
};
inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline __half __float2half(float x) { return {static_cast<_Float16>(x)}; }
