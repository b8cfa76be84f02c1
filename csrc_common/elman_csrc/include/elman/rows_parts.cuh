// What rows.cuh is made of: what a launch is given, operands of tensor cores, inputs on their way.
#pragma once

#include <cuda_pipeline.h>

#include <type_traits>

#include <elman/launch.cuh>
#include <elman/matrix_state_ptx.cuh>
#include <elman/packed.cuh>

namespace elman::rows {

constexpr int kSteps = 16;  // of a segment

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
  static_assert(K % 16 == 0 && (V == 16 || V == 32) && K * V <= 1024, "what registers and shared memory hold");
  static constexpr int M = K / 16, N = V / 8, C = V / 16;  // tiles of 16 rows, a warp each; tiles of 8 columns; their pairs
  static constexpr int threads = 32 * M;
  static constexpr int parts = std::is_same_v<Elem, __nv_bfloat16> ? 1 : 2;  // bf16 numbers that make an operand
};

template <class P>
using Tile = float[P::N][4];  // 16 rows; lane (g, t) has rows g and g + 8 of columns 8 n + 2 t and + 1
template <class P>
using Left = unsigned[P::parts][4];  // of a product: 16 x 16
template <class P>
using Right = unsigned[P::parts][2];  // 16 x 8

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
  float sums[P::M][kSteps][P::V];  // each warp's share of o, or of dv
  float df[back ? P::M : 0][kSteps];
  alignas(16) uint4 history[back ? kSteps : 0][P::C][P::parts][P::threads];
};

struct Lane {
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row0 = threadIdx.x / 32 * 16;  // row0: the first of the warp
};
template <class P>
struct Place {  // of a block
  int h;
  std::int64_t bh, token0;  // token0: the first step of the row
  __device__ explicit Place(const Args<typename P::Elem>& a)
      : h(blockIdx.x % a.H), bh(blockIdx.x), token0(std::int64_t(blockIdx.x / a.H) * a.T) {}
};

// ---- products -------------------------------------------------------------------------------------------------------------------

template <int parts>
__device__ __forceinline__ void split(unsigned (&to)[parts], float x, float y) {
  float left[2] = {x, y};
#pragma unroll
  for (int p = 0; p < parts; p++) {
    float made[2];
    Storage<__nv_bfloat16>::unpack(to[p] = Storage<__nv_bfloat16>::pack(left), made);
    left[0] -= made[0], left[1] -= made[1];
  }
}
// Tiles 2 c and 2 c + 1.
template <class P>
__device__ __forceinline__ void split(Left<P>& to, const Tile<P>& x, int c) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    unsigned made[P::parts];
    split(made, x[2 * c + i / 2][i % 2 * 2], x[2 * c + i / 2][i % 2 * 2 + 1]);
#pragma unroll
    for (int p = 0; p < P::parts; p++) to[p][i] = made[p];
  }
}
template <class P>
__device__ __forceinline__ void join(Tile<P>& to, const Left<P>& from, int c) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float* pair = &to[2 * c + i / 2][i % 2 * 2];
    Storage<__nv_bfloat16>::unpack(from[0][i], pair);
    if constexpr (P::parts > 1) {
      float low[2];
      Storage<__nv_bfloat16>::unpack(from[1][i], low);
      pair[0] += low[0], pair[1] += low[1];
    }
  }
}
// As the right operand, rows and columns as they are.
template <class P>
__device__ __forceinline__ void turn(Right<P> (&to)[P::N], const Left<P> (&from)[P::C]) {
#pragma unroll
  for (int i = 0; i < P::N * P::parts * 2; i++) {
    const int n = i / (2 * P::parts), part = i / 2 % P::parts, half = i % 2;
    to[n][part][half] = matrix::transposed(from[n / 2][part][n % 2 * 2 + half]);
  }
}
// The transpose, as the left operand.
template <class P>
__device__ __forceinline__ void turn(Left<P>& to, const Left<P>& from) {
#pragma unroll
  for (int i = 0; i < 4 * P::parts; i++) to[i / 4][i % 4] = matrix::transposed(from[i / 4][i % 2 * 2 + i % 4 / 2]);
}

