// The functions of a program: a whole model decodes in one launch, several tokens. The program itself, `P::step`, is written for each model from a recorded
// step (elman_core/kernels/whole).
//
// All blocks are resident and run the same program. What is small, every block computes by itself, so the blocks hold equal values, bit by bit. Products with
// weights are shared by rows and large states by columns. There are no barriers between blocks: a result is published as one word of eight bytes, which holds
// the number and the step that it belongs to, and readers wait for the step they want; each has copies, for groups of blocks. It is written again a whole step
// later. By then its writer has received results of every block from after their reading of the older one, if all blocks have rows in two phases at least:
// hence there are no more blocks.
//
// Weights are read once in a step, in a fixed order, as one stream through shared memory: each warp copies its own pieces ahead, past the waits. What it has
// used up it copies again before the next product, not while results are on their way.
#pragma once

#include <cuda_pipeline.h>

#include <elman/decode_draw.cuh>
#include <elman/packed.cuh>
#include <elman/whole_ptx.cuh>

namespace elman::whole {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kPiece = 2048;  // bytes of weights that a warp copies at once
constexpr int kColumns = 8;  // columns of a state that a warp takes at once: 32 bytes
constexpr int kTogether = 8;  // results of a thread that it computes before it stores the first
constexpr int kDrawParts = kThreads / decode::kMostClasses;

struct Job {  // a product: weight [rows, bytes / sizeof(Elem)]
  const char* weight;
  long long rows, bytes;
};
struct Part {  // of a job: the rows of this block
  const char* weight;
  int begin, end, bytes;
};

template <class Elem>
struct Args {
  const Job* jobs;
  const float* constants;
  const Elem* table;  // [classes, width]
  float *states, *own;  // all states, between launches; those of every block where shared memory does not hold them, twice
  unsigned long long* exchanged;
  std::int64_t *token, *shown;  // the token to begin with, and the one to go on with; [steps]
  const float* waits;  // [steps, classes]
  decode::DrawArgs<float> draw;
  int steps;
  unsigned first;  // the number of the first step; no word of an earlier launch has it
  unsigned long long timeout_ns;
  int* error;
};

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
__device__ __forceinline__ int within(int i, int size) { return i < 0 ? 0 : i < size ? i : size - 1; }
__device__ __forceinline__ float of_warp(float x, int from = 16) {
  for (int by = from; by > 0; by /= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
  return x;
}
__device__ __forceinline__ float most_of_warp(float x) {
  for (int by = 16; by > 0; by /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, by));
  return x;
}
__device__ __forceinline__ int part(long long count, int block) { return static_cast<int>(count * block / gridDim.x); }

struct Scratch {
  alignas(16) decode::DrawShared draw;
  float sums[kWarps * kColumns];
  int lost;
  unsigned char seen[decode::kMostClasses];
};

template <class P>
struct Layout {  // of dynamic shared memory, in bytes
  static constexpr int parts = sizeof(Scratch) + 15 & ~15, memory = parts + P::jobs * int(sizeof(Part)) + 15 & ~15,
                       own = memory + P::floats * 4;
  static constexpr int ring = own + (P::inside ? 2 * P::small * 4 : 0), bytes = ring + kWarps * P::depth * kPiece;
  static_assert(bytes <= P::shared);
};

template <class Elem, class P>
class Block {
 public:
  const float* const constants;
  float *const memory, *const states;
  float *now, *next;

  __device__ Block(const Args<Elem>& g, char* shared)
      : constants(g.constants),
        memory(reinterpret_cast<float*>(shared + Layout<P>::memory)),
        states(g.states),
        g_(g),
        scratch_(*reinterpret_cast<Scratch*>(shared)),
        parts_(reinterpret_cast<Part*>(shared + Layout<P>::parts)),
        ring_(shared + Layout<P>::ring + static_cast<int>(threadIdx.x) / 32 * P::depth * kPiece),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32) {
    now = P::inside ? reinterpret_cast<float*>(shared + Layout<P>::own) : g.own + static_cast<ptrdiff_t>(blockIdx.x) * 2 * P::small;
    next = now + P::small;
  }

