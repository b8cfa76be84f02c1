// What rows.cuh is made of: what a launch is given, operands of tensor cores, inputs on their way, sums over lanes.
#pragma once

#include <cuda_pipeline.h>

#include <type_traits>

#include <elman/launch.cuh>
#include <elman/matrix_state_ptx.cuh>
#include <elman/packed.cuh>

namespace elman::rows {

constexpr int kSteps = 16;  // of a segment
constexpr int kParts = 2;  // of S and of P

template <class Elem>
struct Args {
  int T, H;
  bool shared;
  const Elem *q, *k, *v;
  std::int64_t q_step, k_step, v_step;
  const float* f;
  const Elem* w;
  const unsigned char *mask, *starts;
  const float* s0;
  float *s1, *saved;
  Elem* o;
  const Elem* dy;
  const float* ds1;
  float* ds0;
  Elem *dq, *dk, *dv;
  float *df, *dw;
};

template <class Elem_, int K_, int V_>
struct Plan {
  using Elem = Elem_;
  static constexpr int K = K_, V = V_;
  static_assert(K % 16 == 0 && (V == 16 || V == 32) && K * V <= 1024, "what the registers of a warp hold");
  static constexpr int M = K / 16, N = V / 8, C = V / 16;  // tiles of 16 rows, tiles of 8 columns, their pairs
  static constexpr int exact = std::is_same_v<Elem, __nv_bfloat16> ? 1 : 2;  // parts of W and of what dW sums
  static constexpr int together = 4 / N;  // steps whose sums over rows are made at once
};

template <class P>
using Tile = float[P::N][4];  // 16 rows; lane (g, t) has rows g and g + 8 of columns 8 n + 2 t and + 1
template <int parts>
using Operand = unsigned[parts][4];  // 16 x 16, the left one of a product

struct Marks {  // of each step. f: 1 where the state is held. live: 0 there, and behind the end. begins: a document, at 0
  float f[kSteps], live[kSteps];
  bool begins[kSteps];
};
template <class P, bool back>
struct Segment {
  using Elem = typename P::Elem;
  alignas(16) Elem q[kSteps][P::K];
  alignas(16) Elem k[kSteps][P::K];
  alignas(16) Elem v[kSteps][P::V];
  alignas(16) Elem dy[back ? kSteps : 0][P::V];
};
template <class P, bool back>
struct Shared {
  Segment<P, back> x[2];
  Marks marks;
  alignas(16) uint4 history[back ? kSteps : 0][P::M][P::C][P::exact][32];
};

struct Lane {
  int lane = threadIdx.x, g = lane / 4, t = lane % 4;
};
template <class P>
struct Place {  // of a warp
  int h;
  std::int64_t bh, token0;  // the first step of the row
  __device__ explicit Place(const Args<typename P::Elem>& a)
      : h(blockIdx.x % a.H), bh(blockIdx.x), token0(std::int64_t(blockIdx.x / a.H) * a.T) {}
};

// ---- products -------------------------------------------------------------------------------------------------------------------

// Tiles 2 c and 2 c + 1, rounded part by part.
template <int parts, int N>
__device__ __forceinline__ void split(Operand<parts>& to, const float (&x)[N][4], int c) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float left[2] = {x[2 * c + i / 2][i % 2 * 2], x[2 * c + i / 2][i % 2 * 2 + 1]};
#pragma unroll
    for (int p = 0; p < parts; p++) {
      to[p][i] = Storage<__nv_bfloat16>::pack(left);
      float made[2];
      Storage<__nv_bfloat16>::unpack(to[p][i], made);
      left[0] -= made[0], left[1] -= made[1];
    }
  }
}

// What the parts of an operand add up to.
template <int parts, int N>
__device__ __forceinline__ void join(float (&to)[N][4], const Operand<parts>& from, int c) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float* pair = &to[2 * c + i / 2][i % 2 * 2];
    Storage<__nv_bfloat16>::unpack(from[0][i], pair);
    if constexpr (parts > 1) {
      float low[2];
      Storage<__nv_bfloat16>::unpack(from[1][i], low);
      pair[0] += low[0], pair[1] += low[1];
    }
  }
}

