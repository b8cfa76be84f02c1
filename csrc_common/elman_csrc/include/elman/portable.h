// The same source is compiled twice: by nvcc for the GPU, and by g++ for tests that run on any machine.
// Cells use this header alone and are templates of the scalar type, so that the host build can run them in double.
#pragma once

#include <cmath>

#if defined(__CUDACC__)
#define ELMAN_HD __host__ __device__ __forceinline__
#else
#define ELMAN_HD inline
#endif

namespace elman {

// sigmoid(x) and sigmoid(-x) = 1 - sigmoid(x), both accurate even if the gate is nearly shut or nearly open.
template <class T>
struct Gate {
  T open, shut;
};

// The error of the hardware tanh (relative, up to 2^-11) is of bf16 order. A cell calls `Math::tanh`, and the driver chooses
// it: `Exact` for float and double, `Fast` for 16-bit storage, the same in forward and backward. `Math::sigmoid` of `Fast` uses
// that tanh; its absolute error of 2^-12 leaves a nearly shut gate without correct digits. `Math::gate` has a relative error of
// float's order in both halves (`Fast`: 1e-6 up to |x| = 16), for two operations of the special function unit. `Math::log` is
// for x > 0, within 1e-6 of log(x) or of 1.
struct Exact {
  template <class T>
  static ELMAN_HD T log(T x) {
    return ::log(x);
  }
  template <class T>
  static ELMAN_HD T tanh(T x) {
    return ::tanh(x);
  }
  template <class T>
  static ELMAN_HD T sigmoid(T x) {
    return T(1) / (T(1) + ::exp(-x));
  }
  template <class T>
  static ELMAN_HD Gate<T> gate(T x) {
    const T e = ::exp(-::fabs(x));
    T large = T(1) / (T(1) + e);
#if defined(__CUDA_ARCH__) && defined(__CUDACC__)
    // Quotient by a number from 1 to 2, without a branch; correct up to the last bit but one.
    if constexpr (sizeof(T) == sizeof(float)) large = __fdividef(1.f, 1.f + e);
#endif
    return x < T(0) ? Gate<T>{e * large, large} : Gate<T>{large, e * large};
  }
};

struct Fast {
  static ELMAN_HD float log(float x) {
#if defined(__CUDA_ARCH__) && defined(__CUDACC__)
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return 0.6931471805599453f * y;
#else
    return ::logf(x);
#endif
  }
  static ELMAN_HD float tanh(float x) {
#if defined(__CUDA_ARCH__) && defined(__CUDACC__)
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return ::tanhf(x);
#endif
  }
  static ELMAN_HD float sigmoid(float x) { return 0.5f + 0.5f * tanh(0.5f * x); }
  static ELMAN_HD Gate<float> gate(float x) {
#if defined(__CUDA_ARCH__) && defined(__CUDACC__)
    float e, open;
    asm("max.NaN.f32 %0, %0, 0fC2A00000;" : "+f"(x));  // -80: below, exp(-x) overflows, and half a gate would be infinity times 0
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(open) : "f"(1.f + e));
    return {open, e * open};
#else
    return Exact::gate(x);
#endif
  }
};

// log(1 + exp(x)); its derivative is sigmoid(x).
template <class T>
ELMAN_HD T softplus(T x) {
  return x > T(20) ? x : ::log1p(::exp(x));
}

// log(sigmoid(x)), with Math::log.
template <class Math, class T>
ELMAN_HD T log_sigmoid(T x) {
  return (x < T(0) ? x : T(0)) + Math::log(Math::gate(x < T(0) ? -x : x).open);
}

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
