// Gated cells on the GPU (gates_cell.h): k products of the same h in every step, all time steps in one persistent launch, forward
// and backward, with 16-bit storage.
//
// The blocks of a group hold all of W on chip (dense_product.cuh). A group takes a tile of up to 16 batch rows, and groups are independent.
// Block p computes channels 16 p .. 16 p + 15 of all gates, so the cell runs in a single thread:
//
//   forward   the block holds the rows of its channels in all k gates, 16 k x d, and multiplies h by them.
//   backward  gh is W^T dp, k d columns for every channel. A cluster of S blocks shares them: each block holds 1 / S of the columns
//             for all 16 S channels of the cluster, multiplies 1 / S of dp, and sends each block its channels' partial sums through
//             distributed shared memory. So a block reads k / S times as much per step as in the forward, not k times.
//
// The state (dp in the backward) is exchanged through L2 as in dense.cuh: its tensor holds a sentinel NaN some steps ahead, and readers
// poll until no sentinel is left. All blocks must be resident together; every wait is bounded in time.
//
// H heads are independent recurrences of d channels each: the third dimension of the grid.
//
// packed: documents start inside rows. The word before such a step is 0 instead of h, so the product there needs no test, nor
// does what the backward and the gradient of W read from the history. The gradient that such a step passes back is dropped.
#pragma once

#include "dense_exchange.cuh"
#include "gates_cell.h"

namespace elman::gates {

using dense::kChunk, dense::kFence, dense::kFilled, dense::kSentinel, dense::kThreads, dense::kWarps, dense::SpinTimeout;

constexpr int kOwned = 16;  // channels of a block

template <class Elem>
struct GatesArgs {
  const Elem *w, *main;  // [H k d,d]; u [T,B,H k d], or gy [T,B,H d]; below, without heads
  long long main_t, main_b;  // its strides
  const float *bias, *h0,
      *s0;  // [k d] or null, [B,d], [memory,B,d]: the states before the first step, or the gradients of the last
  const unsigned char* mask;
  Elem *history, *kept, *memory;  // [T+1,B,d], [T,B,kept d], [T+1,memory,B,d]; the last two are null if no backward follows
  Elem *y, *dp, *du;  // [T,B,d]; [T,B,k d]
  float *h1, *s1;  // [B,d], [memory,B,d]: the last states, or the gradients of the first
  float* dbias;  // [B,k d]: the sums of dp over time
  int T, B, rows, first_tile;
  int* error;
  unsigned long long timeout_ns;
  const unsigned char* starts;  // [T,B], 1 = the states are 0 before the step; read if packed
};

// A block's part of the matrix, in registers. eight(row, column): eight numbers of a row of the part, from that column on.
template <class Elem, int KC, int N, int T>
struct Part : dense::Product<Elem, KC, 0, N, T> {
  template <class Eight>
  __device__ void load(Eight eight) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < KC; ++k)
#pragma unroll
      for (int i = 0; i < T; ++i) {
        const int row = i * 16 + lane / 4, column = (warp * KC + k) * kChunk + this->column(lane, 0);
        const uint4 x = eight(row, column), y = eight(row + 8, column);
        auto& a = this->a[k][i];
        a[0][0] = x.x, a[0][1] = y.x, a[0][2] = x.y, a[0][3] = y.y, a[1][0] = x.z, a[1][1] = y.z, a[1][2] = x.w, a[1][3] = y.w;
      }
  }
};

template <class Cell, class Elem, int d, int S, int N, bool backward>
struct Layout {  // S: blocks of a cluster of the backward. N: tiles of 8 batch rows.
  static constexpr int k = Cell::gates, tiles = backward ? S : k;
  static constexpr int columns = backward ? k * d / S : d;  // columns of a step's vector that a block multiplies
  static constexpr int KC = (columns + kWarps * kChunk - 1) / (kWarps * kChunk), KW = KC * kChunk;
  // Clocks between a step's sums and the first poll for the next step, the best on an H200: polling too early costs a round trip to L2.
  static constexpr int look_after = backward ? 700 + 150 * KC : 500 + 175 * KC;
  using Product = Part<Elem, KC, N, tiles>;
  static constexpr int partial_floats = kWarps * 8 * N * Product::stride;
  static constexpr int slot_floats = S * 8 * N * kOwned;  // partial sums of a block's channels, from each block of the cluster
  // Bytes of each of two alternating halves: partial sums and, in the backward, the slots and their barrier.
  static constexpr int slots = partial_floats * 4, barrier = slots + (backward ? slot_floats * 4 : 0), half = barrier + 16;
  static constexpr int dbias = 2 * half, bytes = dbias + (backward ? k * kThreads * 4 : 0);  // each thread's sums of dp
};

