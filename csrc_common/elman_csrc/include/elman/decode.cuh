// Products with few rows, for decoding: out[B,N] = x[B,K] weight[N,K]^T with B up to 64, and the pointwise operations after it, in one launch. The weights
// are read once, at the speed of memory; nothing else takes time.
//
// A block owns 16 outputs of all rows. Its 8 warps take chunks of 32 columns of the inner dimension in turn. A lane's fragments
// of a chunk are eight consecutive columns of a row, one 16-byte load. For this the columns of a chunk are permuted alike in
// both factors, which leaves the sum unchanged. Partial sums of the warps are added in a fixed order.
//
// Weights do not depend on the previous kernel, so their loads start before this kernel waits for it.
#pragma once

#include <elman/decode_ptx.cuh>

#include <type_traits>

#include "dense_cell.h"

namespace elman::decode {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kOwned = 16, kChunk = 32, kRows = 8;
constexpr int kStride = kOwned + 4;  // stride of partial sums in floats; avoids bank conflicts of the fragments' stores

struct NoCell {
  static constexpr int extras = 0;
};

template <class Elem>
struct Args {
  const Elem *x, *weight, *bias, *w;
  const float* h;
  Elem* out;
  float* last;
  const Elem* extra[4];
  Elem* extra_out[4];  // without a cell: extra holds the weights of further maps of x, extra_step their outputs
  std::ptrdiff_t x_step, extra_step[4];
  int rows, inputs, outputs, activated;
  int maps;  // further maps of x
  bool tied;  // w is weight: it is read once for x and h
};

template <int tiles>
constexpr int kAhead = tiles > 4 ? 4 : 8;  // chunks per warp whose weights are loaded together
template <int tiles>
constexpr int kPartial = kWarps * kRows * tiles * kStride;  // partial sums, in floats

// Up to 8 rows are copied to shared memory whole, x as it is and then h rounded, in one trip. More rows are read in place, chunk by chunk; enough loads are
// then in flight.
template <int tiles>
constexpr bool kStaged = tiles == 1;
__host__ __device__ inline int stage_step(int width) { return width + 32; }  // stride of a row in elements; avoids bank conflicts
template <class Cell, int tiles>
int shared_bytes(int rows, int inputs, int outputs) {
  const int staged = stage_step(inputs) + (std::is_same_v<Cell, NoCell> ? 0 : stage_step(outputs));
  return kPartial<tiles> * 4 + (kStaged<tiles> ? rows * staged * 2 : 0);
}

template <class Elem>
__device__ __forceinline__ uint4 load_row(const Elem* x, std::ptrdiff_t step, int row, int column) {
  return load_fresh(static_cast<const void*>(x + row * step + column));
}
// The state is float; products round it.
template <class Elem>
__device__ __forceinline__ uint4 rounded(uint4 a, uint4 b) {
  const float v[8] = {__uint_as_float(a.x), __uint_as_float(a.y), __uint_as_float(a.z), __uint_as_float(a.w),
                      __uint_as_float(b.x), __uint_as_float(b.y), __uint_as_float(b.z), __uint_as_float(b.w)};
  return make_uint4(Storage<Elem>::pack(v), Storage<Elem>::pack(v + 2), Storage<Elem>::pack(v + 4), Storage<Elem>::pack(v + 6));
}
template <class Elem>
__device__ __forceinline__ uint4 load_row(const float* h, std::ptrdiff_t step, int row, int column) {
  const float* p = h + row * step + column;
  return rounded<Elem>(load_fresh(static_cast<const void*>(p)), load_fresh(static_cast<const void*>(p + 4)));
}
template <class Elem, class In>
__device__ __forceinline__ void stage(Elem* to, const In* x, std::ptrdiff_t step, int rows, int width) {
  const int pieces = width / 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < rows * pieces; i += kThreads) {
    const int row = i / pieces, column = i % pieces * 8;
    *reinterpret_cast<uint4*>(to + row * stage_step(width) + column) = load_row<Elem>(x, step, row, column);
  }
}

// A lane's pieces of 8 columns, one row of every tile. All loads start before the first is used.
template <class Elem, int tiles>
struct Pieces {
  uint4 v[tiles];

