// V adjacent elements of storage, moved by one instruction of V * sizeof(Elem) bytes and computed on as float.
#pragma once

#include <cstring>

#include <elman/decode_ptx.cuh>

namespace elman {

template <int bytes>
struct RawBytes;
template <>
struct RawBytes<2> {
  using type = unsigned short;
};
template <>
struct RawBytes<4> {
  using type = unsigned;
};
template <>
struct RawBytes<8> {
  using type = uint2;
};
template <>
struct RawBytes<16> {
  using type = uint4;
};

template <class Elem, int V>
struct Packed {
  static constexpr int bytes = V * sizeof(Elem), words = bytes / 4, per_word = 4 / sizeof(Elem);
  using Raw = typename RawBytes<bytes>::type;

  static __device__ __forceinline__ Raw load(const void* p) { return *static_cast<const Raw*>(p); }
  static __device__ __forceinline__ void unpack(const Raw& raw, float* x) {
    if constexpr (words == 0) {
      Elem value;
      memcpy(&value, &raw, sizeof(value));
      x[0] = decode::wide(value);
    } else {
      unsigned w[words > 0 ? words : 1];
      memcpy(w, &raw, bytes);
#pragma unroll
      for (int i = 0; i < words; ++i) Storage<Elem>::unpack(w[i], x + i * per_word);
    }
  }
  static __device__ __forceinline__ void store(Elem* p, const float* x) {
    if constexpr (words == 0) {
      *p = decode::narrow<Elem>(x[0]);
    } else {
      unsigned w[words > 0 ? words : 1];
#pragma unroll
      for (int i = 0; i < words; ++i) w[i] = Storage<Elem>::pack(x + i * per_word);
      Raw raw;
      memcpy(&raw, w, bytes);
      *reinterpret_cast<Raw*>(p) = raw;
    }
  }
};

// A [T,B,d] tensor whose channels are adjacent; strides count elements.
template <class Elem>
struct Rows {
  Elem* data;
  std::ptrdiff_t t, b;
  __device__ Elem* at(std::ptrdiff_t step, std::ptrdiff_t row) const { return data + step * t + row * b; }
};

// Whether rows can be moved in pieces of 16 bytes.
template <class Elem>
bool in_pieces(const Rows<Elem>& rows) {
  const auto pieces = [](std::ptrdiff_t bytes) { return bytes % 16 == 0; };
  return pieces(reinterpret_cast<std::ptrdiff_t>(rows.data)) && pieces(rows.t * sizeof(Elem)) && pieces(rows.b * sizeof(Elem));
}

}  // namespace elman
