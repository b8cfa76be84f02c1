// The matrix-state skeleton on the GPU: forward and backward over all T steps in one launch each. Cells: matrix_state_cell.h.
//
// Mapping. L lanes of a warp share one line, each with R = ceil(N/L) <= 8 of its N elements in registers; a warp holds C = 32/L
// lines, a team of up to WPH warps all lines of a head, or a part of them when there are many. Sums over a line take log2(L)
// shuffles; for bf16 and N <= 32 (`tensor`, with L = 4) they are products on the tensor cores. Inputs of 16 steps travel by
// cp.async while the previous 16 are computed, and become fp32 in shared memory once (with SiLU, the L2 norm and the decay, if
// asked for). Nothing in the loop over steps waits for memory or for another warp.
//
// Backward. The state is saved in fp32 every 16 steps; a segment is replayed into registers (bit for bit the forward's arithmetic)
// and walked back. Sums over lines (dq, dk, the scalars) are off the critical path: each step leaves S and P = dS phi' in shared
// memory, and after the walk dq_t = S_t dy_t and dk_t = P_t write_t + S_{t-1} dr_t are taken from there, for bf16 storage by
// the tensor cores (bf16 operands, fp32 sums), otherwise in fp32; the tensor form needs no shared memory for it (walk_tensor).
// No atomics: every sum has one owner and one order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "matrix_state_cell.h"

namespace elman::matrix {

using bf16 = __nv_bfloat16;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return __float2bfloat16(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half(x);
}

// The tensor cores cut fp32 operands to tf32's 10 bits of mantissa; on average that takes ln 2 / 2 of a unit in the last place, which
// this factor puts back. (Rounding first would cost three instructions an element.)
constexpr float kUncut = 1.000338f;

constexpr int largest_power(int bytes, int cap) {  // the widest access that divides `bytes`
  int p = cap;
  while (bytes % p) p /= 2;
  return p;
}

template <int E, class T>
struct alignas(largest_power(E* int(sizeof(T)), 16)) Vec {
  T x[E];
};
template <int E, class T>
__device__ __forceinline__ void load(float (&f)[E], const T* p) {
  const Vec<E, T> v = *reinterpret_cast<const Vec<E, T>*>(p);
#pragma unroll
  for (int i = 0; i < E; i++) f[i] = to_float(v.x[i]);
}
template <int E, class T>
__device__ __forceinline__ void store(T* p, const float (&f)[E]) {
  Vec<E, T> v;
#pragma unroll
  for (int i = 0; i < E; i++) v.x[i] = from_float<T>(f[i]);
  *reinterpret_cast<Vec<E, T>*>(p) = v;
}

// ---- the plan: everything that follows from the sizes -------------------------------------------------------------------------
// Options: struct with `static constexpr bool silu, l2;  static constexpr ScalarKind kind0, kind1` (kinds of the scalar inputs).
template <int N_, int V_, class Store_, class Cell_, class Options_>
struct Plan {
  static constexpr int N = N_, V = V_;
  using Store = Store_;
  using Cell = Cell_;
  using Opt = Options_;
  using Math = std::conditional_t<std::is_same_v<Store, float>, Exact, Fast>;
  static_assert(N % 4 == 0 && N >= 4 && N <= 128, "state rows: a multiple of 4 from 4 to 128");
  static_assert(V >= 1 && V <= 4096, "lines of a head: 1 to 4096");
  static constexpr int NL = Cell::lines, NS = Cell::scalars;
  static_assert(NS >= 1 && NS <= 2);
  static constexpr bool tensor = std::is_same_v<Store, bf16> && N <= 32;  // sums over a line and over lines by the tensor cores
  static constexpr bool mma = std::is_same_v<Store, bf16> && !tensor;      // only the sums over lines, through shared memory
  static constexpr int L = tensor ? 4 : N <= 8 ? 4 : N <= 16 ? 2 : N <= 32 ? 4 : N <= 64 ? 8 : 16;
  static constexpr int M = 1;  // lines a lane; 2 (g and g + 8, for N <= 16) works and is slower: half as many warps
  static constexpr int R = tensor ? (M == 2 ? (N + 7) / 8 * 2 : (N + 15) / 16 * 4) : (N + L - 1) / L, NP = R * L;  // rows a lane
  static constexpr int E = R * M, Q = E / 4;                   // elements a lane; tensor: in quads, each an A fragment
  static constexpr int VW = tensor       ? 2
                            : R % 4 == 0 ? 4
                            : R % 2 == 0 ? 2
                                         : 1,
                       RV = R / VW;  // rows come in groups of VW, groups interleaved
  static constexpr int C = 32 / L * M;
  static constexpr int warps = (V + C - 1) / C;  // of a head
  static constexpr int most = mma ? 8 : 4;
  static constexpr int PARTS = (warps + most - 1) / most;
  static constexpr int WPH = (warps + PARTS - 1) / PARTS;
  static constexpr int TL = WPH * 32;
  static constexpr int HB = WPH >= 4 ? 1 : 4 / WPH;
  static constexpr int threads = HB * TL;
  static constexpr int CB = WPH * C;
  static constexpr int sz = sizeof(Store);
  // Rows of shared memory that the tensor cores read: 8 elements a lane, 16-byte chunks swizzled.
  static constexpr int CBP = mma ? (CB + 15) / 16 * 16 : CB;
  static constexpr int ROW = mma ? L * 8 : NP;
  static constexpr int piece_kq = largest_power(N * sz, 16);
  static constexpr int piece_line = largest_power(largest_power(V * sz, 16) < 4 ? 2 : V * sz, largest_power(CB* sz, 16));
  static constexpr int EV = CB % 4 == 0 ? 4 : 2;          // lines handled at once outside the loop
  static constexpr bool wide = V % EV == 0;
  static ELMAN_HD constexpr int row_of(int rg, int i) { return ((i / VW) * L + rg) * VW + i % VW; }
  static ELMAN_HD constexpr int element(int m, int i) { return M == 1 ? i : i / 2 * 4 + i % 2 * 2 + m; }  // row i of line m
  static ELMAN_HD constexpr int line_of(int e) { return M == 1 ? 0 : e % 2; }
  static ELMAN_HD constexpr int k_of(int e) { return M == 1 ? e : e / 4 * 2 + e / 2 % 2; }
  static ELMAN_HD constexpr int c_of(int e) {
    return M == 1 ? e : e / 4 * 4 + (e % 4 == 1 ? 2 : e % 4 == 2 ? 1 : e % 4);
  }  // place in C order
  static constexpr ScalarKind kind0 = Opt::kind0, kind1 = Opt::kind1;
  static constexpr bool mamba = kind0 == ScalarKind::mamba;
  static_assert(kind1 != ScalarKind::mamba, "only scalar 0 is a decay");
};

struct Sizes {
  int B, T, H;
  int64_t units;  // B * H * PARTS
};

struct Inputs {
  const void* k;            // [B,T,H,N], heads and elements contiguous, `_step` elements from one time step to the next
  const void* q;
  const void* line[4];      // [B,T,H,V]
  const void* scalar[2];    // [B,T,H]; fp32 if given, else storage type
  int64_t k_step, q_step, line_step[4], scalar_step[2];
  const float* a_log;       // [H], for ScalarKind::mamba
  const float* dt_bias;     // [H]
  const unsigned char* mask;  // [B,T], 0 = hold the state; may be null
};

struct ForwardArgs {
  Sizes n;
  Inputs in;
  const float* s0;          // state, may be null (zero)
  float* s1;
  int64_t state_line, state_row;  // strides of a state inside a head
  void* o;                  // [B,T,H,V] contiguous
  float* saved;             // [B,H,ceil(T/16),V,N], may be null
};

struct BackwardArgs {
  Sizes n;
  Inputs in;
  const void* dy;           // [B,T,H,V] contiguous
  const float* saved;
  const float* ds1;         // may be null (zero)
  float* ds0;               // may be null
  int64_t state_line, state_row;
  void* dk;                 // laid out as the inputs, own steps
  void* dq;
  void* dline[4];
  void* dscalar[2];
  int64_t dk_step, dq_step, dline_step[4], dscalar_step[2];
  float* dhead;             // [PARTS,2,B,H]: sums over time of the gradients of A_log and dt_bias; mamba only
  float* parts;             // [PARTS, B*T*H, 2N+2] if PARTS > 1: sums over lines that are not complete
};

template <class P>
struct Staging {
  alignas(16) typename P::Store k[kInterval][P::N];
  alignas(16) typename P::Store q[kInterval][P::N];
  alignas(16) typename P::Store line[P::NL][kInterval][P::CBP];
};
template <class P>
struct Ready {
  alignas(16) float before[P::NP];  // zero: what stands for q before step 0
  alignas(16) float kq[kInterval][2 * P::NP];
  alignas(16) float line[P::NL][kInterval][P::CB];
  float scalar[P::NS][kInterval];
  float hold[kInterval];
  float rho[2][kInterval];
  float raw[P::NS][kInterval];
};
template <class P>
struct ForwardShared {
  Ready<P> x;
  Staging<P> raw;
  alignas(16) float out[P::WPH][kInterval][P::tensor ? P::C + 4 : 36];
};
template <class P, bool tensor = P::tensor>
struct Matrices {  // what the walk leaves for the sums over lines
  using Hist = std::conditional_t<P::mma, bf16, float>;
  alignas(16) Hist s[kInterval + 1][P::CBP][P::ROW];
  alignas(16) Hist p[kInterval][P::CBP][P::ROW];
};
template <class P>
struct Matrices<P, true> {
  using Hist = float;
};
template <class P>
struct BackwardShared : Matrices<P> {
  using Hist = typename Matrices<P>::Hist;
  alignas(16) Hist dr[P::tensor ? 1 : kInterval + 1][P::CBP];
  alignas(16) Hist write[kInterval][P::CBP];
  alignas(16) float retrieved[P::tensor && P::Cell::backward_uses_r ? kInterval : 1][P::CBP];
  alignas(16) Hist zero[(P::tensor ? kInterval : 1) * P::CBP];  // tensor: read like dy
  Ready<P> x;
  alignas(16) float dy[kInterval][P::CB];
  alignas(16) float dline[P::NL][kInterval][P::CB];
  alignas(16) float dscalar[P::NS][kInterval][P::TL];
  alignas(16) float dkq[P::tensor ? P::WPH : 1][kInterval][2 * P::NP];  // tensor: each warp's share
  Staging<P> raw[2];
  alignas(16) typename P::Store dy_raw[2][kInterval][P::CBP];
  alignas(16) float saved[P::WPH][P::M][P::RV][32][P::VW];
};

template <class P>
__device__ __forceinline__ void team_sync(int team) {
  if constexpr (P::WPH == 1) __syncwarp();
  else if constexpr (P::HB == 1) __syncthreads();
  else asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(P::TL) : "memory");
}

