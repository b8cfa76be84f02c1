// Staged cells on the GPU (gates_cell.h): the last of k products multiplies a result of the others, so a step has two exchanges.
//
// As in gates.cuh, a group of d / 16 blocks holds W on chip, and block p computes channels 16 p .. 16 p + 15. Blocks exchange results through L2, in
// tensors that are filled with a sentinel before the launch. Each half of a step waits for a vector and multiplies it:
//
//   forward   h_{t-1} by the rows of the first k - 1 gates -> inner_t;        inner_t by those of the last -> h_t
//   backward  dp_k by the columns of the last gate -> dp_1 .. dp_{k-1};       these by the columns of theirs -> gh_{t-1}
//
// A block reads 2 d numbers of a row and step in the forward, k d in the backward.
#pragma once

#include "gates.cuh"

namespace elman::gates {

template <class Elem, int columns, int tiles, int N>
struct HalfStep {  // the product of half a step: `columns` numbers of a row by 16 `tiles` rows of the block's part
  static constexpr int KC = (columns + kWarps * kChunk - 1) / (kWarps * kChunk), KW = KC * kChunk;
  static constexpr bool full = columns == kWarps * KW;
  using P = Part<Elem, KC, N, tiles>;
  static constexpr int of_warp = 8 * N * P::stride * 4, bytes = kWarps * of_warp;
  static constexpr int look_after = 500 + 175 * KC;

  P product;
  unsigned store_to, load_from;

  // w(row, column): eight numbers of a row of the part, from that column on; zeros beyond.
  template <class Eight>
  __device__ void load(unsigned shared, int row, Eight eight) {
    product.load([&](int r, int column) { return column < columns ? eight(r, column) : make_uint4(0, 0, 0, 0); });
    const int lane = threadIdx.x % 32;
    store_to = shared + threadIdx.x / 32 * of_warp + P::place(lane), load_from = shared + (row * P::stride + lane % 16) * 4;
  }
  // at(row): start of a batch row of the vector. Waits for the vector, or takes the floats `there`, and leaves partial sums.
  template <class At>
  __device__ void multiply(At at, const float* there, int rows, int& summed, SpinTimeout& timeout) {
    const int lane = threadIdx.x % 32, first_column = threadIdx.x / 32 * KW + P::column(lane, 0);
    uint4 piece[KC][N];
    auto wanted = [&](int i) { return full || i * kChunk + first_column < columns; };
    auto look_at = [&](int i) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int row = min(P::row(lane, n), rows - 1);  // a lane without a batch row repeats the last
        piece[i][n] = make_uint4(0, 0, 0, 0);
        if (!wanted(i)) continue;
        if (there) piece[i][n] = dense::rounded<Elem>(there + static_cast<size_t>(row) * columns + i * kChunk + first_column);
        else ptx::load_relaxed(piece[i][n], at(row) + i * kChunk + first_column);
      }
    };
    while (static_cast<int>(clock64()) - summed < look_after) {
    }
    product.clear();
#pragma unroll
    for (int i = 0; i < KC; ++i) look_at(i);
    timeout.turns = 0;
#pragma unroll
    for (int i = 0; i < KC; ++i) {
      while (true) {
        unsigned top = 0;
#pragma unroll
        for (int n = 0; n < N; ++n) top = max(top, dense::largest(piece[i][n]));
        if (!__any_sync(~0u, top == kSentinel) || timeout.over()) break;
        look_at(i);
      }
      product.add(i, piece[i], nullptr);
    }
    product.store(store_to, rows);
    __syncthreads();
    summed = static_cast<int>(clock64());
  }
  __device__ float sum(int tile, bool mine) const {  // sums over warps, for this thread's channel and row
    float all = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps && mine; ++w) {
      float v[1];
      ptx::load_shared(v, load_from + w * of_warp + tile * kOwned * 4);
      all += v[0];
    }
    return all;
  }
};

template <class Cell, class Elem, int d, int N, bool backward>
struct Stages {
  static constexpr int k = Cell::gates;
  using First = HalfStep<Elem, d, backward ? 1 : k - 1, N>;
  using Second = HalfStep<Elem, backward ? (k - 1) * d : d, 1, N>;
  static constexpr int bytes = First::bytes + Second::bytes;
};