// c += a b; products of two small parts are left out.
template <int left, int right, int N>
__device__ __forceinline__ void multiply(float (&c)[N][4], const Operand<left>& a, const unsigned (&b)[N][right][2]) {
#pragma unroll
  for (int i = left - 1; i >= 0; i--)
#pragma unroll
    for (int j = right - 1; j >= 0; j--)
#pragma unroll
      for (int n = 0; n < N; n++)
        if (i + j < (left > right ? left : right)) matrix::mma_16x8x16<__nv_bfloat16>(c[n], a[i], b[n][j][0], b[n][j][1]);
}

// W or its transpose as the right operand.
template <class P>
struct Weights {
  unsigned b[P::C][P::N][P::exact][2];
  __device__ __forceinline__ void load(const typename P::Elem* w, bool transposed, Lane at) {
    const int along = transposed ? 1 : P::V, across = transposed ? P::V : 1;
#pragma unroll
    for (int c = 0; c < P::C; c++)
#pragma unroll
      for (int n = 0; n < P::N; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const auto* first = w + (16 * c + 8 * half + 2 * at.t) * along + (8 * n + at.g) * across;
          float left[2] = {decode::wide(first[0]), decode::wide(first[along])};
#pragma unroll
          for (int p = 0; p < P::exact; p++) {
            float made[2];
            Storage<__nv_bfloat16>::unpack(b[c][n][p][half] = Storage<__nv_bfloat16>::pack(left), made);
            left[0] -= made[0], left[1] -= made[1];
          }
        }
  }
};

// ---- inputs ---------------------------------------------------------------------------------------------------------------------

// Steps first … of a segment; zeros behind the end.
template <int width, class Elem>
__device__ __forceinline__ void fetch(Elem (*to)[width], const Elem* from, std::int64_t step, int first, int T, int lane) {
  constexpr int of_piece = 16 / sizeof(Elem), pieces = width / of_piece;
  static_assert(kSteps * pieces % 32 == 0, "as many for every lane");
#pragma unroll
  for (int i = lane; i < lane + kSteps * pieces; i += 32) {
    const int s = i / pieces, at = i % pieces * of_piece, t = first + s;
    __pipeline_memcpy_async(&to[s][at], from + (t < T ? t : first) * step + at, 16, t < T ? 0 : 16);
  }
}
template <class P, bool back>
__device__ __forceinline__ void fetch(Segment<P, back>& to, const Args<typename P::Elem>& a, const Place<P>& place, int segment,
                                      int lane) {
  const int first = segment * kSteps, key = a.shared ? 0 : place.h * P::K;
  fetch<P::K>(to.q, a.q + place.token0 * a.q_step + key, a.q_step, first, a.T, lane);
  fetch<P::K>(to.k, a.k + place.token0 * a.k_step + key, a.k_step, first, a.T, lane);
  fetch<P::V>(to.v, a.v + place.token0 * a.v_step + place.h * P::V, a.v_step, first, a.T, lane);
  if constexpr (back) {
    const std::int64_t step = std::int64_t(a.H) * P::V;
    fetch<P::V>(to.dy, a.dy + place.token0 * step + place.h * P::V, step, first, a.T, lane);
  }
  __pipeline_commit();
}

// The marks of a segment, read long before they are wanted: a lane has those of one step.
template <class P>
struct Mark {
  float f = 1, live = 0;
  bool begins = false;
  __device__ __forceinline__ Mark(const Args<typename P::Elem>& a, const Place<P>& place, int segment, int lane) {
    const int t = segment * kSteps + lane;
    if (segment < 0 || lane >= kSteps || t >= a.T) return;
    const std::int64_t token = place.token0 + t;
    begins = a.starts && a.starts[token];
    if (a.mask && !a.mask[token]) return;
    live = 1, f = a.f[token * a.H + place.h];
  }
  __device__ __forceinline__ void put(Marks& to, int lane) const {
    if (lane < kSteps) to.f[lane] = f, to.live[lane] = live, to.begins[lane] = begins;
  }
};

