// The instructions of decode_ptx.cuh, lane by lane. Nothing runs early here: there is nothing to wait for.
#pragma once

#include <elman/portable.h>

#include "matrix_state_ptx.cuh"

namespace elman {

template <class Elem>
struct Storage;
template <>
struct Storage<__nv_bfloat16> {
  using Math = Fast;
  static void unpack(unsigned v, float* x) { x[0] = __uint_as_float(v << 16), x[1] = __uint_as_float(v & 0xffff0000u); }
  static unsigned pack(const float* x) { return __float2bfloat16(x[0]).bits | unsigned(__float2bfloat16(x[1]).bits) << 16; }
};
template <>
struct Storage<__half> {
  using Math = Fast;
  static void unpack(unsigned v, float* x) { x[0] = matrix::Half::of(v, 0), x[1] = matrix::Half::of(v, 1); }
  static unsigned pack(const float* x) {
    const __half2 both = __floats2half2_rn(x[0], x[1]);
    unsigned v;
    std::memcpy(&v, &both, 4);
    return v;
  }
};

template <>
struct Storage<float> {
  using Math = Exact;
  static void unpack(unsigned v, float* x) { x[0] = __uint_as_float(v); }
  static unsigned pack(const float* x) { return __float_as_uint(x[0]); }
};

namespace decode {

using matrix::mma_16x8x16;

template <class Elem>
Elem narrow(float x) {
  const float both[2] = {x, 0};
  const unsigned v = Storage<Elem>::pack(both);
  Elem out;
  std::memcpy(&out, &v, 2);
  return out;
}
template <class Elem>
float wide(Elem x) {
  unsigned short v;
  std::memcpy(&v, &x, 2);
  float out[2];
  Storage<Elem>::unpack(v, out);
  return out[0];
}
template <>
inline float narrow<float>(float x) {
  return x;
}
template <>
inline float wide<float>(float x) {
  return x;
}
inline void let_next_begin() {}
inline void wait_for_previous() {}
inline uint4 load_fresh(const void* p) { return *static_cast<const uint4*>(p); }
inline uint4 load_once(const void* p) { return load_fresh(p); }
inline float load_fresh(const float* p) { return *p; }
inline bool load_fresh(const unsigned char* p) { return *p != 0; }
template <class Elem>
float load_fresh(const Elem* p) {
  return wide(*p);
}

}  // namespace decode
}  // namespace elman
