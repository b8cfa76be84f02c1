// Sixteen steps of a cell without tanh at once (Plan::blocked). A step retrieves r and writes u = a - b r. W(t,i) is the product of the keeps of
// steps i + 1 to t; D_t is the product of the keeps of all steps of the segment up to t. With S the state before the segment,
//
//   r_t = D_{t-1} S^T k_t + sum_{i<t} W(t-1,i) (k_t k_i) u_i      so that U = T (a - b D K S), T the inverse of 1 + b W K K^T below the diagonal
//   o_t = D_t S^T q_t + sum_{i<=t} W(t,i) (q_t k_i) u_i           S' = D S + sum_i W(last,i) k_i u_i^T
//
// and, walking back, with G the gradient of S' and y_t = dr_t = -b_t w_t, w_t = dwrite_t,
//
//   w = T^T (W(last,t) G^T k_t + sum_{j>=t} W(j,t) (q_j k_t) do_j)
//   dS = D G + sum_j D_j q_j do_j^T + sum_j D_{j-1} k_j y_j^T
//   dq_t = D_t S do_t + sum_{i<=t} W(t,i) (do_t u_i) k_i
//   dk_t = W(last,t) G u_t + D_{t-1} S y_t + sum_{j>=t} W(j,t) (do_j u_t) q_j + sum_{j>t} W(j-1,t) (y_j u_t) k_j + sum_{i<t} W(t-1,i) (y_t u_i) k_i
//
// Segments run one after another, like the steps of other cells; within a segment, everything is a product. Nothing is divided
// by a keep, because W consists of products. Where a document begins, the keep is 0 and r is 0. The gradient of a keep sums
// every path across its step: from the earlier state or an earlier write, to a later readout, a later write or the later state.
// A NaN or infinity can spread to all steps of its segment, except from k, v or a scalar of a held step.
//
// A warp has 16 lines; lane (g, t) has lines g and g + 8. S^T and G^T stay in fp32 accumulators of 16 lines x 8 rows. Operands are bf16. Operands of a
// state, of o and of r are hi + lo, in three products; in fp16 all operands are.
#pragma once

#include "matrix_state_inputs.cuh"

namespace elman::matrix {

template <class P>
constexpr int kTiles = Block<P>::rows / 8;
template <class P>
using Lines = float[kTiles<P>][4];  // a state: [n][e] is line g + 8 (e / 2), row 8 n + 2 t + e % 2
using Steps = float[2][4];  // a number for each line and step: [n][e] is line g + 8 (e / 2), step 8 n + 2 t + e % 2
using Operand = unsigned[4];  // 16 x 16: a left operand, or two right operands side by side
using Both = unsigned[2][4];  // hi, lo

__device__ __forceinline__ void split(unsigned& high, unsigned& low, float x, float y) {
  high = pack(x, y, bf16());
  low = pack(x - unpack(high, 0, bf16()), y - unpack(high, 1, bf16()), bf16());
}
__device__ __forceinline__ void split(Both& to, const float (&x)[4], const float (&y)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float (&from)[4] = i < 2 ? x : y;
    split(to[0][i], to[1][i], from[i % 2 * 2], from[i % 2 * 2 + 1]);
  }
}
// Splits words of the storage type. bf16 has no low part.
template <class P>
constexpr bool kExact = std::is_same_v<typename P::Store, bf16>;
template <class P>
__device__ __forceinline__ void as_operand(Both& to, const Operand& x) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (kExact<P>) to[0][i] = x[i], to[1][i] = 0;
    else split(to[0][i], to[1][i], unpack(x[i], 0, typename P::Store()), unpack(x[i], 1, typename P::Store()));
  }
}
__device__ __forceinline__ void multiply(float (&c)[2][4], const Operand& a, const Operand& b) {
  mma_16x8x16<bf16>(c[0], a, b[0], b[1]), mma_16x8x16<bf16>(c[1], a, b[2], b[3]);
}
// Which operands use split precision (hi + lo). The product of two low parts is left out.
enum class Of { both, left, right, neither };
template <Of of>
__device__ __forceinline__ void multiply(float (&c)[2][4], const Both& a, const Both& b) {
  if (of == Of::both || of == Of::left) multiply(c, a[1], b[0]);
  if (of == Of::both || of == Of::right) multiply(c, a[0], b[1]);
  multiply(c, a[0], b[0]);
}
// Precision of sums that do not feed the state; of sums whose left operand is loaded.
template <class P>
constexpr Of kRough = kExact<P> ? Of::neither : Of::both;
template <class P>
constexpr Of kGiven = kExact<P> ? Of::right : Of::both;

