// How blocks of the dense skeleton exchange the state: both ways, their shared memory, and bounded waiting.
#pragma once

#include "dense_product.cuh"

namespace elman::dense {

enum class Exchange { Grid, Cluster };

// A thread stores the sentinel kFilled steps before the word itself; the first kFilled steps are filled before the launch. All threads pass a fence every
// kFence steps. The first fence orders the sentinel before later words of its thread. The second orders a reader's load of such a word before its load of
// this one. So no reader sees older contents: 2 kFence steps are enough.
constexpr int kFilled = 32, kFence = kFilled / 2;
constexpr unsigned kSentinel = 0xffffffff;

template <class Elem, int KC>
struct Slots {  // received state of a step: [2][warp][8 rows][KC * 32 columns], rows padded so that two of them fill all 32 banks
  static constexpr int row_bytes = KC * kChunk * sizeof(Elem) + (sizeof(Elem) == 2 && KC % 2 == 0 ? 64 : 0);
  static constexpr int slice_bytes = kRows * row_bytes, slot_bytes = kWarps * slice_bytes;
};

template <int d>
constexpr int kChunks = (d + kWarps * kChunk - 1) / (kWarps * kChunk);  // chunks per warp

template <class Elem, int d, int KS, int N, Exchange how>
struct Layout {  // of dynamic shared memory
  static constexpr int partial = 0, partial_bytes = kWarps * kRows * N * kStride<Elem> * 4;
  static constexpr int spill = 2 * partial_bytes;
  static constexpr int stage = spill + Product<Elem, kChunks<d>, KS, N>::shared_bytes;
  static constexpr int slots = stage + (sizeof(Elem) == 4 ? kWarps * kRows * N * kChunk * 4 : 0);
  static constexpr int barriers = slots + (how == Exchange::Cluster ? 2 * Slots<Elem, kChunks<d>>::slot_bytes : 0);
  static constexpr int carry = barriers + 2 * kWarps * 8, carry_floats = N * kThreads * Storage<Elem>::per_word;  // carry of a tile
  static constexpr int bytes(int local_tiles) { return carry + local_tiles * carry_floats * 4; }
};

// A bounded wait: it gives up after timeout_ns, or soon after any other block has given up.
//
// A thread of a cluster that gave up (`lost`) sends no more and does not arm the barrier that it has not seen complete. Its
// peers give up within two steps, so no barrier exceeds its count of arrivals or bytes. Their last stores may be in flight after
// the final cluster barrier, and a store into a block that has exited is a fault, so the thread stays a while (`linger`).
struct SpinTimeout {
  int* error;
  unsigned long long limit, since = 0;
  int turns = 0;
  bool lost = false;
  __device__ bool over() {
    if (lost) return true;
    if (++turns % 256 != 0) return false;
    const unsigned long long now = ptx::nanoseconds();
    if (turns == 256) since = now;
    if (now - since > limit) *reinterpret_cast<volatile int*>(error) = 1;
    lost = now - since > limit || *reinterpret_cast<volatile int*>(error) != 0;
    return lost;
  }
  __device__ void linger() const {
    constexpr unsigned long long enough = 100000;  // ns
    if (!lost) return;
    const unsigned long long from = ptx::nanoseconds();
    while (ptx::nanoseconds() - from < enough) {
    }
  }
};

template <class Elem>
__device__ uint4 rounded(const float* p) {  // 16 bytes of Elem, rounded from floats
  constexpr int n = Storage<Elem>::per_word;
  uint4 v;
  v.x = Storage<Elem>::pack(p), v.y = Storage<Elem>::pack(p + n), v.z = Storage<Elem>::pack(p + 2 * n),
  v.w = Storage<Elem>::pack(p + 3 * n);
  return v;
}

__device__ __forceinline__ unsigned largest(uint4 v) {
  return max(max(v.x, v.y), max(v.z, v.w));
}  // the sentinel is the largest word

}  // namespace elman::dense