  // ---- the whole launch
  __device__ void run() {
    for (int i = threadIdx.x; i < P::small; i += kThreads) now[i] = g_.states[i];
    for (int i = threadIdx.x; i < P::classes; i += kThreads) scratch_.seen[i] = g_.draw.penalty != 1.f && g_.draw.seen[i];
    for (int i = threadIdx.x; i < P::jobs; i += kThreads) {
      const Job& job = g_.jobs[i];
      parts_[i] = {job.weight, part(job.rows, blockIdx.x), part(job.rows, blockIdx.x + 1), static_cast<int>(job.bytes)};
    }
    if (threadIdx.x == 0) scratch_.lost = 0;
    __syncthreads();
    enter(0);
    for (int i = 0; i < P::depth; ++i) fetch();
    int token = static_cast<int>(*g_.token);
    __syncthreads();
    for (int t = 0; t < g_.steps; ++t) {
      number_ = g_.first + t;
      int job = 0;
      for (int half = 0; half < 2 * P::phases; ++half) {
        P::part(*this, token, P::numbers(half));
        const int* const phase = P::phase(half / 2);
        if (half % 2 == 0) {
          __syncwarp();
          for (; owed_ > 0; --owed_) fetch();
          for (; job < phase[0]; ++job) product(P::job(job), parts_[job]);
        } else if (phase[2] > 0) {
          gather(phase[1], phase[2], memory + phase[3]);
          __syncthreads();
        }
      }
      token = draw(memory + P::logits, t);
      float* const old = now;
      now = next, next = old;
    }
    __pipeline_wait_prior(0);
    if (blockIdx.x != 0) return;
    for (int i = threadIdx.x; i < P::small; i += kThreads) g_.states[i] = now[i];
    if (threadIdx.x == 0) *g_.token = token;
  }

  // ---- what a block computes by itself. All threads meet at the end.
  __device__ float embedding(int at) const { return decode::wide(g_.table[at]); }

  // to[i] = f(i). f may not read what another thread writes here.
  template <int count, class F>
  __device__ void each(float* to, F&& f) {
    constexpr int rounds = (count + kThreads - 1) / kThreads, together = rounds < kTogether ? rounds : kTogether;
    for (int from = threadIdx.x; from < count; from += together * kThreads) {
      float made[together];
#pragma unroll
      for (int j = 0; j < together; ++j)
        if (const int i = from + j * kThreads; i < count) made[j] = f(i);
#pragma unroll
      for (int j = 0; j < together; ++j)
        if (const int i = from + j * kThreads; i < count) to[i] = made[j];
    }
    __syncthreads();
  }
  // to[o] = sum, or maximum, over k of f(o, k)
  template <int count, int over, bool most, class F>
  __device__ void total(float* to, F&& f) {
    const auto add = [](float a, float b) { return most ? fmaxf(a, b) : a + b; };
    constexpr float none = most ? -INFINITY : 0.f;
    if constexpr (over <= 16) {
      for (int o = threadIdx.x; o < count; o += kThreads) {
        float s = none;
        for (int k = 0; k < over; ++k) s = add(s, f(o, k));
        to[o] = s;
      }
    } else if constexpr (count >= kWarps / 2 || over <= 64) {
      for (int o = warp_; o < count; o += kWarps) {
        float s = none;
#pragma unroll 8
        for (int k = lane_; k < over; k += 32) s = add(s, f(o, k));
        s = most ? most_of_warp(s) : of_warp(s);
        if (lane_ == 0) to[o] = s;
      }
    } else {
      for (int o = 0; o < count; ++o) {
        float s = none;
#pragma unroll 8
        for (int k = threadIdx.x; k < over; k += kThreads) s = add(s, f(o, k));
        s = most ? most_of_warp(s) : of_warp(s);
        if (lane_ == 0) scratch_.sums[warp_] = s;
        __syncthreads();
        if (warp_ == 0) {
          s = lane_ < kWarps ? scratch_.sums[lane_] : none;
          s = most ? most_of_warp(s) : of_warp(s);
          if (lane_ == 0) to[o] = s;
        }
        __syncthreads();
      }
    }
    __syncthreads();
  }

