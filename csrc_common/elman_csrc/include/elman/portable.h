// The same source is compiled twice: by nvcc for the GPU, and by g++ for the tests that run on any machine.
// Cells are written against this header alone, templated on the scalar type, so that the host build can run them in double.
#pragma once

#include <cmath>

#if defined(__CUDACC__)
#define ELMAN_HD __host__ __device__ __forceinline__
#else
#define ELMAN_HD inline
#endif

namespace elman {

// The hardware tanh (relative error up to 2^-11) is of bf16 order. A cell asks for `Math::tanh`; the driver decides which
// one that is: `Exact` for float and double, `Fast` for 16-bit storage. The backward uses the same one as the forward.
struct Exact {
  template <class T>
  static ELMAN_HD T tanh(T x) {
    return ::tanh(x);
  }
  template <class T>
  static ELMAN_HD T sigmoid(T x) {
    return T(1) / (T(1) + ::exp(-x));
  }
};

struct Fast {
  static ELMAN_HD float tanh(float x) {
#if defined(__CUDA_ARCH__)
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return ::tanhf(x);
#endif
  }
  static ELMAN_HD float sigmoid(float x) { return 0.5f + 0.5f * tanh(0.5f * x); }
};

// silu(x) = x sigmoid(x) and its derivative, with s = sigmoid(x) computed once by the caller.
template <class T>
ELMAN_HD T silu(T x, T s) {
  return x * s;
}
template <class T>
ELMAN_HD T silu_derivative(T x, T s) {
  return s * (T(1) + x * (T(1) - s));
}

// The self-gate g(h) = h silu(h) = h^2 sigmoid(h) and its derivative, with s = sigmoid(h).
template <class T>
ELMAN_HD T self_gate(T h, T s) {
  return h * h * s;
}
template <class T>
ELMAN_HD T self_gate_derivative(T h, T s) {
  return h * s * (T(2) + h * (T(1) - s));
}

}  // namespace elman