// Loads 16 x 16 from column `column` of 16 rows. down: the rows are the inner dimension of a right operand (if transposed) or the rows of a left one.
// Otherwise they are the columns of a right operand, or (if transposed) of a left one.
template <bool transposed, bool down, class T, int pitch>
__device__ __forceinline__ void fetch(Operand& to, const T (*from)[pitch], int column, int lane) {
  const int row = down ? lane % 16 : lane % 8 + lane / 16 * 8, right = down ? lane / 16 : lane / 8 % 2;
  load_matrices<transposed>(to, reinterpret_cast<const uint4*>(&from[row][column + 8 * right]));
}
template <bool transposed, bool down, int pitch>
__device__ __forceinline__ void fetch(Both& to, const unsigned short (*from)[16][pitch], int column, int lane) {
  fetch<transposed, down>(to[0], from[0], column, lane), fetch<transposed, down>(to[1], from[1], column, lane);
}
// Transposes a left operand into another left operand, or into a right one.
template <class P, bool left>
__device__ __forceinline__ void transpose(Both& to, const Both& from) {
#pragma unroll
  for (int p = 0; p < (kExact<P> ? 1 : 2); p++)
#pragma unroll
    for (int i = 0; i < 4; i++) to[p][i] = transposed(from[p][left ? i / 2 + i % 2 * 2 : i]);
}

// ---- helpers: matrices from a segment's inputs ------------------------------------------------------------------------------------

// Dot products of two sets of rows. Lane (g, t) gets, at [n][e], the product of rows g + 8 (e / 2) and 8 n + 2 t + e % 2.
template <class P>
__device__ __forceinline__ void row_products(float (&c)[2][4], const unsigned short (*a)[16][Block<P>::pitch],
                                             const unsigned short (*b)[16][Block<P>::pitch], int lane) {
  float more[2][2][4] = {};  // separate chains
#pragma unroll
  for (int i = 0; i < 8; i++) c[i / 4][i % 4] = 0;
#pragma unroll(P::unroll)
  for (int n = 0; n < Block<P>::rows; n += 16) {
    Both x, y;
    fetch<false, true>(x, a, n, lane), fetch<false, false>(y, b, n, lane);
    multiply(c, x[0], y[0]), multiply(more[0], x[1], y[0]), multiply(more[1], x[0], y[1]);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) c[i / 4][i % 4] += more[0][i / 4][i % 4] + more[1][i / 4][i % 4];
}
__device__ __forceinline__ void put(unsigned short (*to)[16][kSquare], int row, int column, float x, float y) {
  unsigned high, low;
  split(high, low, x, y);
  *reinterpret_cast<unsigned*>(&to[0][row][column]) = high, *reinterpret_cast<unsigned*>(&to[1][row][column]) = low;
}
// Helper threads: solvers run make_block; the crew loads inputs.
template <class P>
constexpr int kSolvers = P::WPH >= 4 && P::ready_buffers == 3 ? 64 : 0;
template <class P>
constexpr int kCrew = P::TL - kSolvers<P>;
// One helper warp (WPH = 1) or two run this, after all helpers have finished the segment's rows, scalars and `hold`. Warp 0 computes what depends on k
// alone: keeps, W K K^T and T. The other computes W Q K^T. The forward also stores W K K^T, which gives r.
template <class P, bool forward>
__device__ __forceinline__ void make_block(Ready<P>& ready, const Place<P>& at) {
  if (at.tw > 1) return;
  Block<P>& x = ready;
  const int lane = at.lane, g = lane / 4, t = lane % 4, mine = lane % 16;  // mine: a step, or a column of W
  const bool of_k = at.tw == 0, of_q = at.tw == 1 || P::WPH == 1;
  float in[P::NL] = {}, c[P::AS], par[P::AC] = {}, w = 1;
#pragma unroll
  for (int i = 0; i < P::NS; i++) c[i] = ready.scalar[i][mine];
  const auto zero = P::Cell::template line<typename P::Math, float>({0.f, in, c, par});
  const auto one = P::Cell::template line<typename P::Math, float>({1.f, in, c, par});
  const bool hold = ready.hold[mine] != 0.f, fresh = begins(ready, mine);
  const float keep = fresh ? 0.f : hold ? 1.f : zero.keep, slope = hold ? 0.f : zero.write - one.write;
  float (&weight)[16][18] = x.weight[at.tw];
#pragma unroll
  for (int s = 0; s < 16; s++) {
    const float k = __shfl_sync(~0u, keep, s);
    w = s > mine ? w * k : w;
    if (lane < 16) weight[s][mine] = s < mine ? 0.f : w;
    if (lane == 0 && of_k) x.decayed[s + 1] = keep * w;
  }
  if (of_k) {
    if (lane < 16) x.keep[mine] = keep, x.slope[mine] = slope;
    if (lane == 0) x.decayed[0] = 1;
  }
  __syncwarp();
  if (of_q) {
    float qk[2][4];
    row_products<P>(qk, x.q, x.k, lane);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = g + i % 2 * 8, column = i / 2 * 8 + 2 * t;
      float p[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float d = qk[i / 2][i % 2 * 2 + e];
        p[e] = column + e <= row ? weight[row][column + e] * d : 0.f;
        if (!forward && column + e <= row) x.products[row][column + e] = d;
      }
      put(x.p, row, column, p[0], p[1]);
    }
  }
  if (!of_k) return;
  float kk[2][4], solved[16];
  row_products<P>(kk, x.k, x.k, lane);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = g + i % 2 * 8, column = i / 2 * 8 + 2 * t;
    const float b = __shfl_sync(~0u, slope, row);
    const bool retrieves = !begins(ready, row);
    float r[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float d = kk[i / 2][i % 2 * 2 + e];
      const bool there = column + e < row;
      r[e] = there && retrieves ? weight[row > 0 ? row - 1 : 0][column + e] * d : 0.f;
      if (!forward && there) x.products[column + e][row] = d;
      x.unsolved[column + e][row] = b * r[e];
    }
    if (forward) put(x.r, row, column, r[0], r[1]);
  }
  __syncwarp();
  if (lane >= 16) return;