template <int L>
__device__ __forceinline__ float line_sum(float x) {
#pragma unroll
  for (int m = 1; m < L; m *= 2) x += __shfl_xor_sync(~0u, x, m);
  return x;
}

template <class S>
__device__ __forceinline__ void clear(S* s, int i, int step) {
  static_assert(sizeof(S) % 16 == 0);
  for (int j = i; j < int(sizeof(S) / 16); j += step) reinterpret_cast<uint4*>(s)[j] = make_uint4(0, 0, 0, 0);
}

// Rows of `COUNT` elements for 16 steps, global to shared; steps beyond T become zero. Asynchronous where the size allows it.
template <int PIECE, int COUNT, int TL, class T>
__device__ __forceinline__ void stage_rows(T* dst, int dst_step, const T* src, int64_t step, int t0, int T_, int count, int tl) {
  constexpr int E = PIECE / int(sizeof(T)) > 0 ? PIECE / int(sizeof(T)) : 1, per = (COUNT + E - 1) / E;
#pragma unroll
  for (int it = 0; it < (kInterval * per + TL - 1) / TL; it++) {
    const int i = it * TL + tl, s = i / per, e = (i % per) * E;
    if ((kInterval * per) % TL && i >= kInterval * per) break;
    if (e >= count) continue;
    const bool in = t0 + s < T_;
    const T* from = src + int64_t(in ? t0 + s : T_ - 1) * step + e;
    if constexpr (PIECE >= 4) __pipeline_memcpy_async(dst + s * dst_step + e, from, PIECE, in ? 0 : PIECE);
    else dst[s * dst_step + e] = in ? *from : from_float<T>(0.f);
  }
}

// scalar_forward and scalar_backward (matrix_state_cell.h) with exp(A_log) at hand, and with the hardware's exp and log for 16-bit storage.
template <class Math>
__device__ __forceinline__ float soft(float z) {
  if (std::is_same_v<Math, Exact>) return softplus(z);
  const float y = __expf(-fabsf(z));
  return fmaxf(z, 0.f) + (y < 0.03f ? y * (1.f - y * (0.5f - y * (1.f / 3))) : __logf(1.f + y));
}
template <class Math>
__device__ __forceinline__ float logistic(float z) {
  return std::is_same_v<Math, Exact> ? 1.f / (1.f + expf(-z)) : __fdividef(1.f, 1.f + __expf(-z));
}
template <class Math>
__device__ __forceinline__ float scalar_map(ScalarKind kind, float x, float rate, float bias) {
  if (kind == ScalarKind::given) return x;
  if (kind == ScalarKind::sigmoid) return logistic<Math>(x);
  const float y = -rate * soft<Math>(x + bias);
  return std::is_same_v<Math, Exact> ? expf(y) : __expf(y);
}
template <class Math>
__device__ __forceinline__ ScalarGrad<float> scalar_adjoint(ScalarKind kind, float dy, float y, float x, float rate, float bias) {
  if (kind == ScalarKind::given) return {dy, 0.f};
  if (kind == ScalarKind::sigmoid) return {dy * y * (1.f - y), 0.f};
  const float g = -dy * y * rate;
  return {g * logistic<Math>(x + bias), g * soft<Math>(x + bias)};
}

// Scalars and the mask of the next segment wait in a register until it starts: lanes 0-15 hold scalar 0, 16-31 scalar 1.
template <class P>
struct Scalars {
  float x = 0, rate = 0, bias = 0;  // of mamba: exp(A_log), dt_bias
  bool hold = false;
  __device__ __forceinline__ Scalars(const Inputs& in, int h) {
    if (P::mamba) rate = expf(in.a_log[h]), bias = in.dt_bias[h];
  }
  __device__ __forceinline__ void fetch(const Inputs& in, const Sizes& n, int b, int h, int t0, int tl) {
    if (tl >= 32) return;
    const int s = tl & 15, w = tl >> 4, t = min(t0 + s, n.T - 1);
    if (w < P::NS) {
      const void* from = w ? in.scalar[1] : in.scalar[0];
      const int64_t i = (int64_t(b) * n.T + t) * (w ? in.scalar_step[1] : in.scalar_step[0]) + h;
      const bool given = (w ? P::kind1 : P::kind0) == ScalarKind::given;
      x = given ? static_cast<const float*>(from)[i] : to_float(static_cast<const typename P::Store*>(from)[i]);
    }
    hold = t0 + s >= n.T || (in.mask && in.mask[int64_t(b) * n.T + t] == 0);
  }
};

template <class P>
__device__ __forceinline__ void stage(Staging<P>& d, const Inputs& in, const Sizes& n, int b, int h, int line0, int t0, int tl) {
  using S = typename P::Store;
  const int64_t first = int64_t(b) * n.T;
  stage_rows<P::piece_kq, P::N, P::TL>(&d.k[0][0], P::N, static_cast<const S*>(in.k) + first * in.k_step + h * P::N, in.k_step, t0,
                                       n.T, P::N, tl);
  stage_rows<P::piece_kq, P::N, P::TL>(&d.q[0][0], P::N, static_cast<const S*>(in.q) + first * in.q_step + h * P::N, in.q_step, t0,
                                       n.T, P::N, tl);
#pragma unroll
  for (int l = 0; l < P::NL; l++)
    stage_rows<P::piece_line, P::CB, P::TL>(&d.line[l][0][0], P::CBP,
                                            static_cast<const S*>(in.line[l]) + first * in.line_step[l] + h * P::V + line0,
                                            in.line_step[l], t0, n.T, P::V - line0, tl);
}