  // ---- what blocks share. Nobody meets.
  // Sums over k of f(o, k), published from `word` on. The thread that takes (o, k) here takes it in `update`, too: it alone reads and writes those elements.
  template <int width, class F>
  __device__ void columns(int count, int over, int word, F&& f) {
    if constexpr (width == 1) {
      const int end = part(count, blockIdx.x + 1);
      for (int o = part(count, blockIdx.x) + warp_; o < end; o += kWarps) {
        float s = 0.f;
#pragma unroll 4
        for (int k = lane_; k < over; k += 32) s += f(o, k);
        s = of_warp(s);
        if (lane_ < P::copies) publish(word + o, s, lane_);
        if (lane_ < P::copies && o == count - 1) publish_rest(word, count, lane_);
      }
    } else {
      const int units = (count + width - 1) / width, end = part(units, blockIdx.x + 1);
      for (int unit = part(units, blockIdx.x); unit < end; ++unit) {
        const int o = unit * width + threadIdx.x % width;
        float s = 0.f;
        if (o < count) {
#pragma unroll 4
          for (int k = threadIdx.x / width; k < over; k += kThreads / width) s += f(o, k);
        }
        for (int by = width; by < 32; by *= 2) s += __shfl_xor_sync(0xffffffffu, s, by);
        if (lane_ < width) scratch_.sums[warp_ * width + lane_] = s;
        __syncthreads();
        if (warp_ == 0) {
          s = 0.f;
          for (int i = lane_; i < kWarps * width; i += 32) s += scratch_.sums[i];
          for (int by = width; by < 32; by *= 2) s += __shfl_xor_sync(0xffffffffu, s, by);
          for (int copy = lane_ / width; copy < P::copies && o < count; copy += 32 / width) {
            publish(word + o, s, copy);
            if (o == count - 1) publish_rest(word, count, copy);
          }
        }
        __syncthreads();
      }
    }
  }
  // states[place(o, k)] = f(o, k)
  template <int width, class At, class F>
  __device__ void update(int count, int over, At&& place, F&& f) {
    constexpr int step = width == 1 ? 32 : kThreads / width;
    const auto column = [&](int o, int first) {
      for (int from = first; from < over; from += step * kTogether) {
        float made[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j)
          if (const int k = from + j * step; k < over) made[j] = f(o, k);
#pragma unroll
        for (int j = 0; j < kTogether; ++j)
          if (const int k = from + j * step; k < over) states[place(o, k)] = made[j];
      }
    };
    const int units = (count + width - 1) / width, end = part(units, blockIdx.x + 1);
    if constexpr (width == 1) {
      for (int o = part(units, blockIdx.x) + warp_; o < end; o += kWarps) column(o, lane_);
    } else {
      for (int unit = part(units, blockIdx.x); unit < end; ++unit)
        if (const int o = unit * width + threadIdx.x % width; o < count) column(o, threadIdx.x / width);
    }
    __syncthreads();
  }

 private:
  __device__ void publish(int word, float x, int copy) {
    store_word(g_.exchanged + copy * P::words + word, static_cast<unsigned long long>(number_) << 32 | __float_as_uint(x));
  }
  // Words are waited for in fours, so the last of `count` is followed by some without a number.
  __device__ void publish_rest(int word, int count, int copy) {
    for (int i = count; i % 4; ++i) publish(word + i, 0.f, copy);
  }
  // y[m, n] = sum over k of x[m, k] weight[n, k], published; or x of the block of rows that n is in. A job is
  // {rows, inner size, place of x, word, vectors, rows of a block}.
  __device__ void product(const int* job, const Part& mine) {
    constexpr int per_word = Storage<Elem>::per_word, per = 4 * per_word, size = sizeof(Elem);
    const int rows = job[0], inner = job[1], word = job[3], vectors = job[4], end = mine.end;
    const int turn = per == 8 ? lane_ / 4 % 2 : 0;  // of eight lanes, four read x from behind: no bank conflicts
    for (int row = mine.begin + warp_; row < end; row += kWarps) {
      const float* const x = memory + job[2] + (job[5] < rows ? row / job[5] * inner : 0);
      float sum[P::vectors][4] = {};
      for (int from = 0; from < mine.bytes; from += kPiece) {
        __pipeline_wait_prior(P::depth - 1 - owed_);
        __syncwarp();
        const uint4* const piece = reinterpret_cast<const uint4*>(ring_ + used_ * kPiece);
        const auto add = [&](int p) {
          const uint4 read = piece[p], words = turn ? make_uint4(read.z, read.w, read.x, read.y) : read;
          float w[per];
          Storage<Elem>::unpack(words.x, w), Storage<Elem>::unpack(words.y, w + per_word);
          Storage<Elem>::unpack(words.z, w + 2 * per_word), Storage<Elem>::unpack(words.w, w + 3 * per_word);
#pragma unroll
          for (int m = 0; m < P::vectors; ++m) {
            if (m > 0 && m >= vectors) break;
            const float4* const at = reinterpret_cast<const float4*>(x + m * inner + from / size + p * per);
#pragma unroll
            for (int i = 0; i < per; i += 4) {
              const float4 v = at[i / 4 ^ turn];
              sum[m][0] += w[i] * v.x, sum[m][1] += w[i + 1] * v.y, sum[m][2] += w[i + 2] * v.z, sum[m][3] += w[i + 3] * v.w;
            }
          }
        };
        if (mine.bytes - from >= kPiece) {
#pragma unroll
          for (int i = 0; i < kPiece / 16; i += 32) add(lane_ + i);
        } else {
          for (int p = lane_; p < (mine.bytes - from) / 16; p += 32) add(p);
        }
        used_ = used_ + 1 == P::depth ? 0 : used_ + 1;
        if (owed_ < P::depth / 2) {
          ++owed_;
        } else {
          __syncwarp();  // all lanes have read the piece whose place is filled again
          fetch();
        }
      }
#pragma unroll
      for (int m = 0; m < P::vectors; ++m) {
        if (m > 0 && m >= vectors) break;
        const float all = of_warp(sum[m][0] + sum[m][1] + (sum[m][2] + sum[m][3]));
        if (lane_ < P::copies) publish(word + m * rows + row, all, lane_);
      }
      if (row == rows - 1 && lane_ < P::copies) publish_rest(word, rows * vectors, lane_);
    }
  }
  // Waits for `count` results, a multiple of 4, and puts them into this block's memory.
  __device__ void gather(int word, int count, float* to) {
    constexpr int together = 4;  // loads on their way
    const unsigned long long* const from = g_.exchanged + blockIdx.x % P::copies * P::words + word;
    for (int first = 2 * threadIdx.x; first < count; first += 2 * kThreads * together) {
      unsigned long long both[together][2];
#pragma unroll
      for (int j = 0; j < together; ++j)
        if (const int i = first + 2 * kThreads * j; i < count) load_words(both[j], from + i);
#pragma unroll
      for (int j = 0; j < together; ++j) {
        const int i = first + 2 * kThreads * j;
        if (i >= count) break;
        for (Wait wait; (both[j][0] >> 32 != number_ || both[j][1] >> 32 != number_) && !over(wait);) load_words(both[j], from + i);
        to[i] = __uint_as_float(static_cast<unsigned>(both[j][0])), to[i + 1] = __uint_as_float(static_cast<unsigned>(both[j][1]));
      }
    }
  }