template <class Elem>
__device__ __forceinline__ float widened(unsigned short v) {
  float x[2];
  Storage<Elem>::unpack(v, x);
  return x[0];
}
template <class Elem>
__device__ __forceinline__ float load(const Elem* p) {
  return widened<Elem>(__ldcs(reinterpret_cast<const unsigned short*>(p)));
}
template <class Elem>
__device__ __forceinline__ void store(Elem* p, float x) {
  const float two[2] = {x, 0.f};
  __stcs(reinterpret_cast<unsigned short*>(p), static_cast<unsigned short>(Storage<Elem>::pack(two)));
}

template <class Cell, class Elem, int d, int H, int S, int N, bool masked, bool packed, bool backward>
__global__ void __launch_bounds__(kThreads, 1) gates_kernel(const __grid_constant__ GatesArgs<Elem> g) {
  using L = Layout<Cell, Elem, d, S, N, backward>;
  using P = typename L::Product;
  using Math = typename Storage<Elem>::Math;
  constexpr int k = Cell::gates, KC = L::KC, KW = L::KW;
  constexpr int all = H * d, D = backward ? k * all : all;  // channels of a row of h, numbers of the exchanged row
  constexpr int kept = Cell::kept, m = Cell::memory, m1 = kGatesMemory<Cell>;
  using Memory = GatesMemory<float, m1>;
  char* const shared = ptx::dynamic_shared();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % S;
  const int row0 = (g.first_tile + blockIdx.y) * g.rows, rows = min(g.rows, g.B - row0);
  const unsigned shared_base = ptx::shared_address(shared);
  const int head = H > 1 ? blockIdx.z : 0;
  Elem* const exchange = (backward ? g.dp : g.history) + head * (backward ? k * d : d);
  SpinTimeout timeout{g.error, g.timeout_ns};

  P product;
  product.load([&](int r, int column) -> uint4 {
    if (column >= L::columns) return make_uint4(0, 0, 0, 0);
    const auto bits = reinterpret_cast<const unsigned short*>(g.w) + static_cast<size_t>(head) * k * d * d;
    if constexpr (backward) {
      const unsigned short* p = bits + static_cast<size_t>(rank * L::columns + column) * d + (blockIdx.x - rank) * kOwned + r;
      auto two = [&](int i) { return p[i * d] | static_cast<unsigned>(p[(i + 1) * d]) << 16; };
      return make_uint4(two(0), two(2), two(4), two(6));
    } else {
      const size_t row = r / kOwned * d + blockIdx.x * kOwned + r % kOwned;  // a tile is a gate
      return *reinterpret_cast<const uint4*>(bits + row * d + column);
    }
  });

  // ---- receiving: this warp's KC chunks of the block's operand ---------------------------------------------------------------
  constexpr bool full = L::columns == kWarps * KW;
  const int first_column = warp * KW + P::column(lane, 0);
  unsigned wanted = 0;  // bit i: this lane's piece of chunk i lies inside
#pragma unroll
  for (int i = 0; i < KC; ++i)
    if (full || i * kChunk + first_column < L::columns) wanted |= 1u << i;
  uint4 piece[KC][N];
#pragma unroll
  for (int i = 0; i < KC; ++i)
#pragma unroll
    for (int n = 0; n < N; ++n) piece[i][n] = make_uint4(0, 0, 0, 0);
  auto multiply = [&](int t) {  // after a timeout the sentinel remains, and it is a NaN
    const Elem* from[N];
#pragma unroll
    for (int n = 0; n < N; ++n)  // a lane without a batch row repeats the last
      from[n] = exchange + (static_cast<size_t>(t) * g.B + row0 + min(P::row(lane, n), rows - 1)) * D +
                (backward ? rank * L::columns : 0) + first_column;
    auto look_at = [&](int i) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if constexpr (full) ptx::load_relaxed(piece[i][n], from[n] + i * kChunk);
        else ptx::load_relaxed(piece[i][n], from[n] + i * kChunk, wanted & 1u << i);
      }
    };
#pragma unroll
    for (int i = 0; i < KC; ++i) look_at(i);
    timeout.turns = 0;