// Storage type to fp32, with SiLU, norm and scalar maps.
template <class P>
__device__ __forceinline__ void make_ready(Ready<P>& x, const Staging<P>& raw, const Scalars<P>& sc, int tl) {
  constexpr int E = P::N / 4;
#pragma unroll
  for (int it = 0; it < (2 * kInterval * 4 + P::TL - 1) / P::TL; it++) {
    const int i = it * P::TL + tl, sub = i & 3, w = (i >> 2) & 1, s = i >> 3;
    if ((2 * kInterval * 4) % P::TL && i >= 2 * kInterval * 4) break;
    float f[E];
    load<E>(f, (w ? raw.q[s] : raw.k[s]) + sub * E);
    float sum = 0;
#pragma unroll
    for (int e = 0; e < E; e++) {
      if (P::Opt::silu) f[e] = silu(f[e], P::Math::sigmoid(f[e]));
      sum = fmaf(f[e], f[e], sum);
    }
    if (P::Opt::l2) {
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const float rho = rsqrtf(sum + float(kNormEps));
#pragma unroll
      for (int e = 0; e < E; e++) f[e] *= rho;
      if (sub == 0) x.rho[w][s] = rho;
    }
    if (P::tensor && (P::Opt::silu || P::Opt::l2)) {  // rounded to tf32, so that sums and updates see the same k
#pragma unroll
      for (int e = 0; e < E; e++) f[e] = f[e] == f[e] ? __uint_as_float((__float_as_uint(f[e]) + 0x1000u) & 0xffffe000u) : f[e];
    }
    float* to = x.kq[s] + w * P::NP + sub * E;
    if constexpr (P::NP % E == 0) store<E>(to, f);
    else {
#pragma unroll
      for (int e = 0; e < E; e++) to[e] = f[e];
    }
  }
#pragma unroll
  for (int l = 0; l < P::NL; l++)
#pragma unroll
    for (int it = 0; it < (kInterval * P::CB / P::EV + P::TL - 1) / P::TL; it++) {
      const int i = it * P::TL + tl, s = i / (P::CB / P::EV), e0 = i % (P::CB / P::EV) * P::EV;
      if ((kInterval * P::CB / P::EV) % P::TL && i >= kInterval * P::CB / P::EV) break;
      float f[P::EV];
      load<P::EV>(f, &raw.line[l][s][e0]);
      if (P::Opt::silu && l == 0) {
#pragma unroll
        for (int e = 0; e < P::EV; e++) f[e] = silu(f[e], P::Math::sigmoid(f[e]));
      }
      store<P::EV>(&x.line[l][s][e0], f);
    }
  if (tl < 16 * P::NS) {
    const int w = tl >> 4, s = tl & 15;
    const ScalarKind kind = w ? P::kind1 : P::kind0;
    x.raw[w][s] = sc.x;
    x.scalar[w][s] = scalar_map<typename P::Math>(kind, sc.x, sc.rate, sc.bias);
  }
  if (tl < 16) x.hold[tl] = sc.hold ? 1.f : 0.f;
}

template <class P>
__device__ __forceinline__ void load_rows(float (&f)[P::R], const float* vec, int rg) {
#pragma unroll
  for (int m = 0; m < P::RV; m++) {
    float g[P::VW];
    load<P::VW>(g, vec + (m * P::L + rg) * P::VW);
#pragma unroll
    for (int e = 0; e < P::VW; e++) f[m * P::VW + e] = g[e];
  }
}

template <int R>
__device__ __forceinline__ float dot(const float (&a)[R], const float (&b)[R]) {
  float x = a[0] * b[0], y = 0;
#pragma unroll
  for (int i = 1; i < R; i++) {
    if (i & 1) y = i == 1 ? a[i] * b[i] : fmaf(a[i], b[i], y);
    else x = fmaf(a[i], b[i], x);
  }
  return R > 1 ? x + y : x;
}