#pragma unroll
  for (int s = 0; s < 16; s++) solved[s] = s == lane ? 1.f : 0.f;
#pragma unroll
  for (int i = 0; i < 15; i++)
#pragma unroll
    for (int s = (i + 1) / 4 * 4; s < 16; s += 4) {
      float a[4];
      load<4>(a, &x.unsolved[i][s]);
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (s + e > i) solved[s + e] = fmaf(-a[e], solved[i], solved[s + e]);
    }
#pragma unroll
  for (int s = 0; s < 16; s += 2) put(x.t, lane, s, solved[s], solved[s + 1]);
}

// Returns the product of the keeps after step lane % 16, or 0 if that step is held. all: the product of all 16 keeps. scalar: the first scalar in lanes
// 0 to 15, the second in the others.
template <class P>
__device__ __forceinline__ float keeps_behind(float& all, float& scalar, const Scalars<P>& sc, int lane) {
  const int mine = lane % 16;
  scalar = scalar_map<typename P::Math>(lane < 16 ? P::kind0 : P::kind1, to_float(sc.x), sc.rate, sc.bias);
  float in[P::NL] = {}, c[P::AS], par[P::AC] = {};
#pragma unroll
  for (int i = 0; i < P::NS; i++) c[i] = __shfl_sync(~0u, scalar, mine + 16 * i);
  all = sc.fresh  ? 0.f
        : sc.hold ? 1.f
                  : P::Cell::template line<typename P::Math, float>({0.f, in, c, par}).keep;  // then: from this step on
#pragma unroll
  for (int m = 1; m < 16; m *= 2) {
    const float later = __shfl_sync(~0u, all, min(mine + m, 15));
    all *= mine + m < 16 ? later : 1.f;
  }
  const float later = __shfl_sync(~0u, all, min(mine + 1, 15));
  all = __shfl_sync(~0u, all, 0);
  return sc.hold ? 0.f : mine < 15 ? later : 1.f;
}
template <class P>
__device__ __forceinline__ float weighted(float weight, const MatrixIn<float>& x) {  // a held step may write NaN or infinity
  return weight == 0.f ? 0.f : weight * P::Cell::template line<typename P::Math, float>(x).write;
}
// Makes the Passage from a segment's raw inputs and scalars. TL helper threads run it; `tl` is this one.
template <class P, int TL>
__device__ __forceinline__ void make_passage(BackwardShared<P>& sm, int raw, const Scalars<P>& sc, int lane, int tl) {
  Passage<P>& to = sm.states;
  make_rows<P, P::backward_ready, TL, 1>(to, sm.raw[raw], sc, tl);
  float all, scalar, in[P::NL], c[P::AS];
  const float behind = keeps_behind<P>(all, scalar, sc, lane), par[P::AC] = {};
  if (tl == 0) to.keep = all;
  constexpr int per = P::CB / P::EV;
#pragma unroll 1
  for (int it = 0; it < (P::steps * per + TL - 1) / TL; it++) {
    const Item at = item<TL, per>(it, tl);
    const int s = at.s % 16, e0 = at.e * P::EV;
    const float weight = __shfl_sync(~0u, behind, s);
#pragma unroll
    for (int i = 0; i < P::NS; i++) c[i] = __shfl_sync(~0u, scalar, s + 16 * i);
    if (at.s >= P::steps) continue;
    float f[P::NL][P::EV], r[P::EV], u[P::EV];
    load_stored<P, P::EV>(r, &sm.r[raw][s][e0]);
#pragma unroll
    for (int l = 0; l < P::NL; l++) load_stored<P, P::EV>(f[l], &sm.raw[raw].line[l][s][e0]);
#pragma unroll
    for (int e = 0; e < P::EV; e++) {
#pragma unroll
      for (int l = 0; l < P::NL; l++) in[l] = of_line(P::Opt::silu, l) ? silu_of<typename P::Math>(f[l][e]) : f[l][e];
      u[e] = weighted<P>(weight, {r[e], in, c, par});
    }
    store<P::EV>(&to.write[s][e0], u);
  }
}

// ---- states -----------------------------------------------------------------------------------------------------------------------

