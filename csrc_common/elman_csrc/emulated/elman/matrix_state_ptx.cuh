// The instructions of matrix_state_ptx.cuh, lane by lane. tf32 operands are cut to 10 bits of mantissa, as the tensor cores do.
#pragma once

#include <type_traits>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"

namespace elman::ptx {
template <class T>
void pin(T&) {}
}  // namespace elman::ptx

namespace elman::matrix {

#define ELMAN_REGISTERS_MOVE 0
template <int>
inline void take_registers() {}
template <int>
inline void give_registers() {}
inline void prefetch_to_l2(const void*) {}
template <class T>
inline void store_if(bool mine, T* to, T x) {
  if (mine) *to = x;
}
inline void tell_barrier(int number, int threads) { emulated::tell(emulated::block->named[number], threads); }
inline void team_barrier(int number, int threads) { emulated::wait(emulated::block->named[number], threads); }

inline float tf32(unsigned x) { return __uint_as_float(x & 0xffffe000u); }
struct Bfloat {  // the lower or upper half of a word
  static float of(unsigned x, int upper) { return __uint_as_float(upper ? x & 0xffff0000u : x << 16); }
};

struct Half {
  static float of(unsigned x, int upper) {
    const unsigned short bits = upper ? x >> 16 : x;
    __half y;
    std::memcpy(&y, &bits, 2);
    return __half2float(y);
  }
};

// C += A B from the fragments of all lanes. `a(words, row, k)` and `b(words, k, column)` return an element.
template <int K, int words, class A, class B>
inline void multiply(float (&c)[4], const unsigned (&mine)[words], A a, B b) {
  const emulated::Words* all = emulated::exchange(mine, sizeof(mine));
  const int lane = emulated::block->current % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; i++) {
    double sum = 0;
    for (int k = 0; k < K; k++) sum += double(a(all, g + i / 2 * 8, k)) * b(all, k, 2 * t + i % 2);
    c[i] = static_cast<float>(c[i] + sum);
  }
}
inline void mma_tf32(float (&c)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
  const unsigned mine[6] = {__float_as_uint(a0), __float_as_uint(a1), __float_as_uint(a2),
                            __float_as_uint(a3), __float_as_uint(b0), __float_as_uint(b1)};
  multiply<8>(
      c, mine, [](const emulated::Words* w, int r, int k) { return tf32(w[r % 8 * 4 + k % 4][r / 8 + k / 4 * 2]); },
      [](const emulated::Words* w, int k, int n) { return tf32(w[n * 4 + k % 4][4 + k / 4]); });
}
inline void mma_tf32(float& c0, float& c1, float& c2, float& c3, float a0, float a1, float b) {
  float c[4] = {c0, c1, c2, c3};
  const unsigned mine[3] = {__float_as_uint(a0), __float_as_uint(a1), __float_as_uint(b)};
  multiply<4>(
      c, mine, [](const emulated::Words* w, int r, int k) { return tf32(w[r % 8 * 4 + k][r / 8]); },
      [](const emulated::Words* w, int k, int n) { return tf32(w[n * 4 + k][2]); });
  c0 = c[0], c1 = c[1], c2 = c[2], c3 = c[3];
}
inline float cut_off(float x) { return x - tf32(__float_as_uint(x)); }
template <class Elem>
inline void mma_16x8x16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  using Element = std::conditional_t<std::is_same_v<Elem, __half>, Half, Bfloat>;
  const unsigned mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  multiply<16>(
      c, mine,
      [](const emulated::Words* w, int r, int k) { return Element::of(w[r % 8 * 4 + k % 8 / 2][r / 8 + k / 8 * 2], k % 2); },
      [](const emulated::Words* w, int k, int n) { return Element::of(w[n * 4 + k % 8 / 2][4 + k / 8], k % 2); });
}
template <class Elem>
inline void mma_16x8x8(float (&c)[4], const unsigned (&a)[2], unsigned b) {
  using Element = std::conditional_t<std::is_same_v<Elem, __half>, Half, Bfloat>;
  const unsigned mine[3] = {a[0], a[1], b};
  multiply<8>(
      c, mine, [](const emulated::Words* w, int r, int k) { return Element::of(w[r % 8 * 4 + k / 2][r / 8], k % 2); },
      [](const emulated::Words* w, int k, int n) { return Element::of(w[n * 4 + k / 2][2], k % 2); });
}
inline unsigned transposed(unsigned x) {
  const emulated::Words* all = emulated::exchange(&x, 4);
  const int lane = emulated::block->current % 32, g = lane / 4, t = lane % 4;
  const int shift = g % 2 * 16;
  return (all[2 * t * 4 + g / 2][0] >> shift & 0xffff) | (all[(2 * t + 1) * 4 + g / 2][0] >> shift & 0xffff) << 16;
}
inline void store_matrices(uint4* to, const unsigned (&x)[4]) {
  emulated::aligned(to, 16);
  const int lane = emulated::block->current % 32;
  for (int i = 0; i < 4; i++) reinterpret_cast<unsigned*>(to - lane)[32 * i + lane] = x[i];
}
template <bool transposed>
inline void load_matrices(unsigned (&x)[4], const uint4* from) {
  emulated::aligned(from, 16);
  const emulated::Words* all = emulated::exchange(&from, sizeof(from));
  const int lane = emulated::block->current % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; i++) {
    x[i] = 0;
    for (int half = 0; half < 2; half++) {
      const unsigned short* line;
      std::memcpy(&line, all[8 * i + (transposed ? 2 * t + half : g)], sizeof(line));
      x[i] |= unsigned(line[transposed ? g : 2 * t + half]) << 16 * half;
    }
  }
}

}  // namespace elman::matrix