// c += a b; the product of two small parts is left out.
template <class P>
__device__ __forceinline__ void multiply(float (&c)[4], const Left<P>& a, const Right<P>& b) {
#pragma unroll
  for (int i = P::parts - 1; i >= 0; i--)
#pragma unroll
    for (int j = P::parts - 1 - i; j >= 0; j--) matrix::mma_16x8x16<__nv_bfloat16>(c, a[i], b[j][0], b[j][1]);
}
template <class P>
__device__ __forceinline__ void multiply(Tile<P>& c, const Left<P>& a, const Right<P> (&b)[P::N]) {
#pragma unroll
  for (int n = 0; n < P::N; n++) multiply<P>(c[n], a, b[n]);
}

// c += x y^T for the warp's elements of a key and a value: a product with one column and one row.
template <class P>
__device__ __forceinline__ void add_outer(Tile<P>& c, const typename P::Elem* x, const typename P::Elem* y, bool on, Lane at) {
  const auto bits = [&](const typename P::Elem* from) -> unsigned {
    return on && at.t == 0 ? *reinterpret_cast<const unsigned short*>(from) : 0;
  };
  const unsigned a[4] = {bits(x + at.row0 + at.g), bits(x + at.row0 + at.g + 8), 0, 0};
#pragma unroll
  for (int n = 0; n < P::N; n++) matrix::mma_16x8x16<typename P::Elem>(c[n], a, bits(y + 8 * n + at.g), 0);
}

// Two neighbours in parts; 0 unless `mine`.
template <class P>
__device__ __forceinline__ void pair(unsigned (&to)[P::parts], const typename P::Elem* from, bool mine) {
  const unsigned word = mine ? *reinterpret_cast<const unsigned*>(from) : 0;
  if constexpr (P::parts == 1) to[0] = word;
  else {
    float x[2];
    Storage<typename P::Elem>::unpack(word, x);
    split(to, x[0], x[1]);
  }
}
// The warp's 16 elements of a key as row 0 of the left operand.
template <class P>
__device__ __forceinline__ void row(Left<P>& to, const typename P::Elem* key, Lane at) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    unsigned made[P::parts];
    pair<P>(made, key + at.row0 + 8 * half + 2 * at.t, at.g == 0);
#pragma unroll
    for (int p = 0; p < P::parts; p++) to[p][2 * half] = made[p], to[p][2 * half + 1] = 0;
  }
}
// Elements 16 c … of a value as one column of the right operand.
template <class P>
__device__ __forceinline__ void column(Right<P>& to, const typename P::Elem* value, int c, int n, bool on, Lane at) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    unsigned made[P::parts];
    pair<P>(made, value + 16 * c + 8 * half + 2 * at.t, on && at.g == n);
#pragma unroll
    for (int p = 0; p < P::parts; p++) to[p][half] = made[p];
  }
}

// W or its transpose.
template <class P>
__device__ __forceinline__ void load(Right<P> (&to)[P::C][P::N], const typename P::Elem* w, bool transposed, Lane at) {
  const int along = transposed ? 1 : P::V, across = transposed ? P::V : 1;
#pragma unroll
  for (int i = 0; i < P::C * P::N * 2; i++) {
    const int c = i / (2 * P::N), n = i / 2 % P::N, half = i % 2;
    const auto* first = w + (16 * c + 8 * half + 2 * at.t) * along + (8 * n + at.g) * across;
    unsigned made[P::parts];
    split(made, decode::wide(first[0]), decode::wide(first[along]));
#pragma unroll
    for (int p = 0; p < P::parts; p++) to[c][n][p][half] = made[p];
  }
}

// ---- memory ---------------------------------------------------------------------------------------------------------------------