#pragma unroll
    for (int i = 0; i < KC; ++i) {  // a chunk is multiplied while later ones travel
      while (true) {
        unsigned top = 0;
#pragma unroll
        for (int n = 0; n < N; ++n) top = max(top, dense::largest(piece[i][n]));
        if (!__any_sync(~0u, top == kSentinel) || timeout.over()) break;
        if constexpr (backward) {
          look_at(i);
        } else {  // polls for missing pieces, those of the next chunk too: they would cost another round trip
#pragma unroll
          for (int j = i; j < min(KC, i + 2); ++j)
#pragma unroll
            for (int n = 0; n < N; ++n)
              if (dense::largest(piece[j][n]) == kSentinel) ptx::load_relaxed(piece[j][n], from[n] + j * kChunk);
        }
      }
      product.add(i, piece[i], nullptr);
    }
  };
  auto multiply_initial = [&] {
#pragma unroll
    for (int i = 0; i < KC; ++i) {
#pragma unroll
      for (int n = 0; n < N; ++n)
        if (wanted & 1u << i && !(packed && g.starts[row0 + min(P::row(lane, n), rows - 1)]))
          piece[i][n] = dense::rounded<Elem>(g.h0 + static_cast<size_t>(row0 + min(P::row(lane, n), rows - 1)) * all + head * d +
                                             first_column + i * kChunk);
      product.add(i, piece[i], nullptr);
    }
  };

  // ---- the sums of a cluster ------------------------------------------------------------------------------------------------
  const unsigned barrier = shared_base + L::barrier;
  const int sum_bytes = S * rows * kOwned * 4;
  if constexpr (backward) {
    if (threadIdx.x == 0)
      for (int half : {0, L::half}) ptx::barrier_init(barrier + half, 1), ptx::barrier_expect(barrier + half, sum_bytes);
    ptx::cluster_sync();
  }

  // ---- the cell: this thread's channel and row. The rows of a warp lie four apart, which avoids bank conflicts ------------------
  const int row = warp % 4 + lane / 16 * 4 + warp / 4 * 8, own = blockIdx.x * kOwned + lane % 16;
  const int channel = head * d + own, gate = head * k * d + own;  // in a row of h, and in one of u and dp
  const bool mine = row < rows;
  const size_t plane = static_cast<size_t>(g.B) * all, place = static_cast<size_t>(row0 + row) * all + channel;
  const int first_t = backward ? g.T - 1 : 0, forth = backward ? -1 : 1;
  const Elem* const main_at = g.main + static_cast<long long>(row0 + row) * g.main_b + (backward ? channel : gate);
  constexpr int inputs = backward ? kept + 2 + m1 : k;
  struct Inputs {
    unsigned short v[inputs];  // u; or kept, gy, h and s before the step
    unsigned char live, fresh;
  };
  auto fetch = [&](int s) {
    Inputs in{};
    if (!mine || s >= g.T) return in;
    const int t = first_t + s * forth;
    auto read = [](const Elem* p) { return __ldcs(reinterpret_cast<const unsigned short*>(p)); };
    if constexpr (backward) {
#pragma unroll
      for (int n = 0; n < kept; ++n)
        in.v[n] = read(g.kept + (static_cast<size_t>(t) * g.B + row0 + row) * kept * all + n * all + channel);
      in.v[kept] = read(main_at + t * g.main_t);
      in.v[kept + 1] = read(g.history + t * plane + place);
#pragma unroll
      for (int i = 0; i < m; ++i) in.v[kept + 2 + i] = read(g.memory + (t * m + i) * plane + place);
    } else {
#pragma unroll
      for (int q = 0; q < k; ++q) in.v[q] = read(main_at + t * g.main_t + q * d);
    }
    if (masked) in.live = g.mask[static_cast<size_t>(t) * g.B + row0 + row];
    if (packed) in.fresh = g.starts[static_cast<size_t>(t) * g.B + row0 + row];
    return in;
  };

  Memory s_new{};  // h, s; or their gradients without the product and gy
  float h = 0.f;
  Memory s_now{};
  float bias[k] = {};
  if (mine) {
    h = g.h0[place];
    if (m) s_now = numbers<float, m1>([&](int i) { return g.s0[i * plane + place]; });
    if constexpr (backward) {
      if (m) s_new = numbers<float, m1>([&](int i) { return load(g.memory + (g.T * m + i) * plane + place); });
    } else {
      store(g.history + place, packed && g.starts[row0 + row] ? 0.f : h);
#pragma unroll
      for (int i = 0; i < m; ++i)
        if (g.memory) store(g.memory + i * plane + place, number(s_now, i));
      if (g.bias)
#pragma unroll
        for (int q = 0; q < k; ++q) bias[q] = g.bias[q * d + gate];
    }
  }

  // ---- the walk: forward t = s; backward t = T - 1 - s, and once more for the gradient of h_0 -----------------------------------
  // Addresses used after the wait, in the first half: computing them here costs the step nothing.
  constexpr int quads = 4 * S;  // backward: a thread adds four channels of a row, and sends them to their block
  const int from = backward ? threadIdx.x / quads : row, quad = threadIdx.x % quads;
  constexpr int of_warp = 8 * N * P::stride * 4;
  unsigned partial_out = shared_base + warp * of_warp + (backward ? P::place(lane) : (lane % 4 * 2 * P::stride + lane / 4 * k) * 4);
  unsigned partial_in = shared_base + (from * P::stride + (backward ? quad * 4 : lane % 16 * k)) * 4, send_to = 0, count_at = 0;
  unsigned arrived = shared_base + L::slots + (row * kOwned + lane % 16) * 4;
  ptx::pin(partial_out), ptx::pin(partial_in);
  if constexpr (backward) {
    send_to = ptx::in_block(shared_base + L::slots + ((rank * 8 * N + from) * kOwned + quad % 4 * 4) * 4, quad / 4);
    count_at = ptx::in_block(barrier, quad / 4);
    ptx::hold(partial_in), ptx::hold(send_to), ptx::hold(count_at), ptx::hold(arrived);
  }
  const bool odd = lane % 2;  // one of two neighbours stores both words; backward: the odd one stores the next gate's
  Elem* publish_at =
      exchange + (static_cast<size_t>(backward ? first_t : 1) * g.B + row0 + row) * D + own + (odd ? (backward ? d : 0) - 1 : 0);
  ptx::hold(publish_at);
  float* const dbias = reinterpret_cast<float*>(shared + L::dbias) + threadIdx.x;  // in shared memory, because no register is left
  if constexpr (backward)
