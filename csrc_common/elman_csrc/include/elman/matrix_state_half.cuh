// Sums over a line with the state as float16: one m16n8k16 where tf32 needs two m16n8k8, and rounded to nearest instead of cut, at the
// same 10 bits of mantissa. Only where a tanh bounds the state. The carried state, its update and what is saved stay float32.
//
// Lane (g, t) with two lines a lane: A(g, .) is line g, A(g + 8, .) line g + 8, of rows row_of(t, 0 .. 3) for a tile of 16. With one line
// a lane A(g, .) is the lower half of its rows and A(g + 8, .) the upper one; even columns of B carry k of the lower half, odd ones
// of the upper.
#pragma once

#include "matrix_state_args.cuh"

namespace elman::matrix {

__device__ __forceinline__ unsigned pack_half(float low, float high) {
  const __half2 x = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&x);
}

template <class P>
struct HalfB {  // a lane's part of B: pairs of rows
  static constexpr int pairs = P::half ? P::R / (P::M == 2 ? 2 : 4) : 1;
  unsigned x[pairs];
};
// `row`: a step's k or q, as float16.
template <class P>
__device__ __forceinline__ void load_half_b(HalfB<P>& b, const __half* row, int t, int odd) {
  constexpr int pairs = HalfB<P>::pairs;
  static_assert(P::VW == 4);
  if constexpr (P::M == 1 && pairs == 1) {
    b.x[0] = *reinterpret_cast<const unsigned*>(row + 4 * t + 2 * odd);
  } else {
#pragma unroll
    for (int j = 0; j < pairs; j += 2) {
      const uint2 y = *reinterpret_cast<const uint2*>(row + ((P::M == 1 ? odd : j / 2) * 4 + t) * 4);
      b.x[j] = y.x, b.x[j + 1] = y.y;
    }
  }
}

// In one accumulator: c[2 m + column] is the sum of line g + 8 m with two lines a lane, c[0] + c[3] with one.
template <class P>
__device__ __forceinline__ void half_products(float (&c)[4], const float (&S)[P::E], const HalfB<P>& b) {
  c[0] = c[1] = c[2] = c[3] = 0;
  auto pair = [&](int m, int i) { return pack_half(S[P::element(m, i)], S[P::element(m, i + 1)]); };
  if constexpr (P::M == 2) {
#pragma unroll
    for (int i = 0; i < P::R; i += 4) {
      const unsigned a[4] = {pair(0, i), pair(1, i), pair(0, i + 2), pair(1, i + 2)};
      mma_half(c, a, b.x[i / 2], b.x[i / 2 + 1]);
    }
  } else if constexpr (P::R == 4) {
    mma_half_k8(c, pair(0, 0), pair(0, 2), b.x[0]);
  } else {
    const unsigned a[4] = {pair(0, 0), pair(0, 4), pair(0, 2), pair(0, 6)};
    mma_half(c, a, b.x[0], b.x[1]);
  }
}

}  // namespace elman::matrix