// Steps first … of a segment; zeros behind the end.
template <class P, int width>
__device__ __forceinline__ void fetch(typename P::Elem (*to)[width], const typename P::Elem* from, std::int64_t step, int first,
                                      int T) {
  constexpr int pieces = width / 8;
#pragma unroll
  for (int n = 0; n < (kSteps * pieces + P::threads - 1) / P::threads; n++) {
    const int i = threadIdx.x + n * P::threads, s = i / pieces, at = i % pieces * 8, t = first + s;
    if (s < kSteps) __pipeline_memcpy_async(&to[s][at], from + (t < T ? t : first) * step + at, 16, t < T ? 0 : 16);
  }
}
template <class P, bool back>
__device__ __forceinline__ void fetch(Segment<P, back>& to, const Args<typename P::Elem>& a, const Place<P>& place, int segment) {
  const int first = segment * kSteps, key = a.shared ? 0 : place.h * P::K;
  fetch<P, P::K>(to.q, a.q + place.token0 * a.q_step + key, a.q_step, first, a.T);
  fetch<P, P::K>(to.k, a.k + place.token0 * a.k_step + key, a.k_step, first, a.T);
  fetch<P, P::V>(to.v, a.v + place.token0 * a.v_step + place.h * P::V, a.v_step, first, a.T);
  if constexpr (back) {
    const std::int64_t step = std::int64_t(a.H) * P::V;
    fetch<P, P::V>(to.dy, a.dy + place.token0 * step + place.h * P::V, step, first, a.T);
  }
  __pipeline_commit();
}

// The marks of a segment, read long before they are wanted: a thread has those of one step.
template <class P>
struct Mark {
  float f = 1, live = 0;
  bool begins = false;
  __device__ __forceinline__ Mark(const Args<typename P::Elem>& a, const Place<P>& place, int segment) {
    const int t = segment * kSteps + threadIdx.x;
    if (segment < 0 || threadIdx.x >= kSteps || t >= a.T) return;
    const std::int64_t token = place.token0 + t;
    begins = a.starts && a.starts[token];
    if (a.mask && !a.mask[token]) return;
    live = 1, f = a.f[token * a.H + place.h];
  }
  __device__ __forceinline__ void put(Marks& to) const {
    const int s = threadIdx.x;
    if (s < kSteps) to.f[s] = f, to.live[s] = live, to.begins[s] = begins;
  }
};

// The warp's rows of a matrix of V columns; null: zeros.
template <class P, int tiles>
__device__ __forceinline__ void load(float (&s)[tiles][4], const float* from, Lane at) {
#pragma unroll
  for (int i = 0; i < tiles * 2; i++) {
    const int n = i / 2, half = i % 2;
    float2 x{0, 0};
    if (from) x = *reinterpret_cast<const float2*>(from + (at.row0 + 8 * half + at.g) * P::V + 8 * n + 2 * at.t);
    s[n][2 * half] = x.x, s[n][2 * half + 1] = x.y;
  }
}
template <class P>
__device__ __forceinline__ void store(float* to, const Tile<P>& s, int row0, Lane at) {
#pragma unroll
  for (int i = 0; i < P::N * 2; i++) {
    const int n = i / 2, half = i % 2;
    *reinterpret_cast<float2*>(to + (row0 + 8 * half + at.g) * P::V + 8 * n + 2 * at.t) = {s[n][2 * half], s[n][2 * half + 1]};
  }
}

// Row 0 of a product, which is a sum over the warp's rows.
template <class P>
__device__ __forceinline__ void store_row(float* to, const Tile<P>& sum, Lane at) {
#pragma unroll
  for (int n = 0; n < P::N; n++)
    if (at.g == 0) *reinterpret_cast<float2*>(to + 8 * n + 2 * at.t) = {sum[n][0], sum[n][1]};
}
// The sums of all warps, for the steps that there are.
template <class P, bool back>
__device__ __forceinline__ void write_sums(typename P::Elem* to, const Shared<P, back>& x, const Args<typename P::Elem>& a,
                                           const Place<P>& place, int first) {
#pragma unroll
  for (int n = 0; n < (kSteps * P::V + P::threads - 1) / P::threads; n++) {
    const int i = threadIdx.x + n * P::threads, s = i / P::V, v = i % P::V;
    if (s >= kSteps || first + s >= a.T) continue;
    float sum = 0;
#pragma unroll
    for (int m = 0; m < P::M; m++) sum += x.sums[m][s][v];
    to[((place.token0 + first + s) * a.H + place.h) * P::V + v] = decode::narrow<typename P::Elem>(sum);
  }
}

}  // namespace elman::rows