#pragma unroll
    for (int q = 0; q < k; ++q) dbias[q * kThreads] = 0.f;
  Inputs next = fetch(0), after = fetch(1);
  bool dropped = false;  // backward: a document starts at the step whose product arrives
  int summed = static_cast<int>(clock64());
  const int iterations = backward ? g.T + 1 : g.T;
  for (int s = 0; s < iterations; ++s) {
    const int t = first_t + s * forth, half = s % 2 * L::half;
    if (s % kFence == 0) ptx::fence();
    const Inputs in = next;
    next = after;
    after = fetch(s + 2);
    const bool live = !masked || in.live;
    const size_t at =
        static_cast<size_t>(t + (backward ? 0 : 1)) * g.B * D + static_cast<size_t>(row0 + row) * D + (backward ? gate : channel);
    if (mine && s + kFilled < g.T) {  // in the layout of the later word
      Elem* const to = publish_at + kFilled * forth * static_cast<ptrdiff_t>(g.B) * D;
#pragma unroll
      for (int q = 0; q < (backward ? k : 1); q += 2)
        if (backward ? q + 1 < k || !odd : !odd) ptx::store_relaxed(to + q * d, kSentinel);
    }

    // Everything up to the wait runs while the other blocks' words travel.
    float x[inputs];
#pragma unroll
    for (int n = 0; n < inputs; ++n) x[n] = widened<Elem>(in.v[n]);
    const bool fresh = packed && in.fresh;
    if (!backward && fresh) s_now = Memory{}, h = 0.f;
    GatesGrad<float, k, m1> constant, slope;
    if constexpr (backward) {
      if (s < g.T && live) h += x[kept];  // gy
      const Memory s_before = numbers<float, m1>([&](int i) { return fresh ? 0.f : x[kept + 2 + i]; });
      constant = Cell::template backward<Math, float>(h, s_now, x, x[kept + 1], s_before, s_new);
      slope = Cell::template backward<Math, float>(1.f, Memory{}, x, x[kept + 1], s_before, s_new);
    } else {
#pragma unroll
      for (int q = 0; q < k; ++q) ptx::pin(x[q]);
    }

    float sum[k];  // the backward has one
#pragma unroll
    for (int q = 0; q < k; ++q) sum[q] = bias[q];
    if (!backward || s > 0) {
      product.clear();
      if (s == 0) {
        multiply_initial();
      } else {
        while (static_cast<int>(clock64()) - summed < L::look_after) {
        }
        multiply(backward ? t + 1 : t);
      }
      if constexpr (backward) {
        product.store(partial_out + half, rows);
      } else {  // the gates of a channel are adjacent: one store and one load
#pragma unroll
        for (int n = 0; n < N; ++n)
          if (8 * n + lane % 4 * 2 < rows)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float v[k];
#pragma unroll
              for (int q = 0; q < k; ++q) v[q] = product.c[n][q][i];
              ptx::store_shared(partial_out + half + ((8 * n + i % 2) * P::stride + i / 2 * 8 * k) * 4, v);
            }
      }
      __syncthreads();
      summed = static_cast<int>(clock64());
      if constexpr (backward) {
        if (from < rows && !timeout.lost) {
          float v[kWarps][4];
#pragma unroll
          for (int w = 0; w < kWarps; ++w) ptx::load_shared(v[w], partial_in + half + w * of_warp);
#pragma unroll
          for (int w = 1; w < kWarps; ++w)
#pragma unroll
            for (int i = 0; i < 4; ++i) v[0][i] += v[w][i];
          const uint4 words =
              make_uint4(__float_as_uint(v[0][0]), __float_as_uint(v[0][1]), __float_as_uint(v[0][2]), __float_as_uint(v[0][3]));
          ptx::store_async(send_to + half, words, count_at + half);
        }
        timeout.turns = 0;
        const int parity = (s - 1) >> 1 & 1;
        while (!ptx::barrier_passed(barrier + half, parity) && !timeout.over()) {
        }
        if (threadIdx.x == 0 && !timeout.lost) ptx::barrier_expect(barrier + half, sum_bytes);
        if (mine)
#pragma unroll
          for (int r = 0; r < S; ++r) {
            float v[1];
            ptx::load_shared(v, arrived + half + r * 8 * N * kOwned * 4);
            sum[0] += v[0];
          }
        if (dropped) sum[0] = 0.f;
        if (timeout.lost) sum[0] = __int_as_float(0x7fffffff);
      } else if (mine) {
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          float v[k];
          ptx::load_shared(v, partial_in + half + w * of_warp);
#pragma unroll
          for (int q = 0; q < k; ++q) sum[q] += v[q];
        }
      }
    }

    if constexpr (backward) {
      if (s == g.T) {
        h += sum[0];
        break;
      }
      float dp[k + 1] = {};
#pragma unroll
      for (int q = 0; q < k; ++q) dp[q] = live ? constant.dp[q] + sum[0] * slope.dp[q] : 0.f;
#pragma unroll
      for (int q = 0; q < k; q += 2) {
        const float other = __shfl_xor_sync(~0u, odd ? dp[q] : dp[q + 1], 1),
                    two[2] = {odd ? other : dp[q], odd ? dp[q + 1] : other};
        if (mine && (q + 1 < k || !odd)) ptx::store_relaxed(publish_at + q * d, Storage<Elem>::pack(two));
      }
#pragma unroll
      for (int q = 0; q < k; ++q) dbias[q * kThreads] += dp[q];
      if (Cell::splits && mine)
#pragma unroll
        for (int q = 0; q < k; ++q) store(g.du + at + q * d, live ? constant.du[q] + sum[0] * slope.du[q] : 0.f);
      h = live ? constant.dh + sum[0] * slope.dh : h + sum[0];
      if (live) s_now = numbers<float, m1>([&](int i) { return number(constant.ds, i) + sum[0] * number(slope.ds, i); });
      s_new = numbers<float, m1>([&](int i) { return x[kept + 2 + i]; });
      if (fresh) s_now = Memory{}, h = 0.f;
      dropped = fresh;
    } else {
      float keep[kept];
      const GatesState<float, m1> made = Cell::template forward<Math, float>(sum, x, h, s_now, keep);
      if (live) h = made.h, s_now = made.s;
      const float sent = packed && next.fresh ? 0.f : h, other = __shfl_xor_sync(~0u, sent, 1), two[2] = {sent, other};
      if (mine) {
        if (!odd) ptx::store_relaxed(publish_at, Storage<Elem>::pack(two));
        store(g.y + at - plane, live ? h : 0.f);
        if (g.kept) {
#pragma unroll
          for (int n = 0; n < kept; ++n)
            store(g.kept + (static_cast<size_t>(t) * g.B + row0 + row) * kept * all + n * all + channel, keep[n]);
#pragma unroll
          for (int i = 0; i < m; ++i) store(g.memory + at + (static_cast<size_t>(t + 1) * (m - 1) + i) * plane, number(s_now, i));
        }
      }
    }
    publish_at += forth * static_cast<ptrdiff_t>(g.B) * D;
  }
  if (mine) {
    g.h1[place] = h;
#pragma unroll
    for (int i = 0; i < m; ++i) g.s1[i * plane + place] = number(s_now, i);
    if constexpr (backward)
#pragma unroll
      for (int q = 0; q < k; ++q) g.dbias[static_cast<size_t>(row0 + row) * k * all + q * d + gate] = dbias[q * kThreads];
  }
  if constexpr (backward) ptx::cluster_sync(), timeout.linger();  // no block exits while another may still write to it
}

}  // namespace elman::gates