template <class Cell, class Elem, int d, int N, bool masked, bool packed, bool backward>
__global__ void __launch_bounds__(kThreads, 1) stages_kernel(const __grid_constant__ GatesArgs<Elem> g) {
  using L = Stages<Cell, Elem, d, N, backward>;
  using Math = typename Storage<Elem>::Math;
  constexpr int k = Cell::gates, kept = Cell::kept, last = (k - 1) * d;  // last: where the last gate begins
  char* const shared = ptx::dynamic_shared();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_channel = blockIdx.x * kOwned;
  const int row0 = (g.first_tile + blockIdx.y) * g.rows, rows = min(g.rows, g.B - row0);
  const int row = warp % 4 + lane / 16 * 4 + warp / 4 * 8, channel = first_channel + lane % 16;
  const bool mine = row < rows;
  SpinTimeout timeout{g.error, g.timeout_ns};

  const auto bits = reinterpret_cast<const unsigned short*>(g.w);
  auto along = [&](size_t r, int column) { return *reinterpret_cast<const uint4*>(bits + r * d + column); };
  auto down = [&](int r, size_t column) {  // a row of the transpose
    const unsigned short* p = bits + column * d + first_channel + r;
    auto two = [&](int i) { return p[i * d] | static_cast<unsigned>(p[(i + 1) * d]) << 16; };
    return make_uint4(two(0), two(2), two(4), two(6));
  };
  typename L::First first;
  typename L::Second second;
  const unsigned base = ptx::shared_address(shared);
  if constexpr (backward) {
    first.load(base, row, [&](int r, int column) { return down(r, last + column); });
    second.load(base + L::First::bytes, row, [&](int r, int column) { return down(r, column); });
  } else {
    first.load(base, row, [&](int r, int column) { return along(r / kOwned * d + first_channel + r % kOwned, column); });
    second.load(base + L::First::bytes, row, [&](int r, int column) { return along(last + first_channel + r, column); });
  }

  // Batch row r of step t in a tensor with `width` numbers per row and step.
  auto place = [&](int t, int r, int width) { return (static_cast<size_t>(t) * g.B + row0 + r) * width; };
  auto publish = [&](Elem* to, float x) {  // the even one of two neighbours stores the word of both
    const float other = __shfl_xor_sync(~0u, x, 1), two[2] = {x, other};
    if (mine && lane % 2 == 0) ptx::store_relaxed(to, Storage<Elem>::pack(two));
  };
  const Elem* const main_at = g.main + static_cast<long long>(row0 + row) * g.main_b + channel;
  const size_t own = place(0, row, d) + channel;
  float h = mine ? g.h0[own] : 0.f, bias[k] = {}, dbias[k] = {};
  if (!backward && mine) {
    store(g.history + own, packed && g.starts[row0 + row] ? 0.f : h);
    if (g.bias)
#pragma unroll
      for (int q = 0; q < k; ++q) bias[q] = g.bias[q * d + channel];
  }
  constexpr int inputs = backward ? kept + 2 : k;
  struct Inputs {
    float v[inputs];  // u; or kept, h before the step and gy
    bool live, fresh;
  };
  auto fetch = [&](int s) {
    Inputs in{};
    if (!mine || s >= g.T) return in;
    const int t = backward ? g.T - 1 - s : s;
    in.live = !masked || g.mask[static_cast<size_t>(t) * g.B + row0 + row];
    in.fresh = packed && g.starts[static_cast<size_t>(t) * g.B + row0 + row];
    if constexpr (backward) {
#pragma unroll
      for (int n = 0; n < kept; ++n) in.v[n] = load(g.kept + place(t, row, kept * d) + n * d + channel);
      in.v[kept] = load(g.history + place(t, row, d) + channel), in.v[kept + 1] = load(main_at + t * g.main_t);
    } else {
#pragma unroll
      for (int q = 0; q < k; ++q) in.v[q] = load(main_at + t * g.main_t + q * d);
    }
    return in;
  };
  Inputs next = fetch(0);
  int summed = static_cast<int>(clock64());

  for (int s = 0; s < g.T; ++s) {
    const int t = backward ? g.T - 1 - s : s;
    const Inputs in = next;
    next = fetch(s + 1);
    const float* const x = in.v;
    const bool live = in.live, fresh = packed && in.fresh;
    if constexpr (backward) {
      const float before = x[kept];
      if (live) h += x[kept + 1];
      auto grad = Cell::template backward<Math, float>(h, 0.f, x, before, 0.f, 0.f);
      if (!live) grad = {{}, {}, h, 0.f};
      Elem* const to = g.dp + place(t, row, k * d) + channel;
      publish(to + last, grad.dp[k - 1]);
      first.multiply([&](int r) { return g.dp + place(t, r, k * d) + last; }, nullptr, rows, summed, timeout);
      const auto more = Cell::template inner_backward<Math, float>(first.sum(0, mine), x, before);
#pragma unroll
      for (int q = 0; q < k - 1; ++q) {
        if (live) grad.dp[q] += more.dp[q];
        publish(to + q * d, grad.dp[q]);
      }
#pragma unroll
      for (int q = 0; q < k; ++q) dbias[q] += grad.dp[q];
      h = live ? grad.dh + more.dh : grad.dh;
      second.multiply([&](int r) { return g.dp + place(t, r, k * d); }, nullptr, rows, summed, timeout);
      h += second.sum(0, mine);
      if (fresh) h = 0.f;
    } else {
      float p[k] = {}, keep[kept];
      if (fresh) h = 0.f;
      first.multiply([&](int r) { return g.history + place(t, r, d); }, s ? nullptr : g.h0 + place(0, 0, d), rows, summed, timeout);
#pragma unroll
      for (int q = 0; q < k - 1; ++q) p[q] = (fresh ? 0.f : first.sum(q, mine)) + bias[q];
      publish(g.memory + place(t, row, d) + channel, Cell::template inner<Math, float>(p, x, h));
      second.multiply([&](int r) { return g.memory + place(t, r, d); }, nullptr, rows, summed, timeout);
      p[k - 1] = second.sum(0, mine) + bias[k - 1];
      const auto made = Cell::template forward<Math, float>(p, x, h, 0.f, keep);
      if (live) h = made.h;
      publish(g.history + place(t + 1, row, d) + channel, packed && next.fresh ? 0.f : h);
      if (!mine) continue;
      store(g.y + place(t, row, d) + channel, live ? h : 0.f);
      if (g.kept)
#pragma unroll
        for (int n = 0; n < kept; ++n) store(g.kept + place(t, row, kept * d) + n * d + channel, keep[n]);
    }
  }
  if (!mine) return;
  g.h1[own] = h;
  if constexpr (backward) {
#pragma unroll
    for (int q = 0; q < k; ++q) g.dbias[place(0, row, k * d) + q * d + channel] = dbias[q];
  } else {
    store(g.memory + place(g.T, row, d) + channel, 0.f);  // memory has T + 1 steps, like the history
  }
}

}  // namespace elman::gates
