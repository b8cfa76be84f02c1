// One block's part in a cluster of E23's kernels (e23.cuh): its matrices, its sums over channels, and the exchange between
// blocks.
#pragma once

#include <elman/dense_exchange.cuh>

namespace elman::e23 {

using dense::kChunk, dense::kRows, dense::kThreads, dense::kWarps, dense::SpinTimeout;

constexpr int kSlots = 8, kOwned = 32, kMostBlocks = 16;  // kOwned: channels of a block

template <class Elem>
struct Args {  // contiguous; the forward writes the members after the mask, and the backward reads what the forward kept
  const Elem *w_h, *w_w, *main;  // [d,d]; u or gy [T,B,d]
  const float *h0, *m0;  // [B,d], [B,N,d]: first states, or the gradients of the last
  const unsigned char* mask;  // [T,B] or null
  Elem *history, *tape, *w;  // [T+1,B,d], [T,B,N,d]: before the write, [T,B,d]: what is written
  float *reads, *writes;  // [T,B,N]: softmax of the scores
  Elem *y, *dw;  // [T,B,d]: y or du; the gradient of w
  float *h1, *m1;  // the last states, or the gradients of the first
  int T, B, rows;
  int* error;
  unsigned long long timeout_ns;
  // packed: at a 1 in starts [T,B] a document starts, from h = 0 and the tape `initial` [N,d], whose gradient is [B,N,d]
  const unsigned char* starts;
  const float* initial;
  float* dinitial;
};

template <class Elem, int d>
struct Layout {
  static constexpr int P = d / kOwned, KC = dense::kChunks<d>;
  using Product = dense::Product<Elem, KC, 0, 1, 2>;
  static constexpr int stride = 36;  // of partial sums
  static constexpr int row_bytes = KC * kWarps * kChunk * static_cast<int>(sizeof(Elem)) + 64;  // two rows fill all banks
  static constexpr int sums = kRows * row_bytes, barrier = sums + kRows * P * kSlots * 4, half = barrier + 16;
  static constexpr int partial = 2 * half, bytes = partial + 2 * kWarps * kRows * stride * 4;
  static_assert(d % kOwned == 0 && P <= kMostBlocks, "a cluster has up to 16 blocks");
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int i = 16; i; i /= 2) x += __shfl_xor_sync(~0u, x, i);
  return x;
}
// Sums over each group of eight lanes.
__device__ __forceinline__ float eight_sum(float x) {
#pragma unroll
  for (int i = 4; i; i /= 2) x += __shfl_xor_sync(~0u, x, i);
  return x;
}
// Sums a number of each slot over the warp; lane l gets the sum of slot l / 4.
__device__ __forceinline__ float slot_sums(const float (&x)[kSlots]) {
  const int lane = threadIdx.x % 32;
  float four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float other = __shfl_xor_sync(~0u, lane & 16 ? x[i] : x[i + 4], 16);
    four[i] = (lane & 16 ? x[i + 4] : x[i]) + other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float other = __shfl_xor_sync(~0u, lane & 8 ? four[i] : four[i + 2], 8);
    two[i] = (lane & 8 ? four[i + 2] : four[i]) + other;
  }
  float one = (lane & 4 ? two[1] : two[0]) + __shfl_xor_sync(~0u, lane & 4 ? two[0] : two[1], 4);
  one += __shfl_xor_sync(~0u, one, 2);
  return one + __shfl_xor_sync(~0u, one, 1);
}
// Broadcasts one number per slot from lanes 0 to 7 to every lane.
__device__ __forceinline__ void spread(float mine, float (&all)[kSlots]) {
#pragma unroll
  for (int n = 0; n < kSlots; ++n) all[n] = __shfl_sync(~0u, mine, n);
}
template <class Elem>
__device__ __forceinline__ float softmax(float score) {  // in each group of eight lanes
  float top = score;
#pragma unroll
  for (int i = 4; i; i /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
  const float e = sizeof(Elem) == 4 ? expf(score - top) : __expf(score - top);
  return e / eight_sum(e);
}
// The gradient of scores from that of their softmax, without κ.
__device__ __forceinline__ float softmax_gradient(float share, float g) { return share * (g - eight_sum(share * g)); }

template <class Elem>
__device__ __forceinline__ float load(const Elem* p) {
  return static_cast<float>(*p);
}

template <class Elem, int d, bool backward>
struct Cluster {  // one block's part in a cluster
  using L = Layout<Elem, d>;
  using S = Storage<Elem>;
  using P = typename L::Product;
  static constexpr int VW = S::per_word, pieces = kOwned / VW / 4, blocks = L::P;

  P h_part, w_part;
  SpinTimeout timeout;
  char* shared;
  unsigned base, e = 0;  // e: exchanges so far
  int rank, warp, lane, rows;

  __device__ Cluster(const Args<Elem>& g, char* shared, int rows)
      : timeout{g.error, g.timeout_ns},
        shared(shared),
        base(ptx::shared_address(shared)),
        rank(blockIdx.x),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        rows(rows) {
    h_part.template load<backward>(g.w_h, d, rank * kOwned, nullptr);
    w_part.template load<backward>(g.w_w, d, rank * kOwned, nullptr);
    for (int i = threadIdx.x; i < L::partial / 16; i += kThreads) reinterpret_cast<uint4*>(shared)[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    if (threadIdx.x == 0) ptx::barrier_init(barrier(0), 1), ptx::barrier_init(barrier(1), 1), expect(0), expect(1);
    ptx::cluster_sync();
  }
  __device__ unsigned half(unsigned e) const { return base + e % 2 * L::half; }
  __device__ unsigned barrier(unsigned e) const { return half(e) + L::barrier; }
  // In the forward, every second exchange from the third on is a single number.
  __device__ static bool is_number(unsigned e) { return !backward && e % 2 == 0 && e > 0; }
  __device__ void expect(unsigned e) {
    ptx::barrier_expect(barrier(e), rows * blocks * (is_number(e) ? 16 : (kOwned * static_cast<int>(sizeof(Elem)) + kSlots * 4)));
  }
  __device__ void send_piece(unsigned offset, uint4 x, int to) {
    if (to < blocks && !timeout.lost) ptx::store_async(ptx::in_block(half(e) + offset, to), x, ptx::in_block(barrier(e), to));
  }
  // Sends this warp's row: a channel of the vector, and one number per slot (`slot_sums`).
  __device__ void send(float x, float of_slot) {
    float two[2] = {x, 0.f};
    if constexpr (VW == 2) two[1] = __shfl_down_sync(~0u, x, 1);
    const unsigned word = S::pack(two), number = __float_as_uint(of_slot);
    auto four = [&](unsigned v, int first, int step) {
      return make_uint4(__shfl_sync(~0u, v, first), __shfl_sync(~0u, v, first + step), __shfl_sync(~0u, v, first + 2 * step),
                        __shfl_sync(~0u, v, first + 3 * step));
    };
    const int piece = lane % pieces;
    const uint4 of_vector = four(word, piece * 4 * VW, VW), of_slots = four(number, lane % 2 * 16, 4);
    const unsigned at = warp * L::row_bytes + (rank * kOwned + piece * 4 * VW) * sizeof(Elem);
    __syncwarp();  // all lanes have read: peers may overwrite it once this send arrives
#pragma unroll
    for (int i = 0; i < kMostBlocks * pieces / 32; ++i) send_piece(at, of_vector, lane / pieces + i * (32 / pieces));
    send_piece(L::sums + ((warp * blocks + rank) * kSlots + lane % 2 * 4) * 4, of_slots, lane / 2);
  }
  __device__ void send_number(float x) {
    const unsigned v = __float_as_uint(x);
    __syncwarp();
    send_piece(L::sums + (warp * blocks + rank) * 16, make_uint4(v, v, v, v), lane);
  }
  __device__ void wait() {
    timeout.turns = 0;
    while (!ptx::barrier_passed(barrier(e), e / 2 % 2) && !timeout.over()) {
    }
    if (threadIdx.x == 0 && !timeout.lost) expect(e + 2);
  }
  __device__ void leave() {  // waits until no other block writes to this one
    ptx::cluster_sync();
    timeout.linger();
  }
  __device__ void partials(P& part, int which) {
    part.clear();
    const char* from = shared + e % 2 * L::half + warp * L::KC * kChunk * sizeof(Elem);
#pragma unroll
    for (int k = 0; k < L::KC; ++k) part.add_from(k, from + k * kChunk * sizeof(Elem), L::row_bytes);
    part.store(base + L::partial + (which * kWarps + warp) * kRows * L::stride * 4 + P::place(lane), rows);
  }
  __device__ float product(int which) const {  // this thread's channel and row
    const float* p = reinterpret_cast<const float*>(shared + L::partial) + (which * kWarps * kRows + warp) * L::stride + lane;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += p[w * kRows * L::stride];
    return timeout.lost ? __int_as_float(0x7fffffff) : sum;
  }
  // Sums over blocks the numbers that came with the vector: lane l has slot l % 8.
  __device__ float slots_received() const {
    const float* p = reinterpret_cast<const float*>(shared + e % 2 * L::half + L::sums) + warp * blocks * kSlots + lane;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < blocks; i += 4)
      if (i + lane / 8 < blocks) sum += p[i * kSlots];
    sum += __shfl_xor_sync(~0u, sum, 8);
    return sum + __shfl_xor_sync(~0u, sum, 16);
  }
  __device__ float number_received() const {
    const float* p = reinterpret_cast<const float*>(shared + e % 2 * L::half + L::sums) + warp * blocks * 4;
    return warp_sum(lane < blocks ? p[lane * 4] : 0.f);
  }
};

}  // namespace elman::e23
