// The recurrent product of one block: R rows of the matrix times up to 8 * N batch rows of the state.
//
// The 8 warps of a block share the inner dimension: warp w owns the KC chunks of 32 columns that begin at w * KC * 32, for all
// R rows. A product object holds that part of the matrix for the whole launch in registers (32 per lane and chunk). Its last KS
// chunks stay in shared memory and are read while earlier chunks are multiplied. Columns and rows beyond d are zero.
//
//   load      once: reads the matrix, or its transpose
//   clear     begins a step
//   add       one chunk, given as this lane's 16-byte pieces of the batch rows
//   add_from  one chunk, read from shared memory
//   store     this warp's partial sums, as partial[batch row][matrix row], to be added over warps in a fixed order
#pragma once

#include <elman/dense_ptx.cuh>

namespace elman::dense {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = 8, kChunk = 32;  // kRows: batch rows of a tensor-core tile

template <class Elem>
constexpr int kOwned = 32 * Storage<Elem>::per_word;  // matrix rows of a block: one word per lane and batch row in the epilogue
template <class Elem>
constexpr int kStride = kOwned<Elem> + 4;  // stride of partial sums in floats; avoids bank conflicts of the fragments' stores

// 16-bit storage: tensor cores. A lane's fragment of the state is eight consecutive columns of one batch row, one 16-byte load.
// For this the columns of a chunk are permuted alike in matrix and state, which leaves the sum unchanged.
template <class Elem, int KC, int KS, int N, int T = kOwned<Elem> / 16>
struct Product {  // T: tiles of 16 matrix rows
  static constexpr int tiles = T, pieces = N, stride = 16 * T + 4;  // stride of partial sums
  static constexpr int shared_bytes = KS * tiles * 2 * kThreads * 16;

  unsigned a[KC - KS > 0 ? KC - KS : 1][tiles][2][4];
  float c[N][tiles][4];
  uint4* spill;

  static __device__ int row(int lane, int piece) {
    return lane / 4 + kRows * piece;
  }  // batch row of a lane's piece, and column in the chunk
  static __device__ int column(int lane, int) { return lane % 4 * 8; }

  template <bool transposed>
  __device__ void load(const Elem* w, int d, int first_row, void* shared) {
    spill = static_cast<uint4*>(shared) + threadIdx.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto bits = reinterpret_cast<const unsigned short*>(w);
    auto eight = [&](int r, int c) -> uint4 {  // row r, columns c .. c+7
      if (r >= d || c >= d) return make_uint4(0, 0, 0, 0);
      if constexpr (transposed) {
        unsigned v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const unsigned short* p = bits + static_cast<size_t>(c + 2 * i) * d + r;
          v[i] = p[0] | static_cast<unsigned>(p[d]) << 16;
        }
        return make_uint4(v[0], v[1], v[2], v[3]);
      } else {
        return *reinterpret_cast<const uint4*>(bits + static_cast<size_t>(r) * d + c);
      }
    };
#pragma unroll
    for (int k = 0; k < KC; ++k)
#pragma unroll
      for (int i = 0; i < tiles; ++i) {
        const int r = first_row + i * 16 + lane / 4, col = (warp * KC + k) * kChunk + column(lane, 0);
        const uint4 x = eight(r, col), y = eight(r + 8, col);
        if (k < KC - KS) {
          a[k][i][0][0] = x.x, a[k][i][0][1] = y.x, a[k][i][0][2] = x.y, a[k][i][0][3] = y.y;
          a[k][i][1][0] = x.z, a[k][i][1][1] = y.z, a[k][i][1][2] = x.w, a[k][i][1][3] = y.w;
        } else {
          uint4* s = spill + ((k - (KC - KS)) * tiles + i) * 2 * kThreads;
          s[0] = make_uint4(x.x, y.x, x.y, y.y);
          s[kThreads] = make_uint4(x.z, y.z, x.w, y.w);
        }
      }
  }
  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < tiles; ++i) c[n][i][0] = c[n][i][1] = c[n][i][2] = c[n][i][3] = 0.f;
  }
  __device__ void add(int k, const uint4* piece, void*) {  // k is a constant after unrolling
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < tiles; ++i) {
        unsigned fragment[4];
        if (k >= KC - KS) {
          const uint4 f = spill[(((k - (KC - KS)) * tiles + i) * 2 + j) * kThreads];
          fragment[0] = f.x, fragment[1] = f.y, fragment[2] = f.z, fragment[3] = f.w;
        }
        const unsigned* w = k < KC - KS ? a[k < KC - KS ? k : 0][i][j] : fragment;
#pragma unroll
        for (int n = 0; n < N; ++n) ptx::mma_16x8x16<Elem>(c[n][i], w, j ? piece[n].z : piece[n].x, j ? piece[n].w : piece[n].y);
      }
  }
  __device__ void add_from(int k, const char* chunk, int row_bytes) {
    const int lane = threadIdx.x % 32;
    uint4 piece[N];
#pragma unroll
    for (int n = 0; n < N; ++n) piece[n] = *reinterpret_cast<const uint4*>(chunk + row(lane, n) * row_bytes + column(lane, n) * 2);
    add(k, piece, nullptr);
  }
  static __device__ unsigned place(int lane) { return (lane % 4 * 2 * stride + lane / 4) * 4; }
  __device__ void store(unsigned to, int rows) {  // to: shared address of this warp's partial sums + place(lane)
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (kRows * n + 2 * static_cast<int>(threadIdx.x % 4) < rows)
#pragma unroll
        for (int i = 0; i < tiles; ++i) {
          const unsigned at = to + (kRows * n * stride + i * 16) * 4;
          ptx::store_shared(at, c[n][i][0]);
          ptx::store_shared(at + stride * 4, c[n][i][1]);
          ptx::store_shared(at + 32, c[n][i][2]);
          ptx::store_shared(at + 32 + stride * 4, c[n][i][3]);
        }
  }
  __device__ void poison() {
#pragma unroll
    for (int n = 0; n < N; ++n) c[n][0][0] = c[n][0][1] = c[n][0][2] = c[n][0][3] = __int_as_float(0x7fffffff);
  }
};