template <class P>
struct Mine {  // a lane's place
  int lane, g, t, column;  // column: the warp's line g, counted in the team
  int64_t line;  // the same line, counted in the head
  __device__ __forceinline__ explicit Mine(const Place<P>& at)
      : lane(at.lane), g(at.cg), t(at.rg), column(at.tw * 16 + at.cg), line(at.line0 + column) {}
  __device__ __forceinline__ bool has(int m, int row) const { return line + 8 * m < P::V && row < P::N; }
};
template <class P>
__device__ __forceinline__ void read_lines(Lines<P>& S, const float* from, const Place<P>& at, int64_t line, int64_t row) {
  const Mine<P> my(at);
#pragma unroll
  for (int i = 0; i < kTiles<P> * 4; i++) {
    const int m = i % 4 / 2, n = i / 4 * 8 + 2 * my.t + i % 2;
    S[i / 4][i % 4] = from && my.has(m, n) ? from[at.bh * (int64_t(P::N) * P::V) + (my.line + 8 * m) * line + n * row] : 0.f;
  }
}
template <class P>
__device__ __forceinline__ void write_lines(float* to, const Lines<P>& S, const Place<P>& at, int64_t line, int64_t row) {
  if (!to) return;
  const Mine<P> my(at);
#pragma unroll
  for (int i = 0; i < kTiles<P> * 4; i++) {
    const int m = i % 4 / 2, n = i / 4 * 8 + 2 * my.t + i % 2;
    if (my.has(m, n)) to[at.bh * (int64_t(P::N) * P::V) + (my.line + 8 * m) * line + n * row] = S[i / 4][i % 4];
  }
}
// Adjacent words of lane t in a saved line: four lanes fill whole sectors of memory.
template <class P>
constexpr int kSaved = P::N % 32 == 0   ? 4
                       : P::N % 16 == 0 ? 2
                                        : 1;
// Start of line `line` of the saved state before segment `seg`.
template <class P, class T>
__device__ __forceinline__ auto* saved_line(T* saved, const Sizes& n, const Place<P>& at, int seg, int line) {
  using Word = std::conditional_t<std::is_const_v<T>, const unsigned, unsigned>;
  using Store = std::conditional_t<std::is_const_v<T>, const typename P::Store, typename P::Store>;
  return reinterpret_cast<Word*>(static_cast<Store*>(saved) + Saved<P>(n).state(at, seg, line));
}
template <class P>
__device__ __forceinline__ void save_lines(const ForwardArgs& a, const Place<P>& at, int seg, const Lines<P>& S) {
  if (!a.saved) return;
  const Mine<P> my(at);
#pragma unroll
  for (int m = 0; m < 2; m++) {
    auto* to = saved_line<P>(a.saved, a.n, at, seg, int(my.line) + 8 * m);
#pragma unroll
    for (int n = 0; n < kTiles<P>; n += kSaved<P>) {
      Vec<kSaved<P>, unsigned> words;
#pragma unroll
      for (int i = 0; i < kSaved<P>; i++) words.x[i] = pack(S[n + i][2 * m], S[n + i][2 * m + 1], typename P::Store());
      if (my.has(m, 8 * n + 2 * my.t)) *reinterpret_cast<decltype(words)*>(to + 4 * n + kSaved<P> * my.t) = words;
    }
  }
}
// As left operands, in words of the storage type.
template <class P>
using SavedLines = unsigned[kTiles<P> / 2][4];
template <class P>
__device__ __forceinline__ void fetch_lines(SavedLines<P>& S, const BackwardArgs& a, const Place<P>& at, int seg) {
  const Mine<P> my(at);
#pragma unroll
  for (int m = 0; m < 2; m++) {
    const auto* from = saved_line<P>(a.saved, a.n, at, seg, int(my.line) + 8 * m);
#pragma unroll
    for (int n = 0; n < kTiles<P>; n += kSaved<P>) {
      Vec<kSaved<P>, unsigned> words = {};
      if (my.has(m, 8 * n + 2 * my.t)) words = *reinterpret_cast<const decltype(words)*>(from + 4 * n + kSaved<P> * my.t);
#pragma unroll
      for (int i = 0; i < kSaved<P>; i++) S[(n + i) / 2][(n + i) % 2 * 2 + m] = words.x[i];
    }
  }
}

// ---- forward ----------------------------------------------------------------------------------------------------------------------

// Inputs of the cell for a line whose r is `r`.
template <class P>
__device__ __forceinline__ MatrixIn<float> line_inputs(float (&in)[P::NL], float (&c)[P::AS], const float (&par)[P::AC],
                                                       const Ready<P>& x, float r, int column, int s) {
#pragma unroll
  for (int l = 0; l < P::NL; l++) in[l] = x.line[l][s][column];
#pragma unroll
  for (int i = 0; i < P::NS; i++) c[i] = x.scalar[i][s];
  return {r, in, c, par};
}