  // Whether a wait is in vain. The word of errors lies in the host's memory: all threads look at it only when a wait is far longer than it should be.
  struct Wait {
    unsigned long long since;
    int turns = 0;
  };
  __device__ bool over(Wait& wait) {
    if (lost_) return true;
    if (++wait.turns % 256 != 0) return false;
    const unsigned long long now = ptx::nanoseconds();
    if (wait.turns == 256) wait.since = now;
    if (now - wait.since > g_.timeout_ns) *reinterpret_cast<volatile int*>(g_.error) = 1;
    return lost_ = now - wait.since > g_.timeout_ns || *reinterpret_cast<volatile int*>(g_.error) != 0;
  }

  // The stream of this warp's weights: rows of the jobs in order, again and again, in pieces.
  __device__ void enter(int job) {
    const Part& mine = parts_[job];
    job_ = job, at_ = 0, row_ = mine.begin + warp_, end_ = mine.end, bytes_ = mine.bytes, weight_ = mine.weight;
  }
  __device__ void fetch() {
    for (int tries = 0; row_ >= end_ && tries < P::jobs; ++tries) enter(job_ + 1 == P::jobs ? 0 : job_ + 1);
    if (row_ < end_) {
      const char* const from = weight_ + static_cast<ptrdiff_t>(row_) * bytes_ + at_;
      const int count = min(kPiece, bytes_ - at_) / 16;
      for (int p = lane_; p < count; p += 32) __pipeline_memcpy_async(ring_ + filled_ * kPiece + p * 16, from + p * 16, 16);
      at_ += kPiece;
      if (at_ >= bytes_) at_ = 0, row_ += kWarps;
      filled_ = filled_ + 1 == P::depth ? 0 : filled_ + 1;
    }
    __pipeline_commit();
  }

  // The next token, the same in every block.
  __device__ int draw(const float* logits, int t) {
    const int mine = threadIdx.x / kDrawParts;
    const bool inside = mine < P::classes;
    if (lost_) scratch_.lost = 1;
    const float wait = inside && g_.draw.temperature > 0.f ? g_.waits[static_cast<ptrdiff_t>(t) * P::classes + mine] : 1.f;
    const int token = decode::drawn_class<kDrawParts>(g_.draw, scratch_.draw, inside ? logits[mine] : -INFINITY, wait,
                                                      inside && scratch_.seen[inside ? mine : 0]);
    if (mine == token) scratch_.seen[mine] = 1;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      g_.shown[t] = scratch_.draw.wrong || scratch_.lost ? -1 : token;
      if (g_.draw.penalty != 1.f) g_.draw.seen[token] = 1;
    }
    __syncthreads();
    return token;
  }

  const Args<Elem>& g_;
  Scratch& scratch_;
  Part* const parts_;
  char* const ring_;
  const int warp_, lane_;
  bool lost_ = false;
  const char* weight_ = nullptr;
  unsigned number_ = 0;
  int job_ = 0, row_ = 0, end_ = 0, at_ = 0, bytes_ = 0, filled_ = 0, used_ = 0;
  int owed_ = 0;  // pieces that this warp fetches later: results of other blocks would come behind them
};

template <class Elem, class P>
__global__ void __launch_bounds__(kThreads, 1) kernel(const __grid_constant__ Args<Elem> g) {
  Block<Elem, P>(g, ptx::dynamic_shared()).run();
}

}  // namespace elman::whole
