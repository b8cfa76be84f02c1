// The instructions of decode_ptx.cuh, lane by lane. No kernel runs early here, so nothing waits.
#pragma once

#include "dense_ptx.cuh"

namespace elman {
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
