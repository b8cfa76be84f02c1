// Parts of rows.cuh: arguments of a launch, tensor-core operands, prefetched inputs.
#pragma once

#include <cuda_pipeline.h>

#include <type_traits>

#include <elman/launch.cuh>
#include <elman/matrix_state_ptx.cuh>
#include <elman/packed.cuh>

namespace elman::rows {

constexpr int kSteps = 16, kGroup = 8;  // steps of a segment; steps whose inputs are in registers together

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
  static constexpr int M = K / 16, N = V / 8, C = V / 16;  // tiles of 16 rows, one per warp; tiles of 8 columns; pairs of those
  static constexpr int threads = 32 * M;
  static constexpr int parts = std::is_same_v<Elem, __nv_bfloat16> ? 1 : 2;  // bf16 numbers of an operand: hi, or hi + lo
  static constexpr bool small = C * parts == 1;  // two steps of the backward fit the registers at once
  static constexpr int blocks =
      M == 4 && parts == 1 ? 4 : 1;  // minimum of the backward's blocks per multiprocessor; the forward has twice as many
};

template <class P>
using Tile = float[P::N][4];  // 16 rows; lane (g, t) has rows g and g + 8 of columns 8 n + 2 t and + 1
template <class P>
using Left = unsigned[P::parts][4];  // left operand: 16 x 16
template <class P>
using Right = unsigned[P::parts][2];  // right operand: 16 x 8

struct Lane {
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row0 = threadIdx.x / 32 * 16;  // row0: the warp's first row
};
struct Marks {
  float f[kSteps];        // 1 where the state is held
  unsigned live, begins;  // a bit per step. live: 0 where held and after the end. begins: 1 where a document begins
};
template <class P, bool back>
struct Segment {  // lines are padded so that eight of them begin in different banks
  using Elem = typename P::Elem;
  alignas(16) Elem q[kSteps][P::K + 8];
  alignas(16) Elem k[kSteps][P::K + 8];
  alignas(16) Elem v[kSteps][P::V + 8];
  alignas(16) Elem dy[back ? kSteps : 0][P::V + 8];
};
template <class P, bool back>
struct Shared {
  Segment<P, back> x[2];
  Marks marks;
  alignas(16) float shares[back ? P::M : 0][kGroup][32];  // each lane's share of df
  float df[back ? P::M : 0][kSteps];
  float forward_sums[back ? 0 : P::M][kSteps][P::V + 4];
  // Operands. Backward: the states before the steps of a segment. Scratch for transposes: two tiles forward, two more backward.
  alignas(16) uint4 history[P::M][back ? kSteps + 2 : 2][P::C][P::parts][32];

  __device__ __forceinline__ void put(const Left<P> (&state)[P::C], int step, Lane at) {
#pragma unroll
    for (int n = 0; n < P::C * P::parts; n++)
      matrix::store_matrices(&history[at.row0 / 16][step][n / P::parts][n % P::parts][at.lane], state[n / P::parts][n % P::parts]);
  }
  __device__ __forceinline__ void get(Left<P>& to, int step, int c, Lane at) const {
#pragma unroll
    for (int p = 0; p < P::parts; p++) matrix::load_matrices<false>(to[p], &history[at.row0 / 16][step][c][p][at.lane]);
  }
  // Columns 16 c …, transposed: a left operand, or two right operands.
  __device__ __forceinline__ void turned(Left<P>& to, int step, int c, Lane at) const {
    const int line = at.lane ^ (at.lane / 8 % 3 ? 24 : 0);  // tiles 1 and 2 change places
#pragma unroll
    for (int p = 0; p < P::parts; p++) matrix::load_matrices<true>(to[p], &history[at.row0 / 16][step][c][p][line]);
  }
  __device__ __forceinline__ void turned(Right<P> (&to)[P::N], int step, int c, Lane at) const {
#pragma unroll
    for (int p = 0; p < P::parts; p++) {
      unsigned made[4];
      matrix::load_matrices<true>(made, &history[at.row0 / 16][step][c][p][at.lane]);
#pragma unroll
      for (int i = 0; i < 4; i++) to[2 * c + i / 2][p][i % 2] = made[i];
    }
  }

  // A warp's share of o or dv at a step. dv overwrites the states of its group, except the first.
  __device__ __forceinline__ float* sums(int m, int step) {
    if constexpr (back) return reinterpret_cast<float*>(history[m][step / kGroup * kGroup + 1]) + step % kGroup * (P::V + 4);
    else return forward_sums[m][step];
  }
};