  __device__ __forceinline__ Pieces(const Elem* x, std::ptrdiff_t step, int rows, int width, int row, int column) {
#pragma unroll
    for (int t = 0; t < tiles; ++t)
      v[t] = row + kRows * t < rows && column < width ? load_row<Elem>(x, step, row + kRows * t, column) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ uint4 operator[](int t) const { return v[t]; }
};
template <class Elem, int tiles>
struct StatePieces {  // float until they are used
  uint4 low[tiles], high[tiles];

  __device__ __forceinline__ StatePieces(const float* h, std::ptrdiff_t step, int rows, int width, int row, int column) {
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      low[t] = high[t] = make_uint4(0, 0, 0, 0);
      if (row + kRows * t >= rows || column >= width) continue;
      const float* p = h + (row + kRows * t) * step + column;
      low[t] = load_fresh(static_cast<const void*>(p)), high[t] = load_fresh(static_cast<const void*>(p + 4));
    }
  }
  __device__ __forceinline__ uint4 operator[](int t) const { return rounded<Elem>(low[t], high[t]); }
};
template <class Elem>
__device__ __forceinline__ uint4 staged_piece(const Elem* shared, int rows, int width, int row, int column) {
  if (row >= rows || column >= width) return make_uint4(0, 0, 0, 0);
  return *reinterpret_cast<const uint4*>(shared + row * stage_step(width) + column);
}

template <class Elem>
__device__ __forceinline__ uint4 weights(const Elem* w, int rows, int width, int row, int column) {
  if (row >= rows || column >= width) return make_uint4(0, 0, 0, 0);
  return load_once(w + static_cast<std::ptrdiff_t>(row) * width + column);
}
template <class Elem>
__device__ __forceinline__ void multiply(float (&c)[4], const uint4 (&a)[2], uint4 b) {
  const unsigned low[4] = {a[0].x, a[1].x, a[0].y, a[1].y}, high[4] = {a[0].z, a[1].z, a[0].w, a[1].w};
  mma_16x8x16<Elem>(c, low, b.x, b.y);
  mma_16x8x16<Elem>(c, high, b.z, b.w);
}

// Inputs of an output besides its sum.
template <class Cell>
struct Beside {
  float bias, h, e[Cell::extras > 0 ? Cell::extras : 1];
};

template <class Elem, class Cell>
__device__ __forceinline__ void beside(Beside<Cell>& o, const Args<Elem>& g, int b, int n) {
  o.bias = g.bias ? load_fresh(g.bias + n) : 0.f;
  if (!g.weight) o.bias += load_fresh(g.x + b * g.x_step + n);  // x is not multiplied
  if constexpr (!std::is_same_v<Cell, NoCell>) o.h = load_fresh(g.h + static_cast<std::ptrdiff_t>(b) * g.outputs + n);
#pragma unroll
  for (int i = 0; i < Cell::extras; ++i) o.e[i] = load_fresh(g.extra[i] + b * g.extra_step[i] + n);
}
template <class Elem, class Cell>
__device__ __forceinline__ void finish(const Beside<Cell>& o, const Args<Elem>& g, int b, int n, float sum) {
  const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(b) * g.outputs + n;
  sum += o.bias;
  if constexpr (std::is_same_v<Cell, NoCell>) {
    const float v = wide(narrow<Elem>(sum));
    g.out[at] = narrow<Elem>(n < g.activated ? v / (1.f + __expf(-v)) : v);
  } else {
    const auto made = Cell::template forward<typename Storage<Elem>::Math, float>(sum, o.h, o.e);
    g.last[at] = made.h;
    g.out[at] = narrow<Elem>(made.y);
  }
}

__host__ __device__ constexpr int blocks_for(std::ptrdiff_t outputs) { return static_cast<int>((outputs + kOwned - 1) / kOwned); }

// Without a cell: puts the block's map in place of the first and returns the block's number within that map.
template <class Elem>
__device__ __forceinline__ int choose_map(Args<Elem>& g) {
  int block = blockIdx.x - blocks_for(g.outputs);
  if (block < 0) return blockIdx.x;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= g.maps) break;
    if (block < blocks_for(g.extra_step[i])) {
      g.weight = g.extra[i], g.out = g.extra_out[i], g.outputs = static_cast<int>(g.extra_step[i]);
      g.bias = nullptr, g.activated = 0;
      break;
    }
    block -= blocks_for(g.extra_step[i]);
  }
  return block;
}