// Lanes that differ in bit `with` swap words: the one with the bit set gives its first for the other's second.
template <int with>
__device__ __forceinline__ void swap_words(unsigned (&word)[2], int t) {
  const unsigned got = __shfl_xor_sync(~0u, t & with ? word[0] : word[1], with);
  if (t & with) word[0] = got;
  else word[1] = got;
}
// Stores a number of each step and line of the warp to [T,H,V]. to: the batch row.
template <class P>
__device__ __forceinline__ void store_steps(typename P::Store* to, const Steps& x, const Sizes& n, const Place<P>& at, int t0) {
  const Mine<P> my(at);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    unsigned word[2];  // of step g, lines 2 t and 2 t + 1, and 8 more; then lines 4 t to 4 t + 3
#pragma unroll
    for (int m = 0; m < 2; m++) word[m] = transposed(pack(x[i][2 * m], x[i][2 * m + 1], typename P::Store()));
    swap_words<2>(word, my.t), swap_words<1>(word, my.t);
    const int s = t0 + i * 8 + my.g, line = at.line0 + at.tw * 16 + 4 * my.t;
    if (s >= n.T || line >= P::V) continue;
    typename P::Store* at_line = to + (int64_t(s) * n.H + at.h) * P::V + line;
    if constexpr (P::V % 4 == 0) {
      *reinterpret_cast<Vec<2, unsigned>*>(at_line) = {{word[0], word[1]}};
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (line + e < P::V) at_line[e] = from_float<typename P::Store>(unpack(word[e / 2], e % 2, typename P::Store()));
    }
  }
}

// Runs a segment.
template <class P>
__device__ __forceinline__ void forward_block(Lines<P>& S, const Ready<P>& x, const ForwardArgs& a, const Place<P>& at, int seg) {
  const Block<P>& block = x;
  const Mine<P> my(at);
  const int lane = my.lane;
  Steps read = {}, made = {}, u = {};
#pragma unroll
  for (int n = 0; n < kTiles<P>; n += 2) {
    Both s, k, q;
    split(s, S[n], S[n + 1]);
    fetch<false, false>(k, block.k, 8 * n, lane), multiply<Of::both>(read, s, k);
    fetch<false, false>(q, block.q, 8 * n, lane), multiply<Of::both>(made, s, q);
  }
  const float par[P::AC] = {};
#pragma unroll
  for (int e = 0; e < 8; e++) {
    const int step = e / 4 * 8 + 2 * my.t + e % 2;
    float in[P::NL], c[P::AS];
    const auto w =
        P::Cell::template line<typename P::Math, float>(line_inputs<P>(in, c, par, x, 0.f, my.column + e / 2 % 2 * 8, step));
    float& y = read[e / 4][e % 4];
    y *= begins(x, step) ? 0.f : block.decayed[step], made[e / 4][e % 4] *= block.decayed[step + 1];
    u[e / 4][e % 4] = fmaf(-block.slope[step], y, x.hold[step] != 0.f ? 0.f : w.write);
  }
  Both left, right;
  split(left, u[0], u[1]);
#pragma unroll
  for (int e = 0; e < 8; e++) u[e / 4][e % 4] = 0;
  fetch<true, true>(right, block.t, 0, lane), multiply<Of::both>(u, left, right);
  split(left, u[0], u[1]);
  fetch<false, false>(right, block.r, 0, lane), multiply<Of::both>(read, left, right);
  fetch<false, false>(right, block.p, 0, lane), multiply<Of::both>(made, left, right);
  store_steps<P>(static_cast<typename P::Store*>(a.o) + int64_t(at.b) * a.n.T * a.n.H * P::V, made, a.n, at, seg * 16);
  if (a.saved) store_steps<P>(static_cast<typename P::Store*>(a.saved) + Saved<P>(a.n).retrieved(at.b), read, a.n, at, seg * 16);
#pragma unroll
  for (int e = 0; e < 8; e++) u[e / 4][e % 4] *= block.weight[0][15][e / 4 * 8 + 2 * my.t + e % 2];
  split(left, u[0], u[1]);
  const float keep = block.decayed[16];
#pragma unroll
  for (int n = 0; n < kTiles<P>; n += 2) {
#pragma unroll
    for (int e = 0; e < 8; e++) S[n + e / 4][e % 4] *= keep;
    float (&two)[2][4] = *reinterpret_cast<float (*)[2][4]>(&S[n]);
    Both k;
    fetch<true, true>(k, block.k, 8 * n, lane), multiply<Of::both>(two, left, k);
  }
}

// ---- backward ---------------------------------------------------------------------------------------------------------------------