template <class P>
__device__ __forceinline__ void columns(float (&to)[P::N][2], const typename P::Elem* from, Lane at) {
#pragma unroll
  for (int n = 0; n < P::N; n++)
    Storage<typename P::Elem>::unpack(*reinterpret_cast<const unsigned*>(from + 8 * n + 2 * at.t), to[n]);
}
template <class P>
__device__ __forceinline__ void rows_of(float (&to)[2], const typename P::Elem* from, int m, Lane at) {
  to[0] = decode::wide(from[16 * m + at.g]), to[1] = decode::wide(from[16 * m + at.g + 8]);
}

template <class P>
__device__ __forceinline__ void outer(Tile<P>& to, const float (&k)[2], const float (&v)[P::N][2]) {
#pragma unroll
  for (int n = 0; n < P::N; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) to[n][e] = k[e / 2] * v[n][e % 2];
}

// The state as [K,V] in memory.
template <class P>
__device__ __forceinline__ void load(Tile<P> (&s)[P::M], const float* from, Lane at) {
#pragma unroll
  for (int i = 0; i < P::M * P::N * 2; i++) {
    const int m = i / (2 * P::N), n = i / 2 % P::N, half = i % 2;
    float2 x{0, 0};
    if (from) x = *reinterpret_cast<const float2*>(from + (16 * m + 8 * half + at.g) * P::V + 8 * n + 2 * at.t);
    s[m][n][2 * half] = x.x, s[m][n][2 * half + 1] = x.y;
  }
}
template <class P, int M>
__device__ __forceinline__ void store(float* to, const Tile<P> (&s)[M], Lane at) {
#pragma unroll
  for (int i = 0; i < M * P::N * 2; i++) {
    const int m = i / (2 * P::N), n = i / 2 % P::N, half = i % 2;
    *reinterpret_cast<float2*>(to + (16 * m + 8 * half + at.g) * P::V + 8 * n + 2 * at.t) = {s[m][n][2 * half],
                                                                                             s[m][n][2 * half + 1]};
  }
}

// ---- sums over lanes --------------------------------------------------------------------------------------------------------------

// Sums of `count` numbers over lanes that differ in log2(count) bits of their number, from `bit` down: each gets the sum that these bits spell.
template <int count>
__device__ __forceinline__ float add_over(float (&x)[count], int lane, int bit) {
#pragma unroll
  for (int half = count / 2; half > 0; half /= 2, bit /= 2)
#pragma unroll
    for (int i = 0; i < half; i++) {
      const bool upper = lane & bit;
      const float mine = upper ? x[i + half] : x[i], other = upper ? x[i] : x[i + half];
      x[i] = mine + __shfl_xor_sync(~0u, other, bit);
    }
  return x[0];
}
__device__ __forceinline__ float add_over_warp(float x) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) x += __shfl_xor_sync(~0u, x, bit);
  return x;
}

// Sums over rows of `together` steps: [step][n][0 or 1]. A lane writes one, where its step is there.
template <class P>
__device__ __forceinline__ void write_columns(typename P::Elem* to, float (&sums)[8], const Args<typename P::Elem>& a,
                                              const Place<P>& place, int t, Lane at) {
  const float sum = add_over(sums, at.lane, 16);
  t += at.g / (2 * P::N);
  const int column = 8 * (at.g / 2 % P::N) + 2 * at.t + at.g % 2;
  if (t < a.T) to[((place.token0 + t) * a.H + place.h) * P::V + column] = decode::narrow<typename P::Elem>(sum);
}

}  // namespace elman::rows