// tiles: groups of 8 rows of x. shared: shared_bytes<Cell, tiles>(...) bytes, aligned to 16.
template <class Elem, class Cell, int tiles>
__device__ __forceinline__ void block(Args<Elem> g, void* shared) {
  constexpr bool steps = !std::is_same_v<Cell, NoCell>, staged = kStaged<tiles>;
  const int which = steps ? blockIdx.x : choose_map(g);
  constexpr int each = tiles > 1 ? tiles / 2 : 1, ahead = kAhead<tiles>;  // each: outputs per thread
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, first = which * kOwned;
  const int own = (g.inputs + kChunk - 1) / kChunk, all = own + (steps && !g.tied ? (g.outputs + kChunk - 1) / kChunk : 0);
  float* partial = static_cast<float*>(shared);
  Elem* staged_x = reinterpret_cast<Elem*>(partial + kPartial<tiles>);
  Elem* staged_h = staged_x + g.rows * stage_step(g.inputs);

  uint4 a[ahead][2];
  const auto load = [&](int from) {
#pragma unroll
    for (int k = 0; k < ahead; ++k) {
      const int chunk = from + k * kWarps;
      const bool second = steps && chunk >= own;  // past the last chunk, columns lie beyond the width
      const int width = second ? g.outputs : g.inputs, column = (second ? chunk - own : chunk) * kChunk + lane % 4 * 8;
      const Elem* w = second ? g.w : g.weight;
      const int rows = chunk < all ? g.outputs : 0;
      a[k][0] = weights(w, rows, width, first + group, column);
      a[k][1] = weights(w, rows, width, first + group + 8, column);
    }
  };
  Beside<Cell> others[each];
  const auto each_output = [&](auto&& act) {
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int o = threadIdx.x + i * kThreads, b = o / kOwned, n = first + o % kOwned;
      if (b < g.rows && n < g.outputs && b < kRows * tiles) act(i, b, n);
    }
  };

  let_next_begin();
  load(warp);
  wait_for_previous();
  each_output([&](int i, int b, int n) { beside<Elem, Cell>(others[i], g, b, n); });
  if constexpr (staged) {
    stage(staged_x, g.x, g.x_step, g.rows, g.inputs);
    if constexpr (steps) stage(staged_h, g.h, g.outputs, g.rows, g.outputs);
    __syncthreads();
  }
  float c[tiles][4] = {};
  for (int from = warp; from < all; from += kWarps * ahead) {
    if (from != warp) load(from);
#pragma unroll
    for (int k = 0; k < ahead; ++k) {
      const int chunk = from + k * kWarps;
      const bool second = steps && chunk >= own;
      const int column = (second ? chunk - own : chunk) * kChunk + lane % 4 * 8;
      if (chunk >= all) break;
      const bool x = !second, h = steps && (second || g.tied);
      if constexpr (staged) {
        if (x) multiply<Elem>(c[0], a[k], staged_piece(staged_x, g.rows, g.inputs, group, column));
        if (h) multiply<Elem>(c[0], a[k], staged_piece(staged_h, g.rows, g.outputs, group, column));
      } else if (x && h) {
        const Pieces<Elem, tiles> of_x(g.x, g.x_step, g.rows, g.inputs, group, column);
        const StatePieces<Elem, tiles> of_h(g.h, g.outputs, g.rows, g.outputs, group, column);
#pragma unroll
        for (int t = 0; t < tiles; ++t) multiply<Elem>(c[t], a[k], of_x[t]), multiply<Elem>(c[t], a[k], of_h[t]);
      } else if (x) {
        const Pieces<Elem, tiles> of_x(g.x, g.x_step, g.rows, g.inputs, group, column);
#pragma unroll
        for (int t = 0; t < tiles; ++t) multiply<Elem>(c[t], a[k], of_x[t]);
      } else {
        const StatePieces<Elem, tiles> of_h(g.h, g.outputs, g.rows, g.outputs, group, column);
#pragma unroll
        for (int t = 0; t < tiles; ++t) multiply<Elem>(c[t], a[k], of_h[t]);
      }
    }
  }

  float* mine = partial + warp * kRows * tiles * kStride;
#pragma unroll
  for (int t = 0; t < tiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) mine[(kRows * t + lane % 4 * 2 + i % 2) * kStride + group + i / 2 * 8] = c[t][i];
  __syncthreads();
  each_output([&](int i, int b, int n) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += partial[(w * kRows * tiles + b) * kStride + n - first];
    finish<Elem, Cell>(others[i], g, b, n, sum);
  });
}

}  // namespace elman::decode