// Turns the state before a segment into the one after it. u: writes of its steps times the keeps after them. keep: the product of all keeps.
template <class P>
__device__ __forceinline__ void pass_on(SavedLines<P>& S, const Steps& u, const unsigned short (*keys)[16][Block<P>::pitch],
                                        float keep, int lane) {
  Both left, k;
  split(left, u[0], u[1]);
#pragma unroll
  for (int n = 0; n < kTiles<P> / 2; n++) {
    float two[2][4];
#pragma unroll
    for (int e = 0; e < 8; e++) two[e / 4][e % 4] = keep * unpack(S[n][e / 2], e % 2, typename P::Store());
    fetch<true, true>(k, keys, 16 * n, lane), multiply<Of::both>(two, left, k);
#pragma unroll
    for (int i = 0; i < 4; i++) S[n][i] = pack(two[i / 2][i % 2 * 2], two[i / 2][i % 2 * 2 + 1], typename P::Store());
  }
}
// The same for segment number j, which is walked after the next one.
template <class P>
__device__ __forceinline__ void pass_over(SavedLines<P>& S, const BackwardShared<P>& sm, int j, const Place<P>& at) {
  const Mine<P> my(at);
  Steps u;
  if constexpr (P::passage) {
#pragma unroll
    for (int e = 0; e < 8; e++) u[e / 4][e % 4] = sm.states.write[e / 4 * 8 + 2 * my.t + e % 2][my.column + e / 2 % 2 * 8];
    pass_on<P>(S, u, sm.states.k, sm.states.keep, my.lane);
  } else {
    const Ready<P>& x = sm.x[j % P::ready_buffers];
    const float par[P::AC] = {};
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const int step = e / 4 * 8 + 2 * my.t + e % 2, column = my.column + e / 2 % 2 * 8;
      float in[P::NL], c[P::AS];
      const float r = to_float(sm.r[j % P::raw_buffers][step][column]);
      u[e / 4][e % 4] = weighted<P>(x.behind[step], line_inputs<P>(in, c, par, x, r, column, step));
    }
    pass_on<P>(S, u, x.k, x.all, my.lane);
  }
}

// Sums a number of each step over the warp's lines. Lanes with even g get the sum of step summed_step.
__device__ __forceinline__ float sum_lines(const Steps& x, int g) {
  float sum[4] = {x[0][0] + x[0][2], x[0][1] + x[0][3], x[1][0] + x[1][2], x[1][1] + x[1][3]};  // steps 2 t, 2 t + 1, and 8 later
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float away = g & 4 ? sum[i] : sum[i + 2], mine = g & 4 ? sum[i + 2] : sum[i];
    sum[i] = mine + __shfl_xor_sync(~0u, away, 16);
  }
  const float away = g & 2 ? sum[0] : sum[1], mine = g & 2 ? sum[1] : sum[0];
  const float d = mine + __shfl_xor_sync(~0u, away, 8);
  return d + __shfl_xor_sync(~0u, d, 4);
}
__device__ __forceinline__ int summed_step(int g, int t) { return (g & 4 ? 8 : 0) + 2 * t + (g & 2 ? 1 : 0); }

// Walks back over a segment: turns G, the gradient of the state after it, into the gradient of S, the state before it. `sync` returns once helpers
// have read the results of the previous segment.
template <class P, class Sync>
__device__ __forceinline__ void backward_block(Lines<P>& G, const SavedLines<P>& S, BackwardShared<P>& sm, int buf, int raw,
                                               const Place<P>& at, Sync sync) {
  const Ready<P>& x = sm.x[buf];
  const Block<P>& block = x;
  const Mine<P> my(at);
  const int lane = my.lane, warp = at.tw;
  const typename P::Store(*dys)[P::row_pitch] = sm.dy[raw];
  Steps of_s = {}, of_q = {}, of_g = {}, w = {};  // S^T k, S^T q, G^T k
  float inner = 0;  // <S, G>
#pragma unroll
  for (int n = 0; n < kTiles<P>; n += 2) {
    Both s, g, k, q;
    as_operand<P>(s, S[n / 2]);
    split(g, G[n], G[n + 1]);
    fetch<false, false>(k, block.k, 8 * n, lane), multiply<kRough<P>>(of_s, s, k), multiply<Of::both>(of_g, g, k);
    fetch<false, false>(q, block.q, 8 * n, lane), multiply<kRough<P>>(of_q, s, q);
#pragma unroll
    for (int e = 0; e < 8; e++) inner = fmaf(unpack(S[n / 2][e / 2], e % 2, typename P::Store()), G[n + e / 4][e % 4], inner);
  }
  Operand stored;
  Both dy, left, right;  // dy: lines x steps
  fetch<true, false>(stored, dys, warp * 16, lane), as_operand<P>(dy, stored);
#pragma unroll
  for (int e = 0; e < 8; e++) w[e / 4][e % 4] = block.weight[0][15][e / 4 * 8 + 2 * my.t + e % 2] * of_g[e / 4][e % 4];
  fetch<true, true>(right, block.p, 0, lane), multiply<kGiven<P>>(w, dy, right);
  split(left, w[0], w[1]);
#pragma unroll
  for (int e = 0; e < 8; e++) w[e / 4][e % 4] = 0;
  fetch<false, false>(right, block.t, 0, lane), multiply<Of::both>(w, left, right);
#pragma unroll
  for (int e = 0; e < 8; e++) {
    const int word = e / 4 * 2 + e / 2 % 2;
    const float low = kExact<P> ? 0.f : unpack(dy[1][word], e % 2, bf16());
    of_q[e / 4][e % 4] *= unpack(dy[0][word], e % 2, bf16()) + low;
  }
  const float of_output = sum_lines(of_q, my.g);
  // The cell, line by line. Everything is read before dlines overwrite the lines, so no load waits for a store.
  Steps u, y, dscalar[P::AS];
  const float par[P::AC] = {};
  float in[8][P::NL], c[4][P::AS], r[8];
  bool hold[4], fresh[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int step = i / 2 * 8 + 2 * my.t + i % 2;
    hold[i] = x.hold[step] != 0.f, fresh[i] = begins(x, step);
#pragma unroll
    for (int s = 0; s < P::NS; s++) c[i][s] = x.scalar[s][step];
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const int e = i / 2 * 4 + 2 * m + i % 2, column = my.column + 8 * m;
#pragma unroll
      for (int l = 0; l < P::NL; l++) in[e][l] = x.line[l][step][column];
      r[e] = to_float(sm.r[raw][step][column]);
    }
  }
  float* dlines = sm.line_gradients(buf, 0);