// C[16,8] += A[16,8] B[8,8], fp32 sums of tf32 products. Lane (g, t) = (lane / 4, lane % 4) holds A(g, t), A(g+8, t), A(g, t+4),
// A(g+8, t+4); B(t, g), B(t+4, g); C(g, 2t), C(g, 2t+1), C(g+8, 2t), C(g+8, 2t+1).
__device__ __forceinline__ void mma_tf32(float (&c)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
                 "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// Sums over the elements of a line, complete in every lane of it (or, with `b` zero in some columns, in the lanes of the others).
// Tensor form: a quad of elements is an A fragment; what a lane gives for B (as_b) is k at its own rows. With one line a lane the rows 2t + 1
// sit where the fragment has lines g + 8, and odd columns of B carry their k.
// A value that the compiler keeps in its register, instead of making it again each time (whole fragments, at that).
__device__ __forceinline__ float pinned(float x, const float* zero) { return x + *static_cast<const volatile float*>(zero); }
__device__ __forceinline__ int pinned(int x, const float* zero) {
  return x + __float_as_int(*static_cast<const volatile float*>(zero));
}
// Products are issued by `line_products` and collected by `line_sums`, so that other work can stand between.
template <class P>
struct Products {
  float c[P::tensor ? P::Q : 1][4];
};
template <class P>
__device__ __forceinline__ void line_products(Products<P>& x, const float (&S)[P::E], const float (&b)[P::R]) {
  if constexpr (P::tensor) {
#pragma unroll
    for (int q = 0; q < P::Q; q++) {
      x.c[q][0] = x.c[q][1] = x.c[q][2] = x.c[q][3] = 0;
      mma_tf32(x.c[q], S[4 * q], S[4 * q + 1], S[4 * q + 2], S[4 * q + 3], b[2 * q], b[2 * q + 1]);
    }
  } else {
    x.c[0][0] = dot<P::R>(b, S);
  }
}
template <class P>
__device__ __forceinline__ void line_sums(float (&r)[P::M], const Products<P>& x) {
  if constexpr (P::tensor) {
    float sum[2] = {P::M == 1 ? x.c[0][0] + x.c[0][3] : x.c[0][0], x.c[0][2]};
#pragma unroll
    for (int q = 1; q < P::Q; q++) sum[0] += P::M == 1 ? x.c[q][0] + x.c[q][3] : x.c[q][0], sum[1] += x.c[q][2];
#pragma unroll
    for (int m = 0; m < P::M; m++)
      r[m] = P::Cell::backward_uses_r ? __fmul_rn(sum[m], kUncut) : sum[m] * kUncut;  // contracted in all places or in none
  } else {
    r[0] = line_sum<P::L>(x.c[0][0]);
  }
}
template <class P>
__device__ __forceinline__ void as_b(float (&b)[P::R], const float (&k)[P::R], bool odd) {
#pragma unroll
  for (int i = 0; i < P::R; i++)
    b[i] = !P::tensor || P::M == 2 ? k[i]
           : i < P::R / 2          ? (odd ? k[2 * i + 1 < P::R ? 2 * i + 1 : 0] : k[2 * i < P::R ? 2 * i : 0])
                                   : 0.f;
}
// The same straight from memory: `vec` points at row 2t (+ 1 in odd columns).
template <class P>
__device__ __forceinline__ void load_b(float (&b)[P::R], const float* row, int rg, int odd) {
  if constexpr (P::tensor && P::M == 1) {
#pragma unroll
    for (int i = 0; i < P::R / 2; i++) b[i] = row[8 * i + 2 * rg + odd];  // narrow loads: wider ones made the steps longer
  } else {
    load_rows<P>(b, row, rg);
  }
}

// One step of the recurrence, the same code for the forward and for the replay. `sum` holds the products of S and this step's k.
struct Nothing {
  __device__ __forceinline__ void operator()() const {}
};
template <class P, bool MayHold, class Between = Nothing>
__device__ __forceinline__ void advance(float (&S)[P::E], const Products<P>& sum, const float (&k)[P::R],
                                        const float (&in)[P::M][P::NL], const float (&c)[P::NS], bool hold, float (&r)[P::M],
                                        float (&write)[P::M], Between between = {}) {
  MatrixLine<float> w[P::M];
  if constexpr (P::Cell::retrieves) line_sums<P>(r, sum);
#pragma unroll
  for (int m = 0; m < P::M; m++) {
    if (!P::Cell::retrieves) r[m] = 0;
    w[m] = P::Cell::template line<typename P::Math>(r[m], in[m], c);
    write[m] = MayHold && hold ? 0.f : w[m].write;
  }
  float x[P::E];
#pragma unroll
  for (int e = 0; e < P::E; e++) x[e] = fmaf(k[P::k_of(e)], w[P::line_of(e)].write, w[P::line_of(e)].keep * S[e]);
  between();
#pragma unroll
  for (int e = 0; e < P::E; e++) {
    if (P::Cell::squashes) x[e] = P::Math::tanh(x[e]);
    S[e] = MayHold && hold ? S[e] : x[e];
  }
}
template <class P>
__device__ __forceinline__ void retrieve(Products<P>& sum, const float (&S)[P::E], const float (&k)[P::R], bool odd) {
  if constexpr (P::Cell::retrieves) {
    float b[P::R];
    as_b<P>(b, k, odd);
    line_products<P>(sum, S, b);
  }
}

template <class P>
struct Place {
  int warp, lane, team, tw, tl, rg, cg, b, h, part, line0;
  int64_t bh;
  bool active;  // the team has work
  __device__ __forceinline__ Place(const Sizes& n) {
    warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp / P::WPH, tw = warp % P::WPH;
    tl = threadIdx.x - team * P::TL, rg = lane % P::L, cg = lane / P::L;
    const int64_t unit = int64_t(blockIdx.x) * P::HB + team;
    active = unit < n.units;
    part = int(unit % P::PARTS), bh = unit / P::PARTS;
    b = int(bh / n.H), h = int(bh % n.H);
    line0 = part * P::CB;
  }
  __device__ __forceinline__ int column(int m) const { return tw * P::C + m * 8 + cg; }  // of the team
  __device__ __forceinline__ int line(int m) const { return line0 + column(m); }
  __device__ __forceinline__ bool mine(int m) const { return line(m) < P::V; }
};

template <class P>
__device__ __forceinline__ void read_state(float (&S)[P::E], const float* from, const Place<P>& at, int64_t line, int64_t row) {
#pragma unroll
  for (int m = 0; m < P::M; m++)
#pragma unroll
    for (int i = 0; i < P::R; i++) {
      const int n = P::row_of(at.rg, i);
      S[P::element(m, i)] =
          from && at.mine(m) && n < P::N ? from[at.bh * (int64_t(P::N) * P::V) + at.line(m) * line + n * row] : 0.f;
    }
}
template <class P>
__device__ __forceinline__ void write_state(float* to, const float (&S)[P::E], const Place<P>& at, int64_t line, int64_t row) {
  if (!to) return;
#pragma unroll
  for (int m = 0; m < P::M; m++)
#pragma unroll
    for (int i = 0; i < P::R; i++) {
      const int n = P::row_of(at.rg, i);
      if (at.mine(m) && n < P::N) to[at.bh * (int64_t(P::N) * P::V) + at.line(m) * line + n * row] = S[P::element(m, i)];
    }
}
template <class P>
__device__ __forceinline__ void step_inputs(float (&in)[P::M][P::NL], float (&c)[P::NS], const float* lines, const Ready<P>& x,
                                            int s) {
#pragma unroll
  for (int m = 0; m < P::M; m++)
#pragma unroll
    for (int l = 0; l < P::NL; l++) in[m][l] = lines[(l * kInterval + s) * P::CB + m * 8];
#pragma unroll
  for (int i = 0; i < P::NS; i++) c[i] = x.scalar[i][s];
}

template <class P>
__global__ void __launch_bounds__(P::threads) forward_kernel(const __grid_constant__ ForwardArgs a) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const Place<P> at(a.n);
  if (!at.active) return;
  ForwardShared<P>& sm = reinterpret_cast<ForwardShared<P>*>(shared_bytes)[at.team];
  constexpr int R = P::R, L = P::L, C = P::C, PL = C / 2;
  const int T = a.n.T, segments = (T + kInterval - 1) / kInterval;
  clear(&sm, at.tl, P::TL);
  float S[P::E];
  read_state<P>(S, a.s0, at, a.state_line, a.state_row);
  Scalars<P> sc(a.in, at.h);
  sc.fetch(a.in, a.n, at.b, at.h, 0, at.tl);
  team_sync<P>(at.team);
  stage<P>(sm.raw, a.in, a.n, at.b, at.h, at.line0, 0, at.tl);
  __pipeline_commit();
  for (int seg = 0; seg < segments; seg++) {
    const int t0 = seg * kInterval, count = min(kInterval, T - t0);
    __pipeline_wait_prior(0);
    team_sync<P>(at.team);
    make_ready<P>(sm.x, sm.raw, sc, at.tl);
    team_sync<P>(at.team);
    if (seg + 1 < segments) stage<P>(sm.raw, a.in, a.n, at.b, at.h, at.line0, t0 + kInterval, at.tl);
    __pipeline_commit();
    if (a.saved)
#pragma unroll
      for (int m = 0; m < P::M; m++) {
        float* to = a.saved + ((at.bh * segments + seg) * P::V + at.line(m)) * int64_t(P::N);
        if (at.mine(m))
#pragma unroll
          for (int n = 0; n < P::RV; n++) {
            const int i = (n * L + at.rg) * P::VW;
            float g[P::VW];
#pragma unroll
            for (int e = 0; e < P::VW; e++) g[e] = S[P::element(m, n * P::VW + e)];
            if (i < P::N) store<P::VW>(to + i, g);
          }
      }
    float* out = &sm.out[at.tw][0][P::tensor ? at.cg : at.lane];
    constexpr int pitch = sizeof(sm.out[0][0]) / sizeof(float);
    const float* lines = &sm.x.line[0][0][at.column(0)];
    float kc[R], q[R] = {};
    Products<P> sum, read = {};
    load_rows<P>(kc, sm.x.kq[0], at.rg);
    retrieve<P>(sum, S, kc, at.cg & 1);
    auto readout = [&](int s) {
      if constexpr (P::tensor) {
        float o[P::M];
        line_sums<P>(o, read);
        if (at.rg == 0)
#pragma unroll
          for (int m = 0; m < P::M; m++) out[s * pitch + m * 8] = o[m];
      } else {
        out[s * pitch] = read.c[0][0];
      }
    };
    auto step = [&](int s, auto may_hold) {
      constexpr bool MayHold = decltype(may_hold)::value;
      float kn[R], in[P::M][P::NL], c[P::NS], r[P::M], write[P::M];
      load_rows<P>(kn, sm.x.kq[s + 1 < kInterval ? s + 1 : s], at.rg);
      step_inputs<P>(in, c, lines, sm.x, s);
      advance<P, MayHold>(S, sum, kc, in, c, MayHold && sm.x.hold[s] != 0.f, r, write);
      retrieve<P>(sum, S, kn, at.cg & 1);
      if (s > 0) readout(s - 1);  // one step late: nothing waits for it
      if (!P::tensor || at.cg < (P::M == 1 ? 2 : 1))
        load_b<P>(q, sm.x.kq[s] + P::NP, at.rg, at.cg & 1);  // tensor: the first columns of B are enough
      line_products<P>(read, S, q);
#pragma unroll
      for (int i = 0; i < R; i++) kc[i] = kn[i];
    };
    if (count == kInterval && !a.in.mask) {
#pragma unroll
      for (int s = 0; s < kInterval; s++) {
        step(s, std::false_type());
        if (s == kInterval / 2 && seg + 1 < segments) sc.fetch(a.in, a.n, at.b, at.h, t0 + kInterval, at.tl);
      }
    } else {
#pragma unroll 1
      for (int s = 0; s < count; s++) step(s, std::true_type());
      sc.fetch(a.in, a.n, at.b, at.h, t0 + kInterval, at.tl);
    }
    readout(count - 1);
    __syncwarp();
    {  // complete the readouts of this warp: lane = (step, half of the lines)
      const int s = at.lane / 2, half = at.lane % 2;
      float y[PL];
      if constexpr (P::tensor) load<PL>(y, &sm.out[at.tw][s][half * PL]);
      else {
        float x[16];
        load<16>(x, &sm.out[at.tw][s][half * 16]);
#pragma unroll
        for (int j = 0; j < PL; j++) {
          y[j] = x[j * L];
#pragma unroll
          for (int g = 1; g < L; g++) y[j] += x[j * L + g];
        }
      }
      const int line = at.line0 + at.tw * C + half * PL;
      if (s < count) {
        typename P::Store* to = static_cast<typename P::Store*>(a.o) + ((int64_t(at.b) * T + t0 + s) * a.n.H + at.h) * P::V + line;
        if constexpr (P::V % PL == 0) {
          if (line < P::V) store<PL>(to, y);
        } else {
#pragma unroll
          for (int j = 0; j < PL; j++)
            if (line + j < P::V) to[j] = from_float<typename P::Store>(y[j]);
        }
      }
    }
    if constexpr (P::WPH == 1) __syncwarp();
  }
  write_state<P>(a.s1, S, at, a.state_line, a.state_row);
}