template <class P>
struct Place {  // a block's place
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
// c += a b, without the product of the two low parts.
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

// ---- eight steps at once --------------------------------------------------------------------------------------------------------
// Their inputs lie in registers in one of two forms. Columns: a step is a column of a right operand and of the product; each step multiplies all eight
// columns and keeps its own. Slots: a step is a line of the inner dimension. All other slots are blanked in both operands, because 0 times infinity
// in only one of them would carry NaN to another step.

// Two neighbours of step `at.g`, from element 8 n on.
template <class Elem, int stride>
__device__ __forceinline__ unsigned word(const Elem (*from)[stride], int first, int n, Lane at) {
  return *reinterpret_cast<const unsigned*>(&from[at.g][first + 8 * n + 2 * at.t]);
}
template <class P, int tiles, int stride>
__device__ __forceinline__ void columns(Right<P> (&to)[tiles], const typename P::Elem (*from)[stride], int first, Lane at) {
#pragma unroll
  for (int n = 0; n < 2 * tiles; n++) {
    unsigned made[P::parts] = {word(from, first, n, at)};
    if constexpr (P::parts > 1) {
      float x[2];
      Storage<typename P::Elem>::unpack(made[0], x);
      split(made, x[0], x[1]);
    }
#pragma unroll
    for (int p = 0; p < P::parts; p++) to[n / 2][p][n % 2] = made[p];
  }
}
template <int octets, class Elem, int stride>
__device__ __forceinline__ void slots(unsigned (&to)[octets], const Elem (*from)[stride], int first, Lane at) {
#pragma unroll
  for (int n = 0; n < octets; n++) to[n] = matrix::transposed(word(from, first, n, at));
}
// The lane's part of step n's slot; zeros if n is -1.
__device__ __forceinline__ unsigned slot(int n, Lane at) { return at.t != n >> 1 ? 0 : n & 1 ? 0xffff0000u : 0xffffu; }
// c += x y^T for one step's key and value.
template <class P>
__device__ __forceinline__ void add_outer(Tile<P>& c, const unsigned (&x)[2], const unsigned (&y)[P::N], unsigned slot) {
  const unsigned a[2] = {x[0] & slot, x[1] & slot};
#pragma unroll
  for (int n = 0; n < P::N; n++) matrix::mma_16x8x8<typename P::Elem>(c[n], a, y[n] & slot);
}
// Keeps column j of a product, in the lanes that have it (`mine`).
__device__ __forceinline__ void keep(float (&to)[4], const float (&made)[4], int j, bool mine) {
#pragma unroll
  for (int e = 0; e < 4; e++) to[e] = mine && e % 2 == (j & 1) ? made[e] : to[e];
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

// Steps first … of a segment; zeros after the end.
template <class P, int width>
__device__ __forceinline__ void fetch(typename P::Elem (*to)[width + 8], const typename P::Elem* from, std::int64_t step, int first,
                                      int T) {
  constexpr int pieces = width / 8;
  unsigned thread = threadIdx.x;
  ptx::pin(thread);  // recomputes addresses where they are used: registers are scarce
#pragma unroll
  for (int n = 0; n < (kSteps * pieces + P::threads - 1) / P::threads; n++) {
    const int i = thread + n * P::threads, s = i / pieces, at = i % pieces * 8, t = first + s;
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

// The marks of a segment, read long before their use. A thread has those of one step.
template <class P>
struct Mark {
  float f = 1;
  bool live = false, begins = false;
  __device__ __forceinline__ Mark(const Args<typename P::Elem>& a, const Place<P>& place, int segment) {
    const int t = segment * kSteps + threadIdx.x;
    if (segment < 0 || threadIdx.x >= kSteps || t >= a.T) return;
    const std::int64_t token = place.token0 + t;
    begins = a.starts && a.starts[token];
    if (a.mask && !a.mask[token]) return;
    live = true, f = a.f[token * a.H + place.h];
  }
  __device__ __forceinline__ void put(Marks& to) const {
    if (threadIdx.x >= 32) return;
    const unsigned lives = __ballot_sync(~0u, live), all = __ballot_sync(~0u, begins);
    if (threadIdx.x < kSteps) to.f[threadIdx.x] = f;
    if (threadIdx.x == 0) to.live = lives, to.begins = all;
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

// Stores the warp's rows as columns of a matrix of V rows.
template <class P>
__device__ __forceinline__ void store_turned(float* to, const Tile<P>& s, int row0, Lane at) {
#pragma unroll
  for (int i = 0; i < P::N * 4; i++) to[(8 * (i / 4) + 2 * at.t + i % 2) * P::V + row0 + 8 * (i % 4 / 2) + at.g] = s[i / 4][i % 4];
}

// Stores eight steps' sums over the warp's rows.
template <class P>
__device__ __forceinline__ void store_sums(float* to, const float (&sum)[P::C][4], Lane at) {
#pragma unroll
  for (int i = 0; i < P::C * 4; i++)
    to[(2 * at.t + i % 2) * (P::V + 4) + 16 * (i / 4) + 8 * (i % 4 / 2) + at.g] = sum[i / 4][i % 4];
}
// Stores the sums over all warps, for the steps that exist.
template <class P, bool back>
__device__ __forceinline__ void write_sums(typename P::Elem* to, Shared<P, back>& x, const Args<typename P::Elem>& a,
                                           const Place<P>& place, int first) {
  constexpr int pairs = P::V / 2;
  unsigned thread = threadIdx.x;
  ptx::pin(thread);
#pragma unroll
  for (int n = 0; n < (kSteps * pairs + P::threads - 1) / P::threads; n++) {
    const int i = thread + n * P::threads, s = i / pairs, v = i % pairs * 2;
    if (s >= kSteps || first + s >= a.T) continue;
    float sum[2] = {};
#pragma unroll
    for (int m = 0; m < P::M; m++) {
      const float2 made = *reinterpret_cast<const float2*>(x.sums(m, s) + v);
      sum[0] += made.x, sum[1] += made.y;
    }
    *reinterpret_cast<unsigned*>(to + ((place.token0 + first + s) * a.H + place.h) * P::V + v) =
        Storage<typename P::Elem>::pack(sum);
  }
}

// Stores the warp's 16 rows of dq or dk: each lane two neighbours of step `at.g`, if the step exists (`there`).
template <class P>
__device__ __forceinline__ void store_keys(typename P::Elem* to, const float (&x)[4], bool there) {
  const unsigned low = matrix::transposed(Storage<typename P::Elem>::pack(x)),
                 high = matrix::transposed(Storage<typename P::Elem>::pack(x + 2));
  if (there) reinterpret_cast<unsigned*>(to)[0] = low, reinterpret_cast<unsigned*>(to)[4] = high;
}

}  // namespace elman::rows