#pragma unroll
  for (int e = 0; e < 8; e++) {
    const int at_step = e / 4 * 2 + e % 2, step = e / 4 * 8 + 2 * my.t + e % 2, column = my.column + e / 2 % 2 * 8, n = e / 4,
              i = e % 4;
    const MatrixIn<float> given = {r[e], in[e], c[at_step], par};
    const auto line = P::Cell::template line<typename P::Math, float>(given);
    const auto d = P::Cell::template line_backward<typename P::Math, float>({0.f, w[n][i]}, given);
    u[n][i] = hold[at_step] ? 0.f : line.write, y[n][i] = hold[at_step] || fresh[at_step] ? 0.f : d.r;
#pragma unroll
    for (int l = 0; l < P::NL; l++) dlines[(l * P::steps + step) * P::line_pitch + column] = hold[at_step] ? 0.f : d.in[l];
#pragma unroll
    for (int s = 1; s < P::NS; s++) dscalar[s][n][i] = hold[at_step] ? 0.f : d.c[s];
    of_s[n][i] *= y[n][i], of_g[n][i] *= u[n][i];
  }
  Both ut, yt, doutput;  // steps x lines
  split(left, u[0], u[1]), split(right, y[0], y[1]);
  transpose<P, true>(ut, left), transpose<P, true>(yt, right);
  fetch<false, true>(stored, dys, warp * 16, lane), as_operand<P>(doutput, stored);
  transpose<P, false>(right, left);
  float m1[2][4] = {}, m2[2][4] = {};  // do_j u_i, y_j u_i
  multiply<kRough<P>>(m1, doutput, right), multiply<kRough<P>>(m2, yt, right);
  const float ends[3] = {sum_lines(of_s, my.g), of_output, sum_lines(of_g, my.g)};
  float of_scalar[P::AS];
#pragma unroll
  for (int s = 1; s < P::NS; s++) of_scalar[s] = sum_lines(dscalar[s], my.g);
  inner = line_sum<32>(inner);
  sync();
  if (my.g % 2 == 0) {
    const int step = summed_step(my.g, my.t);
#pragma unroll
    for (int i = 0; i < 3; i++) sm.ends[warp][i][step] = ends[i];
#pragma unroll
    for (int s = 1; s < P::NS; s++) sm.dscalar[0][s][step][warp] = of_scalar[s];
  }
  if (lane == 0) sm.inner[warp] = inner;
  Both from_do, to_do, symmetric, mirrored;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float a[2], b[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int row = my.g + i % 2 * 8, column = i / 2 * 8 + 2 * my.t + e;
      const float first = m1[i / 2][i % 2 * 2 + e], second = m2[i / 2][i % 2 * 2 + e];
      a[e] = column <= row ? block.weight[0][row][column] * first : 0.f;
      b[e] = column < row ? block.weight[0][row - 1][column] * second : 0.f;
    }
    split(from_do[0][i], from_do[1][i], a[0], a[1]), split(symmetric[0][i], symmetric[1][i], b[0], b[1]);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int row = my.g + i / 2 % 2 * 8, column = i / 4 * 8 + 2 * my.t + i % 2;
    if (column <= row) sm.passing[warp][row][column] = m1[i / 4][i % 4];
    if (column < row) sm.passing[warp][column][row] = m2[i / 4][i % 4];
  }
  transpose<P, true>(to_do, from_do), transpose<P, true>(mirrored, symmetric);
#pragma unroll
  for (int p = 0; p < (kExact<P> ? 1 : 2); p++)
#pragma unroll
    for (int i = 0; i < 4; i++) symmetric[p][i] |= mirrored[p][i];  // one is zero where the other is not
  // Terms of the gradient of the state: do and y, as lines x steps, times the keeps before them.
  Both weighted;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int step = i / 2 * 8 + 2 * my.t;
    float d[2];