// ---- backward -------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void ldsm_x4_trans(unsigned (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(unsigned(__cvta_generic_to_shared(p)))
               : "memory");
}
__device__ __forceinline__ void mma_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Which 16-byte chunk of row j holds the rows of lane group g: conflict-free for both the writers and ldmatrix.
template <int L>
__device__ __forceinline__ int swizzle(int j, int g) {
  if (L == 2) return g ^ ((j >> 2) & 1);
  if (L == 4) return g ^ ((j >> 1) & 3);
  return g ^ (j & 7);
}

template <class P>
__device__ __forceinline__ void keep_rows(typename BackwardShared<P>::Hist (&m)[P::CBP][P::ROW], const float (&x)[P::R], int j,
                                          int rg) {
  if constexpr (P::mma) {
    unsigned w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const __nv_bfloat162 z = __floats2bfloat162_rn(2 * i < P::R ? x[2 * i < P::R ? 2 * i : 0] : 0.f,
                                                     2 * i + 1 < P::R ? x[2 * i + 1 < P::R ? 2 * i + 1 : 0] : 0.f);
      w[i] = *reinterpret_cast<const unsigned*>(&z);
    }
    *reinterpret_cast<uint4*>(&m[j][swizzle<P::L>(j, rg) * 8]) = make_uint4(w[0], w[1], w[2], w[3]);
  } else {
    float g[P::R];
#pragma unroll
    for (int e = 0; e < P::R; e++) g[e] = x[e];
    store<P::R>(&m[j][rg * P::R], g);
  }
}

// dq and dk of a segment from the matrices left in shared memory. Slot s is the state before step s, so it gives dq of step s-1
// and the S' part of dk of step s; P of step s gives the rest of dk.
template <class P>
__device__ __forceinline__ void sums_over_lines(BackwardShared<P>& sm, int buf, const Place<P>& at) {
  constexpr int L = P::L;
  if constexpr (P::mma) {
    constexpr int MT = L / 2;
    const int g = at.lane / 4, tg = at.lane % 4;
    for (int tile = at.tw; tile < (kInterval + 1) * MT; tile += P::WPH) {
      const int s = tile / MT, mt = tile % MT;
      const bf16* bx = g == 0 && s > 0 ? sm.dy_raw[buf][s - 1] : g == 1 ? sm.dr[s] : sm.zero;
      const bf16* bp = g == 1 && s < kInterval ? sm.write[s] : sm.zero;
      float c[4] = {0, 0, 0, 0};
#pragma unroll
      for (int kk = 0; kk < P::CBP / 16; kk++) {
        const int j = kk * 16 + (at.lane & 7) + (at.lane >> 4) * 8, chunk = swizzle<L>(j, mt * 2 + ((at.lane >> 3) & 1));
        unsigned m[4];
        ldsm_x4_trans(m, &sm.s[s][j][chunk * 8]);
        mma_bf16(c, m, *reinterpret_cast<const unsigned*>(bx + kk * 16 + 2 * tg),
                 *reinterpret_cast<const unsigned*>(bx + kk * 16 + 8 + 2 * tg));
        if (s < kInterval) {
          ldsm_x4_trans(m, &sm.p[s][j][chunk * 8]);
          mma_bf16(c, m, *reinterpret_cast<const unsigned*>(bp + kk * 16 + 2 * tg),
                   *reinterpret_cast<const unsigned*>(bp + kk * 16 + 8 + 2 * tg));
        }
      }
      if (tg == 0) {
#pragma unroll
        for (int x = 0; x < 2; x++) {
          const int i = ((g / P::VW) * L + mt * 2 + x) * P::VW + g % P::VW;
          if (g < P::R) {
            if (s > 0) sm.dkq[0][s - 1][P::NP + i] = c[2 * x];
            if (s < kInterval) sm.dkq[0][s][i] = c[2 * x + 1];
          }
        }
      }
    }
  } else {
    for (int it = at.tl; it < kInterval * P::NP; it += P::TL) {
      const int s = it / P::NP, p = it % P::NP, rg = p / P::R, e = p % P::R, i = ((e / P::VW) * L + rg) * P::VW + e % P::VW;
      float dq = 0, dk = 0;
      for (int j = 0; j < P::CB; j++) {
        dq = fmaf(sm.s[s + 1][j][p], sm.dy[s][j], dq);
        dk = fmaf(sm.p[s][j][p], sm.write[s][j], dk);
        dk = fmaf(sm.s[s][j][p], sm.dr[s][j], dk);
      }
      sm.dkq[0][s][P::NP + i] = dq;
      sm.dkq[0][s][i] = dk;
    }
  }
}

// Replay 16 steps into registers and walk back over them.
template <class P, bool MayHold>
__device__ __forceinline__ void walk(BackwardShared<P>& sm, const Place<P>& at, const float (&S0)[P::E], float (&dS)[P::E]) {
  static_assert(P::M == 1);
  using Hist = typename BackwardShared<P>::Hist;
  constexpr int R = P::R;
  const int j = at.column(0);
  const float* lines = &sm.x.line[0][0][j];
  float hist[kInterval + 1][R], rs[kInterval][1];
#pragma unroll
  for (int i = 0; i < R; i++) hist[0][i] = S0[i];
  keep_rows<P>(sm.s[0], hist[0], j, at.rg);
  float kc[R];
  load_rows<P>(kc, sm.x.kq[0], at.rg);
#pragma unroll
  for (int s = 0; s < kInterval; s++) {
    float kn[R], in[1][P::NL], c[P::NS], write[1];
    load_rows<P>(kn, sm.x.kq[s + 1 < kInterval ? s + 1 : s], at.rg);
    step_inputs<P>(in, c, lines, sm.x, s);
#pragma unroll
    for (int i = 0; i < R; i++) hist[s + 1][i] = hist[s][i];
    Products<P> sum;
    retrieve<P>(sum, hist[s], kc, false);
    advance<P, MayHold>(hist[s + 1], sum, kc, in, c, MayHold && sm.x.hold[s] != 0.f, rs[s], write);
    if (at.rg == 0) sm.write[s][j] = from_float<Hist>(write[0]);
    keep_rows<P>(sm.s[s + 1], hist[s + 1], j, at.rg);
#pragma unroll
    for (int i = 0; i < R; i++) kc[i] = kn[i];
  }
  float q[R];
  load_rows<P>(q, sm.x.kq[kInterval - 1] + P::NP, at.rg);
  float dy = sm.dy[kInterval - 1][j];
#pragma unroll
  for (int s = kInterval - 1; s >= 0; s--) {
    const int b = s > 0 ? s - 1 : 0;
    float kn[R], qn[R], in[1][P::NL], c[P::NS], Pm[R];
    load_rows<P>(kn, sm.x.kq[b], at.rg);
    load_rows<P>(qn, sm.x.kq[b] + P::NP, at.rg);
    const float dyn = sm.dy[b][j];
    step_inputs<P>(in, c, lines, sm.x, s);
    const bool hold = MayHold && sm.x.hold[s] != 0.f;
    const float* S = hist[s + 1];
    const float* Sp = hist[s];
#pragma unroll
    for (int i = 0; i < R; i++) {
      dS[i] = fmaf(q[i], dy, dS[i]);
      Pm[i] = P::Cell::squashes ? dS[i] * fmaf(-S[i], S[i], 1.f) : dS[i];
      if (MayHold && hold) Pm[i] = 0.f;
    }
    const float dwrite = line_sum<P::L>(dot<R>(kc, Pm));
    float dkeep = 0;
#pragma unroll
    for (int i = 0; i < R; i++) dkeep = fmaf(Pm[i], Sp[i], dkeep);
    if (!P::Cell::scalar_keep) dkeep = line_sum<P::L>(dkeep);
    const MatrixLine<float> w = P::Cell::template line<typename P::Math>(rs[s][0], in[0], c);
    const auto d = P::Cell::template line_backward<typename P::Math>(dkeep, dwrite, rs[s][0], in[0], c);
    keep_rows<P>(sm.p[s], Pm, j, at.rg);
#pragma unroll
    for (int i = 0; i < P::NS; i++) {
      const bool whole = i == 0 && P::Cell::scalar_keep;
      sm.dscalar[i][s][at.tl] = (whole || at.rg == 0) && !hold ? d.dc[i] : 0.f;
    }
    if (at.rg == 0) {
      sm.dr[s][j] = from_float<Hist>(hold ? 0.f : d.dr);
#pragma unroll
      for (int l = 0; l < P::NL; l++) sm.dline[l][s][j] = hold ? 0.f : d.din[l];
    }
#pragma unroll
    for (int i = 0; i < R; i++) {
      const float back = fmaf(kc[i], d.dr, w.keep * Pm[i]);
      dS[i] = hold ? dS[i] : back;
      kc[i] = kn[i], q[i] = qn[i];
    }
    dy = dyn;
  }
}

