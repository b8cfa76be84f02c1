// Arguments of a launch, contents of shared memory, and a thread's part of a problem.
#pragma once

#include <cstdint>
#include <type_traits>

#include <elman/launch.cuh>

#include "matrix_state_plan.cuh"

namespace elman::matrix {

struct Sizes {
  int B, T, H;
  int64_t units;  // B * H * PARTS
};

struct Inputs {
  const void* k;  // [B,T,H,N], heads and elements contiguous, `_step` elements from one time step to the next; [B,T,N] if shared
  const void* q;
  const void* line[kMostLines];  // [B,T,H,V]; [B,T,V] if shared
  const void* scalar[2];  // [B,T,H]; fp32 if given, else storage type
  int64_t k_step, q_step, line_step[kMostLines], scalar_step[2];
  const float* a_log;  // [H], for ScalarKind::mamba
  const float* dt_bias;  // [H]
  const unsigned char* mask;  // [B,T], 0 = hold the state; may be null
};

struct Vectors {  // vectors besides k and q, laid out as k
  const void* x[kMostVectors];
  int64_t step[kMostVectors];
};

struct ThirdScalar {  // and its gradient; the last arguments, so that cells without it find all others where they were
  const void* x;
  void* dx;
  int64_t step, dx_step;
};

struct ForwardArgs {
  Sizes n;
  Inputs in;
  const float* s0;  // state, may be null (zero)
  float* s1;
  int64_t state_line, state_row;  // strides of a state inside a head
  void* o;  // [B,T,H,V] contiguous
  void* saved;  // laid out by Saved, may be null
  const float* param[kMostParams];  // [H,V]
  Vectors more;
  const unsigned char* starts;  // [B,T], 1 = the state is 0 before the step; read if P::packed
  ThirdScalar third;
};

struct BackwardArgs {
  Sizes n;
  Inputs in;
  const void* dy;  // [B,T,H,V] contiguous
  const void* saved;
  const float* ds1;  // may be null (zero)
  float* ds0;  // may be null
  int64_t state_line, state_row;
  void* dk;  // laid out as the inputs, with its own step; for a shared vector, each head's share
  void* dq;
  void* dline[kMostLines];
  void* dscalar[2];
  int64_t dk_step, dq_step, dline_step[kMostLines], dscalar_step[2];
  float* dhead;  // [PARTS,2,B,H]: sums over time of the gradients of A_log and dt_bias; mamba only
  float* parts;  // [PARTS, B*T*H, part_width] if PARTS > 1: incomplete sums over lines
  const float* param[kMostParams];
  float* dparam[kMostParams];  // [B,H,V]: sums over time
  Vectors more;
  void* dvector[kMostVectors];
  int64_t dvector_step[kMostVectors];
  const unsigned char* starts;  // as in ForwardArgs
  ThirdScalar third;
};

template <class P>
struct Staging {
  alignas(16) typename P::Store k[P::steps][P::N];
  alignas(16) typename P::Store q[P::steps][P::N];
  alignas(16) typename P::Store line[P::NI][P::steps][P::CB];
  alignas(16) unsigned char vector[P::NX][P::steps][P::N * P::vector_size];  // rows in the type in memory
};
// Operands for sixteen steps at once (matrix_state_blocked.cuh). Each is two bf16 numbers, hi + lo.
constexpr int kSquare = 24;  // padded row of a 16 x 16 matrix: eight rows begin in different banks
template <class P>
struct Block {
  static constexpr int rows = (P::N + 15) / 16 * 16, pitch = rows + 8;
  alignas(16) unsigned short k[2][16][pitch];
  alignas(16) unsigned short q[2][16][pitch];
  alignas(16) unsigned short p[2][16][kSquare];  // W(t,i) q_t k_i
  alignas(16) unsigned short r[P::broad ? 0 : 2][16][kSquare];  // W(t-1,i) k_t k_i
  alignas(16) unsigned short t[2][16][kSquare];  // the transpose of T
  alignas(16) float unsolved[16][20];            // the transpose of 1 + b W K K^T, below its diagonal
  alignas(16) float products[16][17];                 // q_t k_i at (t, i), k_t k_i for i < t at (i, t)
  float weight[2][16][18], keep[16], slope[16], decayed[17];  // W(t,i); b; D before each step, and after the last
  float behind[16], all;  // early: W(15,i), 0 for held steps; D after the last
};
struct NoBlock {};
// Gradients of vectors in a row of `parts`.
template <class P, class T>
__device__ __forceinline__ auto* vectors_of(T* row) {
  using Store = std::conditional_t<P::blocked, typename P::Store, float>;
  return reinterpret_cast<std::conditional_t<std::is_const_v<T>, const Store, Store>*>(row);
}
template <class P>
struct Ready : std::conditional_t<P::blocked, Block<P>, NoBlock> {
  // The k after the last step is read, but not used.
  alignas(16) float kq[P::blocked ? 0 : P::steps + P::looks_ahead][P::slots * P::Q];
  alignas(16) float line[P::NL][P::steps][P::line_pitch];
  float scalar[P::AS][P::steps];
  float hold[P::steps];
  float rho[2][P::steps];
  float raw[P::AS][P::steps];
  float fresh[P::packed ? P::steps : 0];  // 1: the state is 0 before the step, held or not
};
template <class P>
struct ForwardShared {
  Ready<P> x[P::ready_buffers];
  Staging<P> raw[P::buffers];
  static constexpr int results = P::straight || P::blocked ? 0 : P::keeps_r ? 2 : 1;  // o, then r
  alignas(16) float out[results * P::buffers][P::WPH][P::steps][P::tensor ? P::C + 4 : 36];
};
template <class P, bool tensor = P::tensor>
struct Sums {  // results of a walk, to be summed over lines
  alignas(16) float s[P::steps + 1][P::CB][P::NP];
  alignas(16) float p[P::steps][P::CB][P::NP];
  alignas(16) float dr[P::steps + 1][P::CB];
  alignas(16) float write[P::writes][P::steps][P::CB];
  alignas(16) float keep[P::keeps ? P::steps : 0][P::CB];
  alignas(16) float dkq[P::steps][P::slots * P::NP];
};
template <class P>
struct Sums<P, true> {
  // Each warp's sums over its lines: dk and further vectors, and dq of the previous step. In a large head, (dk, dq) as a word of the storage type, and
  // likewise (dg, dp) and (-, dl). If blocked: dk of each step, then dq, two elements per word.
  using Row =
      std::conditional_t<P::large, unsigned[P::blocked ? Block<P>::rows / 2 + 4 : P::words * P::NP], float[P::slots * P::NP]>;
  alignas(16) Row dkq[P::result_buffers][P::WPH][P::blocked ? 2 * P::steps : P::steps + 1];
  // If blocked, from each warp: do_t u_i at (t, i), y_t u_i for i < t at (i, t); y_t S^T k_t, do_t S^T q_t, u_t G^T k_t; <S, G>.
  alignas(16) float passing[P::blocked ? P::WPH : 0][16][17];
  float ends[P::blocked ? P::WPH : 0][3][16], inner[P::blocked ? P::WPH : 0];
};
template <class P>
struct SavedState {  // in the order in which each lane reads it
  alignas(16) typename P::Kept x[P::tight ? 0 : P::buffers][P::WPH][P::M][P::RV][32][P::VW];
};
// Takes a saved state to the one before the next segment: keys, as in a Block; writes of the steps times the keeps after them; the product of all keeps.
template <class P>
struct Passage {
  alignas(16) unsigned short k[2][16][Block<P>::pitch];
  alignas(16) float write[16][P::line_pitch];
  float keep;
};
template <class P>
struct History {  // the states before the steps of a segment: each lane's part, in words of two rows of a line
  static constexpr int words = P::E / 2, piece = words % 4 ? 2 : 4;
  alignas(16) unsigned x[P::steps][P::WPH][words / piece][32][piece];
};
template <class P>
struct BackwardShared : Sums<P> {
  Ready<P> x[P::ready_buffers];
  alignas(16) float dline[P::large || P::tight ? 0 : P::buffers][P::NL][P::steps][P::CB];  // otherwise in place of `line` in `x`
  alignas(16) float dscalar[P::result_buffers][P::NS][P::steps]
                           [P::large || P::tight ? P::shares : P::shares + 8];  // 8: so that rows start in different banks
  Staging<P> raw[P::raw_buffers];
  alignas(16) typename P::Store dy[P::raw_buffers][P::steps][P::row_pitch];
  alignas(16) typename P::Store r[P::keeps_r ? P::raw_buffers : 1][P::keeps_r ? P::steps : 1][P::row_pitch];
  using Reached = std::conditional_t<P::passage, Passage<P>, NoBlock>;
  std::conditional_t<P::blocked, Reached, std::conditional_t<P::large, History<P>, SavedState<P>>> states;
  __device__ __forceinline__ float* line_gradients(int buf, int l) {
    if constexpr (P::large || P::tight) return x[buf].line[l][0];
    else return dline[buf][l][0];
  }
};

// Whether a document begins at step s. Segments that run without `MayHold` have no such step.
template <class P, bool MayHold = true>
__device__ __forceinline__ bool begins(const Ready<P>& x, int s) {
  if constexpr (P::packed && MayHold) return x.fresh[s] != 0.f;
  return false;
}
// Whether a step of a segment may be held or begin a document; the same for all lanes of a warp.
template <class P>
__device__ __forceinline__ bool special(const Ready<P>& x, const unsigned char* mask, int lane) {
  if constexpr (P::packed) return mask || __any_sync(~0u, x.fresh[lane % P::steps] != 0.f);
  return mask != nullptr;
}

// `lines`: this lane's first line in step 0.
template <class P>
__device__ __forceinline__ void step_inputs(float (&in)[P::M][P::NL], float (&c)[P::AS], const float* lines, const Ready<P>& x,
                                            int s) {
#pragma unroll
  for (int l = 0; l < P::NL; l++) {
    float v[P::M];
    load<P::M>(v, lines + (l * P::steps + s) * P::CB);
#pragma unroll
    for (int m = 0; m < P::M; m++) in[m][l] = v[m];
  }
#pragma unroll
  for (int i = 0; i < P::NS; i++) c[i] = x.scalar[i][s];
}

// The learned constants of a lane's lines.
template <class P>
using Constants = float[P::M][P::AC];

// A sum over time, compensated for its rounding errors (Kahan): they are 1e-6 of a plain float32 sum of 2,000 steps.
struct LongSum {
  float sum = 0, lost = 0;
  __device__ __forceinline__ void operator+=(float x) {
    const float more = x - lost, next = sum + more;
    lost = (next - sum) - more;
    sum = next;
  }
  __device__ __forceinline__ operator float() const { return sum; }
};
// A sum over time of gradients of learned constants. With 16-bit storage, a plain sum errs less than the rest of the gradient.
template <class P>
using TimeSum = std::conditional_t<std::is_same_v<typename P::Store, float> && P::Cell::params != 0, LongSum, float>;
template <class P>
using ConstantSums = TimeSum<P>[P::M][P::AC];

// Signal `i`: the walk no longer needs its states. Walking warps send it, helpers wait for it.
template <class P, bool waits>
__device__ __forceinline__ void signal(int team, int i) {
  const int number = 2 * P::HB + 1 + team * P::signals + i;
  if (waits) team_barrier(number, 2 * P::TL);
  else tell_barrier(number, 2 * P::TL);
}
// Synchronises all threads of a head, helpers included.
template <class P>
__device__ __forceinline__ void team_sync(int team) {
  if constexpr (P::helped) team_barrier(team + 1, 2 * P::TL);
  else if constexpr (P::WPH == 1) __syncwarp();
  else if constexpr (P::HB == 1) __syncthreads();
  else team_barrier(team + 1, P::TL);
}
// Synchronises the helpers of a head.
template <class P>
__device__ __forceinline__ void helpers_sync(int team) {
  if constexpr (P::WPH == 1) __syncwarp();
  else team_barrier(P::HB + team + 1, P::TL);
}

template <class S>
__device__ __forceinline__ void clear(S* s, int i, int step) {
  static_assert(sizeof(S) % 16 == 0);
  for (int j = i; j < int(sizeof(S) / 16); j += step) reinterpret_cast<uint4*>(s)[j] = make_uint4(0, 0, 0, 0);
}

// Heads per block of the forward. If the launch may choose: one block per multiprocessor, and equal blocks in a wave.
template <class P>
int forward_heads(int64_t units) {
  if constexpr (!P::straight) return P::HB;
  const int64_t at_once = multiprocessors(), waves = (units + at_once * P::HB - 1) / (at_once * P::HB);
  return int((units + at_once * waves - 1) / (at_once * waves));
}

template <class P>
struct Place {
  int lane, team, tw, tl, rg, cg, b, h, part, line0;
  int64_t bh;
  bool active, helper;  // active: the team has work
  __device__ __forceinline__ Place(const Sizes& n) {
    const int own = P::straight ? blockDim.x / 64 : P::own, heads = P::straight ? own / P::WPH : P::HB;
    const int warp = threadIdx.x / 32 % own;
    helper = threadIdx.x >= own * 32;
    lane = threadIdx.x % 32, team = warp / P::WPH, tw = warp % P::WPH, tl = tw * 32 + lane, rg = lane % P::L, cg = lane / P::L;
    const int64_t unit = int64_t(blockIdx.x) * heads + team;
    active = team < heads && unit < n.units;
    part = int(unit % P::PARTS), bh = unit / P::PARTS;
    b = int(bh / n.H), h = int(bh % n.H);
    line0 = part * P::CB;
  }
  __device__ __forceinline__ int column(int m) const { return tw * P::C + cg * P::M + m; }  // in the team
  __device__ __forceinline__ int line(int m) const { return line0 + column(m); }
  __device__ __forceinline__ bool mine(int m) const { return line(m) < P::V; }
};

// Memory that the forward saves for the backward: the state before every segment, [B,H,segments,V,N] float. If P::keeps_r, one
// row of the storage type per batch row: these states [H,segments,V,N] and the retrieved values [T,H,V], padded to a multiple
// of 8 elements.
template <class P>
struct Saved {
  int64_t states, row;
  int segments;
  __device__ __forceinline__ explicit Saved(const Sizes& n) {
    segments = (n.T + P::interval - 1) / P::interval;
    states = int64_t(n.H) * segments * P::V * P::N;
    row = (states + int64_t(n.T) * n.H * P::V + 7) / 8 * 8;
  }
  __device__ __forceinline__ int64_t state(const Place<P>& at, int seg, int line) const {
    if constexpr (P::keeps_r) return at.b * row + ((int64_t(at.h) * segments + seg) * P::V + line) * P::N;
    else return ((at.bh * segments + seg) * P::V + line) * int64_t(P::N);
  }
  __device__ __forceinline__ int64_t retrieved(int b) const { return b * row + states; }
};

}  // namespace elman::matrix
