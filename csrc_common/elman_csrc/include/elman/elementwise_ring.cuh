// Shared by the kernels of the elementwise skeleton: their arguments, and the prefetch of inputs.
//
// A recurrence over B d channels has few threads for a GPU (B = 32, d = 1024: 248 channels per multiprocessor). Steps in flight, not threads, must hide the
// latency of memory. A warp is a block: it owns 32 V adjacent channels of one row and keeps a ring of segments of S steps in shared memory. Asynchronous
// copies of 16 bytes, which take no registers, fill it.
#pragma once

#include <cuda_pipeline.h>

#include "elementwise_cell.h"
#include "marks.cuh"
#include "packed.cuh"

namespace elman::elementwise {

constexpr int kLanes = 32;

template <class Elem, class Cell>
struct Args {
  int T, B, d;
  bool pieces;  // all rows of streams and outputs can be moved in pieces of 16 bytes
  Rows<const Elem> x[Cell::streams], gy;
  Rows<Elem> y, dx[Cell::streams];
  const float* p[Cell::vectors > 0 ? Cell::vectors : 1];  // [d] each
  const float *h0, *g_last, *initial;  // [states,B,d], [states,B,d], [states,d] or null: zero
  float *last, *dh0, *checkpoints, *dvector, *dinitial;  // as in elementwise_call.h
  const unsigned char *mask, *starts;  // [T,B] or null
};

template <class Cell>
constexpr int kVectors = Cell::vectors > 0 ? Cell::vectors : 1;

// The place of a lane: V channels of row `b` from `c` on. Lanes beyond the last channel repeat the last lane inside, bit for
// bit: a condition around each store would keep the compiler from overlapping the store with the next step.
template <int V>
struct Place {
  int lane, b, first, c;  // first: channel of the warp
  template <class G>
  __device__ explicit Place(const G& g) : lane(threadIdx.x) {
    const int tiles = (g.d + kLanes * V - 1) / (kLanes * V);
    b = blockIdx.x / tiles, first = blockIdx.x % tiles * kLanes * V;
    c = min(first + lane * V, g.d - V);
  }
  // of `values` in a [...,B,d] tensor
  template <class G>
  __device__ std::ptrdiff_t state(const G& g, std::ptrdiff_t leading) const {
    return (leading * g.B + b) * g.d + c;
  }
};

// Segments of S steps: `arrays` tensors in the storage type, and `carried` float tensors with one row per segment.
template <class Elem, int V, int S, int arrays, int carried>
class Ring {
 public:
  static constexpr int row = kLanes * V * sizeof(Elem), array = S * row, wide_row = kLanes * V * 4;
  static constexpr int stage = arrays * array + carried * wide_row;
  static constexpr int fitting = (24 << 10) / stage, stages = fitting < 3 ? 3 : fitting > 8 ? 8 : fitting;
  static constexpr int bytes = stages * stage;
  static_assert(bytes <= 48 << 10, "more is to be asked for");

  __device__ explicit Ring(char* shared) : shared_(shared) {}

  // Requests array k of the segment from step t0 on, of which `steps` steps exist.
  __device__ void ask(const Rows<const Elem>& x, int k, int t0, int steps, int d, bool in_pieces, const Place<V>& at) {
    char* to = shared_ + filled_ * stage + k * array;
    if (in_pieces) {
      constexpr int pieces = row / 16, together = kLanes / pieces, of_piece = 16 / int(sizeof(Elem));
      const int step = at.lane / pieces, piece = at.lane % pieces;
      const Elem* from = x.at(t0 + step, at.b) + min(at.first + piece * of_piece, d - of_piece);
      to += step * row + piece * 16;
      if (steps == S) {
#pragma unroll
        for (int s = 0; s < S; s += together, from += together * x.t) __pipeline_memcpy_async(to + s * row, from, 16);
      } else {
#pragma unroll 1
        for (int s = 0; s + step < steps; s += together, from += together * x.t) __pipeline_memcpy_async(to + s * row, from, 16);
      }
    } else {
      const Elem* from = x.at(t0, at.b) + at.c;
#pragma unroll 4
      for (int s = 0; s < steps; ++s, from += x.t)
#pragma unroll
        for (int v = 0; v < V; ++v) reinterpret_cast<Elem*>(to + s * row)[at.c - at.first + v] = from[v];
    }
  }
  __device__ void ask_carried(const float* from, int k, const Place<V>& at) {
    __pipeline_memcpy_async(shared_ + filled_ * stage + arrays * array + k * wide_row + at.lane * V * 4, from, V * 4);
  }
  __device__ void asked() {  // one whole segment is requested
    __pipeline_commit();
    filled_ = filled_ + 1 == stages ? 0 : filled_ + 1;
  }
  // Waits for the next segment. The previous one is no longer read, so the ring has room for one more.
  __device__ void wait() {
    __pipeline_wait_prior(stages - 2);
    __syncwarp();
    read_ = read_ + 1 == stages ? 0 : read_ + 1;
  }
  __device__ void get(int k, int s, const Place<V>& at, float* x) const {
    const char* from = shared_ + read_ * stage + k * array + s * row + (at.c - at.first) * int(sizeof(Elem));
    Packed<Elem, V>::unpack(Packed<Elem, V>::load(from), x);
  }
  __device__ void get_carried(int k, const Place<V>& at, float* x) const {
    Packed<float, V>::unpack(Packed<float, V>::load(shared_ + read_ * stage + arrays * array + k * wide_row + at.lane * V * 4), x);
  }

 private:
  char* shared_;
  int filled_ = 0, read_ = stages - 1;
};

}  // namespace elman::elementwise