// The same in tensor form (lane (g, t): rows 2t, 2t + 1, ... of line g, or of lines g and g + 8). Sums over lines need lines and rows
// turned round: a product with a selection matrix does that, and its C fragment is the A fragment of a second product. So
//   replay: S; then dq = S^T dy, as dy is known
//   walk:   P = dS phi'; dwrite = P k as in line_dots; dS' = keep P + k dr + q' dy' in one product (dr in two halves of tf32 each, dy' of
//           the step before); dk = (P write + S' dr)^T 1, one step late, which fills the wait for the next dwrite.
template <class P, bool MayHold>
__device__ __forceinline__ void walk_tensor(BackwardShared<P>& sm, const Place<P>& at, const float (&S0)[P::E], float (&dS)[P::E]) {
  constexpr int R = P::R, M = P::M, E = P::E, Q = P::Q, CB = P::CB, NP = P::NP;
  const int g = at.cg, t = at.rg, odd = g & 1;
  const float* lines = &sm.x.line[0][0][at.column(0)];
  float hist[kInterval + 1][E];
  float select[2][4];
  {
    const float e0 = g == 2 * t ? 1.f : 0.f, e1 = g == 2 * t + 1 ? 1.f : 0.f;
    if (M == 1) {
      select[0][0] = e0, select[0][1] = 0, select[0][2] = e1, select[0][3] = 0;
      select[1][0] = 0, select[1][1] = e0, select[1][2] = 0, select[1][3] = e1;
    } else {
      select[0][0] = e0, select[0][1] = 0, select[0][2] = 0, select[0][3] = e0;
      select[1][0] = e1, select[1][1] = 0, select[1][2] = 0, select[1][3] = e1;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) select[i / 4][i % 4] = pinned(select[i / 4][i % 4], sm.zero);
  }
  // Sums over lines of X, weighted by b. The result of lane (g, t) is row 16 q + 8 (t & 1) + g, q = t / 2 (M = 1) or 8 q + g, q = t (M = 2).
  const bool upper = (g & 2) != 0;
  // In three stages, each a product that needs the one before: the program puts a step's other work between them.
  float turned[Q][4], total[Q][4];
  auto turn_first = [&](const float (&X)[E]) {
#pragma unroll
    for (int q = 0; q < Q; q++) {
      turned[q][0] = turned[q][1] = turned[q][2] = turned[q][3] = 0;
      mma_tf32(turned[q], select[0][0], select[0][1], select[0][2], select[0][3], X[4 * q], X[4 * q + 1]);
    }
  };
  auto turn_second = [&](const float (&X)[E]) {
#pragma unroll
    for (int q = 0; q < Q; q++)
      mma_tf32(turned[q], select[1][0], select[1][1], select[1][2], select[1][3], X[4 * q + 2], X[4 * q + 3]);
  };
  auto weigh = [&](float b0, float b1) {
#pragma unroll
    for (int q = 0; q < Q; q++) {
      total[q][0] = total[q][1] = total[q][2] = total[q][3] = 0;
      mma_tf32(total[q], turned[q][0], turned[q][1], turned[q][2], turned[q][3], b0, b1);
    }
  };
  auto result = [&] {
    float y = total[0][0] + total[0][3];
#pragma unroll
    for (int q = 1; q < Q; q++) y = (M == 1 ? t >= 2 * q : t == q) ? total[q][0] + total[q][3] : y;
    return y * kUncut;
  };
  const bool gives = (M == 1 ? 2 * Q : Q) >= 4 || t < (M == 1 ? 2 * Q : Q);
  float* sums = &sm.dkq[0][0][0] + pinned(at.tw * kInterval * 2 * NP + (M == 1 ? (t >> 1) * 16 + (t & 1) * 8 : t * 8) + g, sm.zero);
#pragma unroll
  for (int e = 0; e < E; e++) hist[0][e] = S0[e];
  {
    const float* dys = &sm.dy[0][0] + at.tw * P::C + 2 * t + odd;
    float kc[R];
    Products<P> sum;
    load_rows<P>(kc, sm.x.kq[0], t);
    retrieve<P>(sum, hist[0], kc, odd);
    auto weigh_dq = [&](int s) {
      float b0, b1;
      if (M == 1) {
        const float y = dys[s * CB];
        b0 = upper ? 0.f : y, b1 = upper ? y : 0.f;
      } else {
        b0 = dys[s * CB], b1 = dys[s * CB + (M == 1 ? 0 : 8)];
      }
      weigh(b0, b1);
    };
    auto give_dq = [&](int s) {
      const float dq = result();
      if (gives) sums[s * 2 * NP + NP] = dq;
    };
#pragma unroll
    for (int s = 0; s < kInterval; s++) {
      float kn[R], in[M][P::NL], c[P::NS], r[M], write[M];
      load_rows<P>(kn, sm.x.kq[s + 1 < kInterval ? s + 1 : s], t);
      step_inputs<P>(in, c, lines, sm.x, s);
#pragma unroll
      for (int e = 0; e < E; e++) hist[s + 1][e] = hist[s][e];
      advance<P, MayHold>(hist[s + 1], sum, kc, in, c, MayHold && sm.x.hold[s] != 0.f, r, write, [&] {
        if (s > 0) turn_second(hist[s]);
        if (s > 1) give_dq(s - 2);
      });
      if (s > 0) weigh_dq(s - 1);
      if (s + 1 < kInterval) retrieve<P>(sum, hist[s + 1], kn, odd);
      turn_first(hist[s + 1]);
      if (t == 0)
#pragma unroll
        for (int m = 0; m < M; m++) {
          sm.write[s][at.column(m)] = write[m];
          if (P::Cell::backward_uses_r) sm.retrieved[s][at.column(m)] = r[m];
        }
#pragma unroll
      for (int i = 0; i < R; i++) kc[i] = kn[i];
    }
    turn_second(hist[kInterval]);
    give_dq(kInterval - 2);
    weigh_dq(kInterval - 1);
    give_dq(kInterval - 1);
  }
  __syncwarp();
  const float* row = sm.x.before + pinned(t < 2 ? NP + g : g, sm.zero);  // of step s: k_s, or q_{s-1}
  const float* dys =
      sm.zero + pinned(t == 2 ? int(&sm.dy[0][0] - sm.zero) + at.column(0) : at.column(0), sm.zero);  // zero but for t = 2
  const float takes_high = pinned(t == 0 ? 1.f : 0.f, sm.zero), takes_low = pinned(t == 1 ? 1.f : 0.f, sm.zero);
  float x[4] = {0, 0, 0, 0}, one[2] = {M == 1 && upper ? 0.f : 1.f, M == 1 && !upper ? 0.f : 1.f};
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = pinned(x[i], sm.zero);
  one[0] = pinned(one[0], sm.zero), one[1] = pinned(one[1], sm.zero);
  auto rank_one = [&](const float* b) {  // dS += k dr + q' dy': x is dr in lanes t = 0, 1 and dy' in t = 2
#pragma unroll
    for (int q = 0; q < Q; q++) {
      float c[4] = {dS[4 * q], dS[4 * q + 1], dS[4 * q + 2], dS[4 * q + 3]};
      if (M == 1) mma_tf32(c, x[0], x[1], x[2], x[3], b[16 * q], b[16 * q + 8]);
      else mma_tf32(c, x[0], x[1], x[2], x[3], b[8 * q], 0.f);
#pragma unroll
      for (int e = 0; e < 4; e++) dS[4 * q + e] = c[e];
    }
  };
  auto set_x = [&](int m, float y) {
    x[M == 1 ? 0 : m] = y;
    if (M == 1) x[3] = y;
  };
#pragma unroll
  for (int m = 0; m < M; m++) set_x(m, dys[(kInterval - 1) * CB + m * 8]);
  rank_one(sm.x.kq[kInterval - 1] + NP + g);
  float b[R], X[E];
  load_b<P>(b, sm.x.kq[kInterval - 1], t, odd);
#pragma unroll
  for (int s = kInterval - 1; s >= 0; s--) {
    float bn[R], in[M][P::NL], c[P::NS], dwrite[M], Pm[E], write[M], dyp[M], r[M];
    if (s > 0) load_b<P>(bn, sm.x.kq[s > 0 ? s - 1 : 0], t, odd);
#pragma unroll
    for (int m = 0; m < M; m++) {
      dyp[m] = s > 0 ? dys[(s - 1) * CB + m * 8] : 0.f;
      write[m] = sm.write[s][at.column(m)];
      r[m] = P::Cell::backward_uses_r ? sm.retrieved[s][at.column(m)] : 0.f;
    }
    step_inputs<P>(in, c, lines, sm.x, s);
    const bool hold = MayHold && sm.x.hold[s] != 0.f;
#pragma unroll
    for (int e = 0; e < E; e++) {
      const float S = hist[s + 1][e], d = dS[P::c_of(e)];
      Pm[e] = P::Cell::squashes ? d * fmaf(-S, S, 1.f) : d;
      if (MayHold && hold) Pm[e] = 0.f;
    }
    Products<P> sum;
    line_products<P>(sum, Pm, b);
    if (s + 1 < kInterval) turn_second(X);
    float dkeep[M], dscalar[P::NS];
#pragma unroll
    for (int e = 0; e < E; e++) dkeep[P::line_of(e)] = e < M ? Pm[e] * hist[s][e] : fmaf(Pm[e], hist[s][e], dkeep[P::line_of(e)]);
    line_sums<P>(dwrite, sum);
    MatrixLine<float> w[M];
    float dr[M];
#pragma unroll
    for (int m = 0; m < M; m++) {
      if (!P::Cell::scalar_keep) dkeep[m] = line_sum<4>(dkeep[m]);
      w[m] = P::Cell::template line<typename P::Math>(r[m], in[m], c);
      const auto d = P::Cell::template line_backward<typename P::Math>(dkeep[m], dwrite[m], r[m], in[m], c);
      dr[m] = hold ? 0.f : d.dr;
      const float high = __uint_as_float(__float_as_uint(dr[m]) & 0xffffe000u);
      set_x(m, fmaf(dr[m] - high, takes_low, fmaf(high, takes_high, dyp[m])));  // no branch, though it looks like three
#pragma unroll
      for (int i = 0; i < P::NS; i++) {
        const float y = (i == 0 && P::Cell::scalar_keep) || t == 0 ? d.dc[i] : 0.f;
        dscalar[i] = m == 0 ? y : dscalar[i] + y;
      }
      if (t == 0)
#pragma unroll
        for (int l = 0; l < P::NL; l++) sm.dline[l][s][at.column(m)] = hold ? 0.f : d.din[l];
    }
#pragma unroll
    for (int e = 0; e < E; e++) dS[P::c_of(e)] = hold ? dS[P::c_of(e)] : w[P::line_of(e)].keep * Pm[e];
    rank_one(row + s * 2 * NP);
    if (s + 1 < kInterval) weigh(one[0], one[1]);
#pragma unroll
    for (int e = 0; e < E; e++) X[e] = fmaf(hist[s][e], dr[P::line_of(e)], Pm[e] * write[P::line_of(e)]);
    turn_first(X);
    if (s + 1 < kInterval) {
      const float dk = result();
      if (gives) sums[(s + 1) * 2 * NP] = dk;
    }
#pragma unroll
    for (int i = 0; i < P::NS; i++) sm.dscalar[i][s][at.tl] = hold ? 0.f : dscalar[i];
#pragma unroll
    for (int i = 0; i < R; i++) b[i] = bn[i];
  }
  turn_second(X);
  weigh(one[0], one[1]);
  const float dk = result();
  if (gives) sums[0] = dk;
}