// fp32 storage: true fp32 multiply-adds. A lane owns one row of the matrix. It reads the state from shared memory: one
// broadcast of 16 bytes serves 4 multiply-adds of every lane.
template <int KC, int KS, int N>
struct Product<float, KC, KS, N, kOwned<float> / 16> {
  static constexpr int rows_held = kRows * N, pieces = 2 * N, stage_row = kChunk * 4;
  static constexpr int shared_bytes = KS * kChunk * kThreads * 4;

  float4 a[KC - KS > 0 ? KC - KS : 1][kChunk / 4];
  float c[rows_held];
  float4* spill;

  static __device__ int row(int lane, int j) { return lane / 8 + 4 * j; }
  static __device__ int column(int lane, int) { return lane % 8 * 4; }

  template <bool transposed>
  __device__ void load(const float* w, int d, int first_row, void* shared) {
    spill = static_cast<float4*>(shared) + threadIdx.x;
    const int warp = threadIdx.x / 32, r = first_row + threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < KC; ++k)
#pragma unroll
      for (int i = 0; i < kChunk / 4; ++i) {
        const int col = (warp * KC + k) * kChunk + 4 * i;
        float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
        if (r < d && col < d) {
          if constexpr (transposed) {
            const float* p = w + static_cast<size_t>(col) * d + r;
            x = make_float4(p[0], p[d], p[2 * static_cast<size_t>(d)], p[3 * static_cast<size_t>(d)]);
          } else {
            x = *reinterpret_cast<const float4*>(w + static_cast<size_t>(r) * d + col);
          }
        }
        if (k < KC - KS) a[k][i] = x;
        else spill[((k - (KC - KS)) * (kChunk / 4) + i) * kThreads] = x;
      }
  }
  __device__ void clear() {
#pragma unroll
    for (int b = 0; b < rows_held; ++b) c[b] = 0.f;
  }
  __device__ void add(int k, const uint4* piece, void* stage) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    char* mine = static_cast<char*>(stage) + warp * rows_held * stage_row;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < pieces; ++j) *reinterpret_cast<uint4*>(mine + row(lane, j) * stage_row + column(lane, j) * 4) = piece[j];
    __syncwarp();
    add_from(k, mine, stage_row);
  }
  __device__ void add_from(int k, const char* chunk, int row_bytes) {
#pragma unroll
    for (int i = 0; i < kChunk / 4; ++i) {
      const float4 w = k < KC - KS ? a[k < KC - KS ? k : 0][i] : spill[((k - (KC - KS)) * (kChunk / 4) + i) * kThreads];
#pragma unroll
      for (int b = 0; b < rows_held; ++b) {
        const float4 x = *reinterpret_cast<const float4*>(chunk + b * row_bytes + i * 16);
        c[b] = fmaf(w.w, x.w, fmaf(w.z, x.z, fmaf(w.y, x.y, fmaf(w.x, x.x, c[b]))));
      }
    }
  }
  static __device__ unsigned place(int lane) { return lane * 4; }
  __device__ void store(unsigned to, int rows) {
#pragma unroll
    for (int b = 0; b < rows_held; ++b)
      if (b < rows) ptx::store_shared(to + b * kStride<float> * 4, c[b]);
  }
  __device__ void poison() {
#pragma unroll
    for (int b = 0; b < rows_held; ++b) c[b] = __int_as_float(0x7fffffff);
  }
};

}  // namespace elman::dense
