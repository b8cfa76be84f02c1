// A matrix state whose rows share one matrix. For every head, with a state S [K,V] and W [V,V],
//
//   Z_t = tanh(S_{t-1} W + k_t v_t^T)      S_t = f_t S_{t-1} + (1 - f_t) Z_t      o_t = S_t^T q_t
//
// and, walking back, with dS arriving from step t+1 and do given,
//
//   dS += q do^T    dq = S_t do    df = <dS, S_{t-1} - Z>    P = (1 - f) dS (1 - Z^2)
//   dk = P v        dv = P^T k     dW += S_{t-1}^T P         dS_{t-1} = f dS + P W^T
//
// Rows of S never meet, so they are the rows of a tensor core's tile. One warp has a head of one row of the batch for all time, with S, W, W^T
// and the sum dW in registers: an accumulator of one product, packed, is the left operand of the next, and nothing crosses lanes.
// Operands are bf16 in parts, x = hi + lo: two parts of S and P carry 16 digits, W has as many parts as its storage needs.
// Every 16 steps the state is saved in fp32; the backward replays a segment into shared memory, as the operands that it will want.
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
  for (int i = lane; i < kSteps * pieces; i += 32) {
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

// Sums of `count` numbers over the lanes that differ in the bits below `bit` and above bit / count; a lane gets one of them, that of its bits.
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

// ---- a step -----------------------------------------------------------------------------------------------------------------------

// S = f S + (1 - f) Z, where S comes in parts, too.
template <class P, int parts>
__device__ __forceinline__ void step(Tile<P>& s, const Operand<parts> (&a)[P::C], const Weights<P>& w, const float (&k)[2],
                                     const float (&v)[P::N][2], float f) {
  Tile<P> z;
  outer<P>(z, k, v);
#pragma unroll
  for (int c = 0; c < P::C; c++) multiply(z, a[c], w.b[c]);
#pragma unroll
  for (int n = 0; n < P::N; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) s[n][e] = f * s[n][e] + (1 - f) * Fast::tanh(z[n][e]);
}

template <class P>
__device__ void forward(const Args<typename P::Elem>& a, Shared<P, false>& x) {
  const Lane at;
  const Place<P> place(a);
  const int segments = (a.T + kSteps - 1) / kSteps;
  Tile<P> s[P::M];
  Weights<P> w;
  load<P>(s, a.s0 ? a.s0 + place.bh * P::K * P::V : nullptr, at);
  w.load(a.w + place.h * P::V * P::V, false, at);
  fetch(x.x[0], a, place, 0, at.lane);
  Mark<P> mark(a, place, 0, at.lane);
  for (int segment = 0; segment < segments; segment++) {
    const Segment<P, false>& in = x.x[segment % 2];
    const int first = segment * kSteps, count = min(kSteps, a.T - first);
    if (segment + 1 < segments) fetch(x.x[(segment + 1) % 2], a, place, segment + 1, at.lane);
    else __pipeline_commit();
    mark.put(x.marks, at.lane);
    mark = Mark<P>(a, place, segment + 1, at.lane);
    __pipeline_wait_prior(1);
    __syncwarp();
    if (a.saved) store<P>(a.saved + (place.bh * segments + segment) * P::K * P::V, s, at);
    for (int i = 0; i < count; i += P::together) {
      float sums[8] = {};
#pragma unroll
      for (int j = 0; j < P::together; j++) {
        float v[P::N][2];
        columns<P>(v, in.v[i + j], at);
        const float f = x.marks.f[i + j];
        if (x.marks.begins[i + j]) load<P>(s, nullptr, at);
#pragma unroll
        for (int m = 0; m < P::M; m++) {
          float k[2], q[2];
          rows_of<P>(k, in.k[i + j], m, at), rows_of<P>(q, in.q[i + j], m, at);
          Operand<kParts> parts[P::C];
#pragma unroll
          for (int c = 0; c < P::C; c++) split(parts[c], s[m], c);
          step<P>(s[m], parts, w, k, v, f);
#pragma unroll
          for (int n = 0; n < P::N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[(j * P::N + n) * 2 + e % 2] += q[e / 2] * s[m][n][e];
        }
      }
      write_columns<P>(a.o, sums, a, place, first + i, at);
    }
    __syncwarp();  // before the next segment's marks and inputs come
  }
  store<P>(a.s1 + place.bh * P::K * P::V, s, at);
}

// The states before the steps of a segment, as the backward multiplies them.
template <class P>
__device__ __forceinline__ void replay(const Args<typename P::Elem>& a, Shared<P, true>& x, const Segment<P, true>& in,
                                       const float* from, const Weights<P>& w, int count, Lane at) {
  Tile<P> s[P::M];
  load<P>(s, from, at);
  for (int i = 0; i < count; i++) {
    float v[P::N][2];
    columns<P>(v, in.v[i], at);
    const float f = x.marks.f[i];
    if (x.marks.begins[i]) load<P>(s, nullptr, at);
#pragma unroll
    for (int m = 0; m < P::M; m++) {
      float k[2];
      rows_of<P>(k, in.k[i], m, at);
      Operand<kParts> parts[P::C];
#pragma unroll
      for (int c = 0; c < P::C; c++) {
        split(parts[c], s[m], c);
#pragma unroll
        for (int p = 0; p < P::exact; p++)
          x.history[i][m][c][p][at.lane] = {parts[c][p][0], parts[c][p][1], parts[c][p][2], parts[c][p][3]};
      }
      step<P>(s[m], parts, w, k, v, f);
    }
  }
}

// One step back for 16 rows. sums: those over rows, of dv. Returns the lane's share of df.
template <class P>
__device__ __forceinline__ float step_back(Tile<P>& ds, Tile<P> (&dw)[P::C], float (&row_sums)[4], float* sums,
                                           const Operand<P::exact> (&old)[P::C], const Weights<P>& w, const Weights<P>& wt,
                                           const float (&q)[2], const float (&k)[2], const float (&v)[P::N][2],
                                           const float (&dy)[P::N][2], float f) {
  Tile<P> z, before, p;
  outer<P>(z, k, v);
  float df = 0;
#pragma unroll
  for (int c = 0; c < P::C; c++) multiply(z, old[c], w.b[c]), join(before, old[c], c);
#pragma unroll
  for (int n = 0; n < P::N; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float made = Fast::tanh(z[n][e]);
      ds[n][e] += q[e / 2] * dy[n][e % 2];
      row_sums[e / 2] += (f * before[n][e] + (1 - f) * made) * dy[n][e % 2];
      df += ds[n][e] * (before[n][e] - made);
      p[n][e] = (1 - f) * ds[n][e] * (1 - made * made);
      row_sums[2 + e / 2] += p[n][e] * v[n][e % 2];
      sums[2 * n + e % 2] += p[n][e] * k[e / 2];
      ds[n][e] *= f;
    }
  Operand<kParts> parts[P::C];
#pragma unroll
  for (int c = 0; c < P::C; c++) split(parts[c], p, c), multiply(ds, parts[c], wt.b[c]);
  unsigned right[P::N][P::exact][2];
#pragma unroll
  for (int i = 0; i < P::N * P::exact * 2; i++) {
    const int n = i / (2 * P::exact), part = i / 2 % P::exact, half = i % 2;
    right[n][part][half] = matrix::transposed(parts[n / 2][part][n % 2 * 2 + half]);
  }
#pragma unroll
  for (int c = 0; c < P::C; c++) {
    Operand<P::exact> left;
#pragma unroll
    for (int i = 0; i < 4 * P::exact; i++) left[i / 4][i % 4] = matrix::transposed(old[c][i / 4][i % 2 * 2 + i % 4 / 2]);
    multiply(dw[c], left, right);
  }
  return df;
}

template <class P>
__device__ void backward(const Args<typename P::Elem>& a, Shared<P, true>& x) {
  const Lane at;
  const Place<P> place(a);
  const int segments = (a.T + kSteps - 1) / kSteps;
  Tile<P> ds[P::M], dw[P::C] = {};
  Weights<P> w, wt;
  load<P>(ds, a.ds1 ? a.ds1 + place.bh * P::K * P::V : nullptr, at);
  w.load(a.w + place.h * P::V * P::V, false, at), wt.load(a.w + place.h * P::V * P::V, true, at);
  fetch(x.x[(segments - 1) % 2], a, place, segments - 1, at.lane);
  Mark<P> mark(a, place, segments - 1, at.lane);
  for (int segment = segments - 1; segment >= 0; segment--) {
    const Segment<P, true>& in = x.x[segment % 2];
    const int first = segment * kSteps, count = min(kSteps, (a.T - first + P::together - 1) / P::together * P::together);
    if (segment > 0) fetch(x.x[(segment - 1) % 2], a, place, segment - 1, at.lane);
    else __pipeline_commit();
    mark.put(x.marks, at.lane);
    mark = Mark<P>(a, place, segment - 1, at.lane);
    __pipeline_wait_prior(1);
    __syncwarp();
    replay(a, x, in, a.saved + (place.bh * segments + segment) * P::K * P::V, w, count, at);
    for (int i = count - P::together; i >= 0; i -= P::together) {
      float sums[8] = {};
#pragma unroll
      for (int j = P::together - 1; j >= 0; j--) {
        const int s = i + j;
        const std::int64_t head = (place.token0 + first + s) * a.H + place.h;
        const bool there = first + s < a.T;
        const float f = x.marks.f[s], live = x.marks.live[s];
        float v[P::N][2], dy[P::N][2], df = 0;
        columns<P>(v, in.v[s], at), columns<P>(dy, in.dy[s], at);
#pragma unroll
        for (int n = 0; n < P::N; n++) dy[n][0] *= live, dy[n][1] *= live;
#pragma unroll
        for (int m = 0; m < P::M; m++) {
          float k[2], q[2], row_sums[4] = {};
          rows_of<P>(k, in.k[s], m, at), rows_of<P>(q, in.q[s], m, at);
          Operand<P::exact> old[P::C];
#pragma unroll
          for (int c = 0; c < P::C; c++)
#pragma unroll
            for (int p = 0; p < P::exact; p++) {
              const uint4 word = x.history[s][m][c][p][at.lane];
              old[c][p][0] = word.x, old[c][p][1] = word.y, old[c][p][2] = word.z, old[c][p][3] = word.w;
            }
          df += step_back<P>(ds[m], dw, row_sums, sums + 2 * P::N * j, old, w, wt, q, k, v, dy, f);
          const float sum = add_over(row_sums, at.lane, 2);  // dq, dq 8 rows on, dk, dk 8 rows on
          if (there) (at.t < 2 ? a.dq : a.dk)[head * P::K + 16 * m + 8 * (at.t % 2) + at.g] = decode::narrow<typename P::Elem>(sum);
        }
        if (x.marks.begins[s]) load<P>(ds, nullptr, at);
        df = add_over_warp(df) * live;
        if (there && at.lane == 0) a.df[head] = df;
      }
      write_columns<P>(a.dv, sums, a, place, first + i, at);
    }
    __syncwarp();
  }
  store<P>(a.ds0 + place.bh * P::K * P::V, ds, at);
  store<P>(a.dw + place.bh * P::V * P::V, dw, at);
}

template <class P>
__global__ void __launch_bounds__(32) forward_kernel(const __grid_constant__ Args<typename P::Elem> a) {
  forward<P>(a, *reinterpret_cast<Shared<P, false>*>(dynamic_shared()));
}
template <class P>
__global__ void __launch_bounds__(32) backward_kernel(const __grid_constant__ Args<typename P::Elem> a) {
  backward<P>(a, *reinterpret_cast<Shared<P, true>*>(dynamic_shared()));
}

}  // namespace elman::rows