template <class P>
__global__ void __launch_bounds__(P::threads, P::tensor&& P::E <= 4 ? 4
                                              : P::threads <= 128   ? 2
                                                                    : 1) backward_kernel(const __grid_constant__ BackwardArgs a) {
  using Store = typename P::Store;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const Place<P> at(a.n);
  if (!at.active) return;
  BackwardShared<P>& sm = reinterpret_cast<BackwardShared<P>*>(shared_bytes)[at.team];
  constexpr int L = P::L, N = P::N, V = P::V, E = N / 4;
  const int T = a.n.T, H = a.n.H, segments = (T + kInterval - 1) / kInterval;
  clear(&sm, at.tl, P::TL);
  float dS[P::E], S0[P::E];
  read_state<P>(S0, a.ds1, at, a.state_line, a.state_row);
#pragma unroll
  for (int e = 0; e < P::E; e++) dS[P::c_of(e)] = S0[e];
  auto stage_all = [&](int seg, int buf) {
    const int t0 = seg * kInterval;
    stage<P>(sm.raw[buf], a.in, a.n, at.b, at.h, at.line0, t0, at.tl);
    stage_rows<P::piece_line, P::CB, P::TL>(&sm.dy_raw[buf][0][0], P::CBP,
                                            static_cast<const Store*>(a.dy) + (int64_t(at.b) * T * H + at.h) * V + at.line0,
                                            int64_t(H) * V, t0, T, V - at.line0, at.tl);
#pragma unroll
    for (int m = 0; m < P::M; m++) {
      const float* from = a.saved + ((at.bh * segments + seg) * V + at.line(m)) * int64_t(N);
      if (at.mine(m))
#pragma unroll
        for (int n = 0; n < P::RV; n++) {
          const int i = (n * L + at.rg) * P::VW;
          if (i < N) __pipeline_memcpy_async(&sm.saved[at.tw][m][n][at.lane][0], from + i, P::VW * 4);
        }
    }
    __pipeline_commit();
  };
  Scalars<P> sc(a.in, at.h);
  sc.fetch(a.in, a.n, at.b, at.h, (segments - 1) * kInterval, at.tl);
  team_sync<P>(at.team);
  stage_all(segments - 1, (segments - 1) & 1);
  float sum_log = 0, sum_bias = 0;
  for (int seg = segments - 1; seg >= 0; seg--) {
    const int t0 = seg * kInterval, count = min(kInterval, T - t0), buf = seg & 1;
    __pipeline_wait_prior(0);
    team_sync<P>(at.team);
    make_ready<P>(sm.x, sm.raw[buf], sc, at.tl);
#pragma unroll
    for (int it = 0; it < (kInterval * P::CB / P::EV + P::TL - 1) / P::TL; it++) {
      const int i = it * P::TL + at.tl, s = i / (P::CB / P::EV), e0 = i % (P::CB / P::EV) * P::EV;
      if ((kInterval * P::CB / P::EV) % P::TL && i >= kInterval * P::CB / P::EV) break;
      float f[P::EV];
      load<P::EV>(f, &sm.dy_raw[buf][s][e0]);
      store<P::EV>(&sm.dy[s][e0], f);
    }
#pragma unroll
    for (int m = 0; m < P::M; m++)
#pragma unroll
      for (int n = 0; n < P::RV; n++) {
        float g[P::VW];
        load<P::VW>(g, &sm.saved[at.tw][m][n][at.lane][0]);
#pragma unroll
        for (int e = 0; e < P::VW; e++) S0[P::element(m, n * P::VW + e)] = g[e];
      }
    team_sync<P>(at.team);
    if (seg > 0) {
      stage_all(seg - 1, buf ^ 1);
      sc.fetch(a.in, a.n, at.b, at.h, t0 - kInterval, at.tl);
    }
    const bool plain = count == kInterval && !a.in.mask;
    if constexpr (P::tensor) {
      if (plain) walk_tensor<P, false>(sm, at, S0, dS);
      else walk_tensor<P, true>(sm, at, S0, dS);
    } else {
      if (plain) walk<P, false>(sm, at, S0, dS);
      else walk<P, true>(sm, at, S0, dS);
      team_sync<P>(at.team);
      sums_over_lines<P>(sm, buf, at);
    }
    team_sync<P>(at.team);

    const int64_t token = int64_t(at.b) * T + t0;
    float* part = P::PARTS > 1 ? a.parts + ((int64_t(at.part) * a.n.B * T + token) * H + at.h) * (2 * N + 2) : nullptr;
    const int64_t part_step = int64_t(H) * (2 * N + 2);
#pragma unroll
    for (int it = 0; it < (2 * kInterval * 4 + P::TL - 1) / P::TL; it++) {  // dk, dq: four lanes a row
      const int i = it * P::TL + at.tl, sub = i & 3, w = (i >> 2) & 1, s = i >> 3;
      if ((2 * kInterval * 4) % P::TL && i >= 2 * kInterval * 4) break;
      float g[E], f[E];
      const float* from = sm.dkq[0][s] + w * P::NP + sub * E;
      const float* unit = sm.x.kq[s] + w * P::NP + sub * E;
#pragma unroll
      for (int e = 0; e < E; e++) {
        g[e] = from[e];
#pragma unroll
        for (int i = 1; i < (P::tensor ? P::WPH : 1); i++) g[e] += from[i * (kInterval * 2 * P::NP) + e];
      }
      if (P::Opt::l2) {
        float along = 0;
#pragma unroll
        for (int e = 0; e < E; e++) along = fmaf(g[e], unit[e], along);
        along += __shfl_xor_sync(~0u, along, 1);
        along += __shfl_xor_sync(~0u, along, 2);
        const float rho = sm.x.rho[w][s];
#pragma unroll
        for (int e = 0; e < E; e++) g[e] = rho * fmaf(-unit[e], along, g[e]);
      }
      if (P::Opt::silu) {
        load<E>(f, (w ? sm.raw[buf].q[s] : sm.raw[buf].k[s]) + sub * E);
#pragma unroll
        for (int e = 0; e < E; e++) g[e] *= silu_derivative(f[e], P::Math::sigmoid(f[e]));
      }
      if (s < count) {
        if constexpr (P::PARTS > 1) {
#pragma unroll
          for (int e = 0; e < E; e++) part[s * part_step + w * N + sub * E + e] = g[e];
        } else {
          store<E>(static_cast<Store*>(w ? a.dq : a.dk) + (token + s) * (w ? a.dq_step : a.dk_step) + at.h * N + sub * E, g);
        }
      }
    }
#pragma unroll
    for (int l = 0; l < P::NL; l++)
#pragma unroll
      for (int it = 0; it < (kInterval * P::CB / P::EV + P::TL - 1) / P::TL; it++) {
        const int i = it * P::TL + at.tl, s = i / (P::CB / P::EV), e0 = i % (P::CB / P::EV) * P::EV, line = at.line0 + e0;
        if ((kInterval * P::CB / P::EV) % P::TL && i >= kInterval * P::CB / P::EV) break;
        float g[P::EV], f[P::EV];
        load<P::EV>(g, &sm.dline[l][s][e0]);
        if (P::Opt::silu && l == 0) {
          load<P::EV>(f, &sm.raw[buf].line[l][s][e0]);
#pragma unroll
          for (int e = 0; e < P::EV; e++) g[e] *= silu_derivative(f[e], P::Math::sigmoid(f[e]));
        }
        if (s < count) {
          Store* to = static_cast<Store*>(a.dline[l]) + (token + s) * a.dline_step[l] + at.h * V + line;
          if constexpr (P::wide) {
            if (line < V) store<P::EV>(to, g);
          } else {
#pragma unroll
            for (int e = 0; e < P::EV; e++)
              if (line + e < V) to[e] = from_float<Store>(g[e]);
          }
        }
      }
#pragma unroll
    for (int it = 0; it < (P::NS * kInterval * 8 + P::TL - 1) / P::TL; it++) {  // eight lanes a scalar
      const int i = it * P::TL + at.tl, w = i / (kInterval * 8), s = i / 8 % kInterval, sub = i % 8;
      if ((P::NS * kInterval * 8) % P::TL && i >= P::NS * kInterval * 8) break;
      float d = 0;
#pragma unroll
      for (int e = 0; e < P::TL / 8; e++) d += sm.dscalar[w][s][e * 8 + sub];
      d += __shfl_xor_sync(~0u, d, 1);
      d += __shfl_xor_sync(~0u, d, 2);
      d += __shfl_xor_sync(~0u, d, 4);
      if (sub == 0 && s < count) {
        const bool first = w == 0;
        const ScalarKind kind = first ? P::kind0 : P::kind1;
        const ScalarGrad<float> g = scalar_adjoint<typename P::Math>(kind, d, sm.x.scalar[w][s], sm.x.raw[w][s], sc.rate, sc.bias);
        if (P::mamba && first) sum_log += g.da_log, sum_bias += g.dx;
        if constexpr (P::PARTS > 1) part[s * part_step + 2 * N + w] = g.dx;
        else {
          const int64_t to = (token + s) * (first ? a.dscalar_step[0] : a.dscalar_step[1]) + at.h;
          void* d = first ? a.dscalar[0] : a.dscalar[1];
          if (kind == ScalarKind::given) static_cast<float*>(d)[to] = g.dx;
          else static_cast<Store*>(d)[to] = from_float<Store>(g.dx);
        }
      }
    }
  }
#pragma unroll
  for (int e = 0; e < P::E; e++) S0[e] = dS[P::c_of(e)];
  write_state<P>(a.ds0, S0, at, a.state_line, a.state_row);
  if constexpr (P::mamba) {  // the per-lane sums over time, added up in a fixed order
    team_sync<P>(at.team);
    float* x = &sm.dscalar[0][0][0];
    x[at.tl] = sum_log, x[P::TL + at.tl] = sum_bias;
    team_sync<P>(at.team);
    if (at.tl < 2) {
      float d = 0;
      for (int i = 0; i < P::TL; i++) d += x[at.tl * P::TL + i];
      a.dhead[((int64_t(at.part) * 2 + at.tl) * a.n.B + at.b) * H + at.h] = d;
    }
  }
}

