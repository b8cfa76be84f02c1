// One time step of a matrix state without gradients, for decoding: it reads and writes the state once, and nothing else takes
// time.
//
// A block has all rows of some columns of a head. A thread has a few of its rows, of up to four adjacent columns, in registers; a sum over rows takes
// shuffles and one exchange between warps. With few heads, blocks are narrow (a sector of memory), so that every multiprocessor reads a part of the
// state; with many they are wide, since each block prepares the vectors of its head again. Sums are fp32, without tensor cores.
#pragma once

#include <elman/decode_ptx.cuh>
#include <elman/launch.cuh>
#include <elman/matrix_state_call.h>

#include "matrix_state_inputs.cuh"

namespace elman::matrix {

constexpr int power_from(int least, int x) { return x <= least ? least : power_from(2 * least, x); }

template <int N_, int V_, class Store_, class Cell_, class Options_, int columns_>
struct StepPlan : Plan<N_, V_, Store_, Cell_, Options_> {
  using Base = Plan<N_, V_, Store_, Cell_, Options_>;
  using Base::N, Base::V;
  static constexpr int E = V % 4 == 0 ? 4 : V % 2 == 0 ? 2 : 1;  // adjacent columns of a thread
  static constexpr int columns = columns_, blocks = (V + columns - 1) / columns;  // of a block; of a head
  static constexpr int across = columns / E;  // threads that share rows
  static constexpr int down = power_from(32 / across, N < 128 / across ? N : 128 / across);  // threads that share columns
  static constexpr int threads = across * down, warps = threads / 32, rows = (N + down - 1) / down;
  static_assert(columns <= 32 && across * E == columns && 32 % across == 0);
};

template <class P>
struct StepShared {
  alignas(16) float vector[P::slots][P::N];  // k, q, then p, g and l if they exist
  alignas(16) float line[P::NL][P::columns];
  alignas(16) float par[P::AC][P::columns];
  alignas(16) float share[3][P::warps][P::columns];  // of sums over rows, from each warp: of r, the energy and o
  float c[P::AS];
};

template <class T>
__device__ __forceinline__ const T* place(std::uint64_t address, std::int64_t i) {
  return reinterpret_cast<const T*>(address) + i;
}
// Loads an element of the storage type, or a float. Another kernel may have written it since this one began.
template <class P>
__device__ __forceinline__ float fetch(std::uint64_t address, std::int64_t i, bool full) {
  return full ? decode::load_fresh(place<float>(address, i)) : decode::load_fresh(place<typename P::Store>(address, i));
}
template <int E>
__device__ __forceinline__ void fetch_state(float (&f)[E], const float* p) {
  if constexpr (E == 4) {
    const uint4 x = decode::load_fresh(static_cast<const void*>(p));
    f[0] = __uint_as_float(x.x), f[1] = __uint_as_float(x.y), f[2] = __uint_as_float(x.z), f[3] = __uint_as_float(x.w);
  } else {
#pragma unroll
    for (int e = 0; e < E; e++) f[e] = decode::load_fresh(p + e);
  }
}

template <int E>
__device__ __forceinline__ void put_state(float* p, const float (&f)[E]) {
#if defined(__CUDA_ARCH__) && defined(__CUDACC__)
  if constexpr (E == 4) {  // the compiler would split a `store` into four
    asm volatile("st.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(p), "f"(f[0]), "f"(f[1]), "f"(f[2]), "f"(f[3]) : "memory");
    return;
  }
#endif
  store<E>(p, f);
}

// One warp computes k (w = 0) with p, or q.
template <class P>
__device__ __forceinline__ void step_key(StepShared<P>& sm, const MatrixCall& a, int w, std::int64_t b, std::int64_t h, int lane) {
  constexpr int each = (P::N + 31) / 32;
  const CallRows& from = w ? a.q : a.k;
  const std::int64_t first = b * from.step + h * (w ? P::QH : P::KH);
  float f[each], p[each], sum = 0;
#pragma unroll
  for (int j = 0; j < each; j++) {
    const int i = j * 32 + lane;
    f[j] = i < P::N ? fetch<P>(from.address, first + i, false) : 0.f;
    if constexpr (P::reads) {
      const CallRows& read = a.vector[P::Cell::read_vector];
      p[j] = w == 0 && i < P::N ? fetch<P>(read.address, b * read.step + h * P::N + i, P::wide_vector(P::Cell::read_vector)) : 0.f;
    }
  }
#pragma unroll
  for (int j = 0; j < each; j++) {
    if (of_key(P::Opt::silu, w)) f[j] = silu_of<typename P::Math>(f[j]);
    sum = fmaf(f[j], f[j], sum);
  }
  const float rho = of_key(P::Opt::l2, w) ? rsqrtf(line_sum<32>(sum) + float(kNormEps)) : 1.f;
#pragma unroll
  for (int j = 0; j < each; j++) {
    const int i = j * 32 + lane;
    if (i >= P::N) continue;
    sm.vector[w][i] = f[j] * rho;
    if constexpr (P::reads)
      if (w == 0) sm.vector[P::at_p][i] = P::Cell::reads_with_k ? p[j] * sm.vector[0][i] : p[j];
  }
}

// One warp computes the further vectors, with all of their loads in flight at once.
template <class P>
__device__ __forceinline__ void step_vectors(StepShared<P>& sm, const MatrixCall& a, std::int64_t b, std::int64_t h, int lane) {
  constexpr int each = (P::N + 31) / 32, keep = P::keeps ? P::Cell::keep_vector : 0,
                second = P::seconds ? P::Cell::second_vector : 0;
  float g[each], l[each];
#pragma unroll
  for (int j = 0; j < each; j++) {
    const int i = j * 32 + lane;
    if (i >= P::N) continue;
    if constexpr (P::keeps) g[j] = fetch<P>(a.vector[keep].address, b * a.vector[keep].step + h * P::N + i, P::wide_vector(keep));
    if constexpr (P::seconds)
      l[j] = fetch<P>(a.vector[second].address, b * a.vector[second].step + h * P::N + i, P::wide_vector(second));
  }
#pragma unroll
  for (int j = 0; j < each; j++) {
    const int i = j * 32 + lane;
    if (i >= P::N) continue;
    if constexpr (P::keeps) sm.vector[P::at_g][i] = g[j];
    if constexpr (P::seconds) sm.vector[P::at_l][i] = l[j];
  }
}

template <class P>
__device__ __forceinline__ void step_scalars(StepShared<P>& sm, const MatrixCall& a, std::int64_t b, std::int64_t h, int i) {
  if (i >= P::NS) return;
  const ScalarKind kind = i == 0 ? P::kind0 : i == 1 ? P::kind1 : P::kind2;
  const float x = fetch<P>(a.scalar[i].address, b * a.scalar[i].step + h, kind == ScalarKind::given);
  float rate = 0, bias = 0;
  if (P::mamba && i == 0) rate = expf(fetch<P>(a.A_log, h, true)), bias = fetch<P>(a.dt_bias, h, true);
  sm.c[i] = scalar_map<typename P::Math>(kind, x, rate, bias);
}

// One lane computes the inputs of one column.
template <class P>
__device__ __forceinline__ void step_lines(StepShared<P>& sm, const MatrixCall& a, std::int64_t b, std::int64_t h, int first,
                                           int lane) {
  const int line = first + lane;
  if (lane >= P::columns) return;
  float in[P::NI], par[kMostParams] = {};
#pragma unroll
  for (int l = 0; l < P::NI; l++) {
    in[l] = line < P::V ? fetch<P>(a.line[l].address, b * a.line[l].step + h * P::line_head(l) + line, false) : 0.f;
    if (of_line(P::Opt::silu, l)) in[l] = silu_of<typename P::Math>(in[l]);
  }
#pragma unroll
  for (int i = 0; i < P::Cell::params; i++) par[i] = line < P::V ? fetch<P>(a.param[i], h * P::V + line, true) : 0.f;
  if constexpr (P::folds) {
    float folded[P::NL];
    P::Cell::template fold<typename P::Math>(folded, in, par);
#pragma unroll
    for (int l = 0; l < P::NL; l++) sm.line[l][lane] = folded[l];
  } else {
#pragma unroll
    for (int l = 0; l < P::NL; l++) sm.line[l][lane] = in[l];
#pragma unroll
    for (int i = 0; i < P::NC; i++) sm.par[i][lane] = par[i];
  }
}

// Sums x over the rows of its columns, for all threads, in a fixed order.
template <class P>
__device__ __forceinline__ void sum_rows(float (&x)[P::E], float (*shares)[P::columns]) {
  const int lane = threadIdx.x % 32, at = threadIdx.x % P::across * P::E;
#pragma unroll
  for (int m = P::across; m < 32; m *= 2)
#pragma unroll
    for (int e = 0; e < P::E; e++) x[e] += __shfl_xor_sync(~0u, x[e], m);
  if constexpr (P::warps > 1) {
    if (lane < P::across) store<P::E>(&shares[threadIdx.x / 32][at], x);
    __syncthreads();
#pragma unroll
    for (int e = 0; e < P::E; e++) x[e] = 0;
#pragma unroll
    for (int w = 0; w < P::warps; w++) {
      float share[P::E];
      load<P::E>(share, &shares[w][at]);
#pragma unroll
      for (int e = 0; e < P::E; e++) x[e] += share[e];
    }
  }
}

template <class P>
__global__ void __launch_bounds__(P::threads, 1024 / P::threads) step_kernel(const __grid_constant__ MatrixCall a) {
  using Cell = typename P::Cell;
  using Math = typename P::Math;
  constexpr int E = P::E;
  StepShared<P>& sm = *reinterpret_cast<StepShared<P>*>(dynamic_shared());
  decode::let_next_begin();
  const unsigned head = blockIdx.x / P::blocks, heads = static_cast<unsigned>(a.heads), b = head / heads, h = head % heads;
  const int first = static_cast<int>(blockIdx.x % P::blocks) * P::columns;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, at = threadIdx.x % P::across * E, column = first + at;
  const int row0 = threadIdx.x / P::across;
  const bool mine = column < P::V;
  const std::int64_t where = (std::int64_t(head) * P::N + row0) * P::V + column;
  const float* from = place<float>(a.S0, where);
  const auto each_row = [&](auto work) {
#pragma unroll
    for (int i = 0; i < P::rows; i++) {
      const int row = row0 + i * P::down;
      if (P::N % P::down == 0 || row < P::N) work(i, row);
    }
  };

  decode::wait_for_previous();
  const bool begins = !a.S0 || (a.starts && decode::load_fresh(place<unsigned char>(a.starts, b)));
  float S[P::rows][E] = {};
  each_row([&](int i, int) {
    if (mine && !begins) fetch_state<E>(S[i], from + i * (P::down * P::V));
  });
  const bool hold = a.mask && !decode::load_fresh(place<unsigned char>(a.mask, b));
  for (int job = warp; job < 4; job += P::warps) {
    if (job < 2) step_key<P>(sm, a, job, b, h, lane);
    if (job == 2) {
      step_lines<P>(sm, a, b, h, first, lane);
      step_scalars<P>(sm, a, b, h, lane);
    }
    if (job == 3) step_vectors<P>(sm, a, b, h, lane);
  }
  __syncthreads();

  float r[E] = {}, energy[E] = {};
  each_row([&](int i, int row) {
#pragma unroll
    for (int e = 0; e < E; e++) {
      if (Cell::retrieves) r[e] = fmaf(sm.vector[P::at_p][row], S[i][e], r[e]);
      if (Cell::energy) energy[e] = fmaf(S[i][e], S[i][e], energy[e]);
    }
  });
  if constexpr (Cell::retrieves) sum_rows<P>(r, sm.share[0]);
  if constexpr (Cell::energy) sum_rows<P>(energy, sm.share[1]);

  MatrixLine<float> w[E];
#pragma unroll
  for (int e = 0; e < E; e++) {
    float in[P::NL], par[P::AC];
#pragma unroll
    for (int l = 0; l < P::NL; l++) in[l] = sm.line[l][at + e];
#pragma unroll
    for (int i = 0; i < P::NC; i++) par[i] = sm.par[i][at + e];
    w[e] = Cell::template line<Math, float>({r[e], in, sm.c, par, energy[e] * (1.f / P::N)});
  }
  float o[E] = {};
  float* const to = reinterpret_cast<float*>(a.s1) + where;
  each_row([&](int i, int row) {
    const float k = sm.vector[0][row], q = sm.vector[1][row];
#pragma unroll
    for (int e = 0; e < E; e++) {
      float s = S[i][e];
      if constexpr (Cell::elementwise) s = Cell::template element<Math>(s, k, w[e]);
      else s = fmaf(k, w[e].write, w[e].keep * (P::keeps ? sm.vector[P::keeps ? P::at_g : 0][row] * s : s));
      if (P::seconds) s = fmaf(sm.vector[P::seconds ? P::at_l : 0][row], w[e].second, s);
      if (squashes<Cell>(sm.c)) s = Math::tanh(s);
      S[i][e] = hold ? S[i][e] : s;
      o[e] = fmaf(q, S[i][e], o[e]);
    }
    if (mine) put_state<E>(to + i * (P::down * P::V), S[i]);
  });
  sum_rows<P>(o, sm.share[2]);
  if (threadIdx.x < P::across && mine) store<E>(reinterpret_cast<typename P::Store*>(a.o) + std::int64_t(head) * P::V + column, o);
}

// Whether the kernel may start while the previous one ends.
#if defined(__CUDA_ARCH_LIST__)
constexpr bool kEarly = kArchitecture >= 900;
#else
constexpr bool kEarly = true;
#endif

template <class P>
cudaError_t launch_step(const MatrixCall& a) {
  return start(step_kernel<P>, a, a.batch * a.heads * P::blocks, P::threads, sizeof(StepShared<P>), kEarly,
               reinterpret_cast<cudaStream_t>(a.stream));
}

}  // namespace elman::matrix