#pragma unroll
    for (int e = 0; e < 2; e++) d[e] = unpack(dy[0][i], e, bf16()) + (kExact<P> ? 0.f : unpack(dy[1][i], e, bf16()));
    split(weighted[0][i], weighted[1][i], d[0] * block.decayed[step + 1], d[1] * block.decayed[step + 2]);
  }
#pragma unroll
  for (int e = 0; e < 8; e++) y[e / 4][e % 4] *= block.decayed[e / 4 * 8 + 2 * my.t + e % 2];
  split(left, y[0], y[1]);
  const float keep = block.decayed[16];
#pragma unroll
  for (int n = 0; n < kTiles<P>; n += 2) {
    float of_u[2][4] = {}, of_y[2][4] = {}, dq[2][4] = {}, dk[2][4] = {};
    Both s, b, k, q;
    as_operand<P>(s, S[n / 2]), transpose<P, false>(b, s);
    multiply<kRough<P>>(dq, doutput, b), multiply<kRough<P>>(of_y, yt, b);
    split(s, G[n], G[n + 1]), transpose<P, false>(b, s);
    multiply<kRough<P>>(of_u, ut, b);
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const int step = my.g + e / 2 % 2 * 8;
      dq[e / 4][e % 4] *= block.decayed[step + 1];
      dk[e / 4][e % 4] = fmaf(block.weight[0][15][step], of_u[e / 4][e % 4], block.decayed[step] * of_y[e / 4][e % 4]);
      G[n + e / 4][e % 4] *= keep;
    }
    float (&two)[2][4] = *reinterpret_cast<float (*)[2][4]>(&G[n]);
    fetch<true, true>(k, block.k, 8 * n, lane), fetch<true, true>(q, block.q, 8 * n, lane);
    multiply<Of::both>(two, left, k), multiply<Of::both>(two, weighted, q);
    multiply<kRough<P>>(dq, from_do, k), multiply<kRough<P>>(dk, to_do, q), multiply<kRough<P>>(dk, symmetric, k);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int step = my.g + e % 2 * 8, word = 4 * (n + e / 2) + my.t;
      sm.dkq[0][warp][step][word] = pack(dk[e / 2][e % 2 * 2], dk[e / 2][e % 2 * 2 + 1], typename P::Store());
      sm.dkq[0][warp][16 + step][word] = pack(dq[e / 2][e % 2 * 2], dq[e / 2][e % 2 * 2 + 1], typename P::Store());
    }
  }
}

// One round of 16 sums over 16 lanes; sum s ends in lane s. This is a function because in a loop over `half` the selects become addresses, and d
// moves to local memory.
template <int half>
__device__ __forceinline__ void fold(float (&d)[16], int p) {
  const bool upper = p & half;
#pragma unroll
  for (int i = 0; i < half; i++) {
    const float away = upper ? d[i] : d[i + half], mine = upper ? d[i + half] : d[i];
    d[i] = mine + __shfl_xor_sync(~0u, away, half);
  }
}
// Gradients of a segment's keeps, from the results of its walk: the sum of everything that passes a step, times all keeps but that step's own. One warp
// runs this; lane p has the paths that end after step p. `passing` is already summed over warps and multiplied with the products of the keys.
template <class P>
__device__ __forceinline__ void give_keeps(BackwardShared<P>& sm, const Ready<P>& x, int lane) {
  const Block<P>& block = x;
  const int p = lane % 16, next = min(p + 1, 15);
  float keep[16], behind[16], more[16], d[16], passing = 0, last = 0;
#pragma unroll
  for (int s = 0; s < 16; s++) {  // loads first
    const float from_do = sm.passing[0][p][s], from_y = sm.passing[0][s][next];
    keep[s] = block.keep[s], more[s] = s > p ? 0.f : p < 15 ? from_do + from_y : from_do;
  }
#pragma unroll
  for (int w = 0; w < P::WPH; w++) {
    passing += sm.ends[w][1][p] + (p < 15 ? sm.ends[w][0][next] : sm.inner[w]);
    last += sm.ends[w][2][p];  // step p
  }
#pragma unroll
  for (int i = 15; i >= 0; i--) behind[i] = i > p ? 0.f : i == p ? 1.f : keep[i < 15 ? i + 1 : 15] * behind[i < 15 ? i + 1 : 15];
#pragma unroll
  for (int s = 0; s < 16; s++) {
    const float ends = __shfl_sync(~0u, last, s);
    d[s] = passing * behind[s], passing = fmaf(keep[s], passing, p == 15 ? more[s] + ends : more[s]);
  }
  fold<8>(d, p), fold<4>(d, p), fold<2>(d, p), fold<1>(d, p);
  if (lane < 16) sm.dscalar[0][0][p][0] = x.hold[p] != 0.f || begins(x, p) ? 0.f : d[0];
}

}  // namespace elman::matrix