// Adds up the parts of a head, in order.
template <class P>
__global__ void __launch_bounds__(256) add_parts_kernel(const __grid_constant__ BackwardArgs a) {
  using Store = typename P::Store;
  constexpr int N = P::N, W = 2 * N + 2;
  const int64_t rows = int64_t(a.n.B) * a.n.T * a.n.H, total = rows * W;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t row = i / W, token = row / a.n.H;
    const int e = int(i % W), h = int(row % a.n.H);
    if (e >= 2 * N + P::NS) continue;
    float d = 0;
    for (int p = 0; p < P::PARTS; p++) d += a.parts[p * total + i];
    if (e < N) static_cast<Store*>(a.dk)[token * a.dk_step + h * N + e] = from_float<Store>(d);
    else if (e < 2 * N) static_cast<Store*>(a.dq)[token * a.dq_step + h * N + e - N] = from_float<Store>(d);
    else {
      const int w = e - 2 * N;
      const int64_t to = token * a.dscalar_step[w] + h;
      if ((w ? P::kind1 : P::kind0) == ScalarKind::given) static_cast<float*>(a.dscalar[w])[to] = d;
      else static_cast<Store*>(a.dscalar[w])[to] = from_float<Store>(d);
    }
  }
}

// ---- launches: return cudaSuccess, or the error -------------------------------------------------------------------------------
template <class P>
constexpr size_t forward_shared() {
  return P::HB * sizeof(ForwardShared<P>);
}
template <class P>
constexpr size_t backward_shared() {
  return P::HB * sizeof(BackwardShared<P>);
}

template <class K>
cudaError_t allow_shared(K kernel, size_t bytes) {
  int device, most;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (e != cudaSuccess) return e;
  if (bytes > size_t(most)) return cudaErrorInvalidConfiguration;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
}

template <class P>
cudaError_t launch_forward(ForwardArgs a, cudaStream_t stream) {
  a.n.units = int64_t(a.n.B) * a.n.H * P::PARTS;
  if (cudaError_t e = allow_shared(forward_kernel<P>, forward_shared<P>()); e != cudaSuccess) return e;
  forward_kernel<P><<<unsigned((a.n.units + P::HB - 1) / P::HB), P::threads, forward_shared<P>(), stream>>>(a);
  return cudaGetLastError();
}

template <class P>
cudaError_t launch_backward(BackwardArgs a, cudaStream_t stream) {
  a.n.units = int64_t(a.n.B) * a.n.H * P::PARTS;
  if (cudaError_t e = allow_shared(backward_kernel<P>, backward_shared<P>()); e != cudaSuccess) return e;
  backward_kernel<P><<<unsigned((a.n.units + P::HB - 1) / P::HB), P::threads, backward_shared<P>(), stream>>>(a);
  cudaError_t e = cudaGetLastError();
  if (e != cudaSuccess || P::PARTS == 1) return e;
  const int64_t total = int64_t(a.n.B) * a.n.T * a.n.H * (2 * P::N + 2), blocks = (total + 255) / 256;
  add_parts_kernel<P><<<unsigned(blocks < 65536 ? blocks : 65536), 256, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace elman::matrix
