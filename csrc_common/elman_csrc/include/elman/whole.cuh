// The functions of a program: a whole model decodes several tokens in one launch. The program itself, `P`, is written for each
// model from a recorded step (extensions/megakernel).
//
// All blocks are resident and run the same program. Every block computes small things by itself, so all blocks hold bitwise
// equal values. Products with weights are shared by rows and large states by columns. There are no barriers between blocks: a
// result is published as one 8-byte word that holds the number and its step, in several copies, each for a group of blocks, and
// readers wait for the step they want. It is overwritten a whole step later. By then its writer has received results that every
// block sent after reading the old word, if all blocks have rows in at least two phases: this limits the number of blocks.
//
// Weights are read once per step, in a fixed order, as one stream through a ring in shared memory. A warp of its own, the
// feeder, copies them ahead, also during waits, but only a few kilobytes at a time: results of other blocks would queue behind
// a burst. The feeder publishes how far it has copied, and each warp how far it has read.
#pragma once

#include <cuda_pipeline.h>

#include <elman/decode_draw.cuh>
#include <elman/packed.cuh>
#include <elman/whole_ptx.cuh>

namespace elman::whole {

constexpr int kWarps = 15, kThreads = kWarps * 32, kAll = kThreads + 32;  // threads that compute; with the feeder
constexpr int kPiece = 3072, kAhead = 4;  // bytes of weights per copy of the feeder; its copies in flight
constexpr int kOperands = 16;  // most operands of a row's epilogue, besides its sum
constexpr int kColumns = 8;  // columns of a state that a warp takes at once: 32 bytes
constexpr int kTogether = 8;  // results that a thread computes before it stores the first
constexpr int kDrawParts = kAll / decode::kMostClasses;

struct Job {  // a product: weight [rows, bytes / sizeof(Elem)]
  const char* weight;
  long long rows, bytes;
};
struct Part {  // a block's rows of a job
  const char* weight;
  int begin, end, bytes;
};

template <class Elem>
struct Args {
  const Job* jobs;
  const float* constants;
  const Elem* table;  // [classes, width]
  float *states, *own;  // all states, between launches; two copies per block of the small ones, if shared memory does not hold them
  unsigned long long* exchanged;
  std::int64_t *token, *shown;  // the first token, replaced by the next one; [steps]
  const float* waits;  // [steps, classes]
  decode::DrawArgs<float> draw;
  int steps;
  unsigned first;  // number of the first step; no word of an earlier launch has it
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
  alignas(16) float totals[2][kWarps / 2][16];
  float sums[kWarps * kColumns];
  unsigned came, used[kWarps];  // positions in the stream of weights: copied by the feeder, consumed by each warp
  int lost;
  unsigned char seen[decode::kMostClasses];
};

template <class P>
struct Layout {  // of dynamic shared memory, in bytes
  static constexpr int parts = sizeof(Scratch) + 15 & ~15, tables = parts + P::jobs * int(sizeof(Part)) + 15 & ~15,
                       memory = tables + int(sizeof(typename P::Tables)) + 15 & ~15, own = memory + P::floats * 4;
  static constexpr int ring = own + (P::inside ? 2 * P::small * 4 : 0), bytes = ring + P::ring;
  static_assert(bytes <= P::shared && P::ring % 16 == 0);
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
        tables_(*reinterpret_cast<typename P::Tables*>(shared + Layout<P>::tables)),
        ring_(shared + Layout<P>::ring),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32) {
    now = P::inside ? reinterpret_cast<float*>(shared + Layout<P>::own) : g.own + static_cast<ptrdiff_t>(blockIdx.x) * 2 * P::small;
    next = now + P::small;
  }

  // ---- the whole launch
  __device__ void run() {
    for (int i = threadIdx.x; i < P::small; i += kAll) now[i] = g_.states[i];
    for (int i = threadIdx.x; i < P::classes; i += kAll) scratch_.seen[i] = g_.draw.penalty != 1.f && g_.draw.seen[i];
    for (int i = threadIdx.x; i < P::jobs; i += kAll) {
      const Job& job = g_.jobs[i];
      const int begin = part(job.rows, blockIdx.x);
      parts_[i] = {job.weight + begin * job.bytes, begin, part(job.rows, blockIdx.x + 1), static_cast<int>(job.bytes)};
    }
    for (int i = threadIdx.x; i < int(sizeof(tables_) / sizeof(int)); i += kAll)
      reinterpret_cast<int*>(&tables_)[i] = reinterpret_cast<const int*>(&P::tables())[i];
    if (threadIdx.x == 0) scratch_.lost = 0, scratch_.came = 0;
    if (threadIdx.x < kWarps) scratch_.used[threadIdx.x] = 0;
    int token = static_cast<int>(*g_.token);
    __syncthreads();
    if (warp_ == kWarps)
      for (int i = 0; i < P::jobs; ++i) step_bytes_ += (parts_[i].end - parts_[i].begin) * parts_[i].bytes;
    for (int t = 0; t < g_.steps; ++t) {
      number_ = g_.first + t;
      if (warp_ == kWarps) {
        feed(t);
      } else {
        int job = 0;
        for (int half = 0; half < 2 * P::phases; ++half) {
          P::part(*this, token, tables_.numbers[half]);
          const int* const phase = tables_.phase[half / 2];
          if (half % 2 == 0) {
            for (; job < phase[0]; ++job) product(tables_.job[job], parts_[job], tables_.ends[job], token);
          } else if (phase[2] > 0) {
            gather(phase[1], phase[2], memory + phase[3]);
          }
        }
      }
      __syncthreads();
      token = draw(memory + P::logits, t);
      float* const old = now;
      now = next, next = old;
    }
    if (blockIdx.x != 0) return;
    for (int i = threadIdx.x; i < P::small; i += kAll) g_.states[i] = now[i];
    if (threadIdx.x == 0) *g_.token = token;
  }

  // Barrier of all threads that compute. The program calls it between one thread's write and another's read or write.
  __device__ void meet() { meet_at(1, kThreads); }

  // ---- what a block computes by itself
  __device__ float embedding(int at) const { return decode::wide(g_.table[at]); }

  // to[i] = f(i), by thread i % kThreads. f must not read what another thread writes here.
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
  }
  // Whether all threads share each sum: thread k % kThreads reads (o, k), all meet, and thread o writes to[o].
  static constexpr bool together(int count, int over) { return count == 1 ? over > 64 : count < kWarps / 2 && over > 512; }
  // to[o] = sum, or maximum, over k of f(o, k); returns the first, if all threads share it
  template <int count, int over, bool most, class F>
  __device__ float total(float* to, F&& f) {
    const auto add = [](float a, float b) { return most ? fmaxf(a, b) : a + b; };
    const auto all = [](float a) { return most ? most_of_warp(a) : of_warp(a); };
    constexpr float none = most ? -INFINITY : 0.f;
    if constexpr (over <= 16) {
      for (int o = threadIdx.x; o < count; o += kThreads) {
        float s = none;
        for (int k = 0; k < over; ++k) s = add(s, f(o, k));
        to[o] = s;
      }
    } else if constexpr (!together(count, over)) {
      for (int o = warp_; o < count; o += kWarps) {
        float s = none;
#pragma unroll 8
        for (int k = lane_; k < over; k += 32) s = add(s, f(o, k));
        s = all(s);
        if (lane_ == 0) to[o] = s;
      }
    } else {
      float (*const sums)[16] = scratch_.totals[turn_];
      turn_ ^= 1;
#pragma unroll
      for (int o = 0; o < count; ++o) {
        float s = none;
#pragma unroll 4
        for (int k = threadIdx.x; k < over; k += kThreads) s = add(s, f(o, k));
        s = all(s);
        if (lane_ == 0) sums[o][warp_] = s;
      }
      meet();
      float s = none;
      if (const int o = count == 1 ? 0 : threadIdx.x; o < count) {
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
          const float4 v = *reinterpret_cast<const float4*>(sums[o] + i);
          s = add(s, add(add(v.x, v.y), i + 3 < kWarps ? add(v.z, v.w) : v.z));
        }
        if (threadIdx.x == o) to[o] = s;
      }
      return s;
    }
    return none;
  }

  // ---- what blocks share
  // Publishes sums over k of f(o, k) from `word` on. A thread takes the same (o, k) here and in `update`, and no other does.
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
        meet();
        if (warp_ == 0) {
          s = 0.f;
          for (int i = lane_; i < kWarps * width; i += 32) s += scratch_.sums[i];
          for (int by = width; by < 32; by *= 2) s += __shfl_xor_sync(0xffffffffu, s, by);
          for (int copy = lane_ / width; copy < P::copies && o < count; copy += 32 / width) {
            publish(word + o, s, copy);
            if (o == count - 1) publish_rest(word, count, copy);
          }
        }
        meet();
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
  }
  // Stores a state, by the warp that holds its row: states[at] = x
  __device__ void keep(int at, float x) {
    if (lane_ == 0) states[at] = x;
  }

 private:
  __device__ void publish(int word, float x, int copy) {
    store_word(g_.exchanged + copy * P::words + word, static_cast<unsigned long long>(number_) << 32 | __float_as_uint(x));
  }
  // Pads `count` results to a multiple of four words, at which results begin: readers take four numbers and wait for all words.
  __device__ void publish_rest(int word, int count, int copy) {
    for (int i = count; i % 4; ++i) publish(word + i, 0.f, copy);
  }
  // y[m, n] = sum over k of x[m, k] weight[n, k], or of x of the block of rows that n is in. Publishes each row after its
  // epilogue, P::made. A job is {rows, inner size, place of x, word, vectors, rows of a block}.
  __device__ void product(const int* job, const Part& mine, const int* n, int token) {
    constexpr int per_word = Storage<Elem>::per_word, per = 4 * per_word, together = 3;
    const int rows = job[0], inner = job[1], word = job[3], vectors = job[4], end = mine.end, pieces = mine.bytes / 16;
    const int turn = per == 8 ? lane_ / 4 % 2 : 0;  // four of eight lanes read the halves of x swapped: no bank conflicts
    if (lane_ == 0) tell(&scratch_.used[warp_], stream_ + min(warp_, end - mine.begin) * mine.bytes);
    __syncwarp();  // operands may depend on rows finished in an earlier job
    for (int row = mine.begin + warp_; row < end; row += kWarps) {
      const int before = (row - mine.begin) * mine.bytes;
      const float* const x = memory + job[2] + (job[5] < rows ? row / job[5] * inner : 0);
      float operands[kOperands];
      P::operands(*this, n, row, token, operands);
      const unsigned until = stream_ + before + mine.bytes;
      while (static_cast<int>(look_at(&scratch_.came) - until) < 0) {
      }
      const char* const from = ring_ + (place_ + before) % P::ring;
      float sum[P::vectors][4] = {};
      for (int first = lane_; first - lane_ < pieces; first += 32 * together) {
        uint4 words[together];
#pragma unroll
        for (int j = 0; j < together; ++j) {
          const int p = first + 32 * j;
          const char* at = from + p * 16;
          at -= at >= ring_ + P::ring ? P::ring : 0;
          const uint4 read = p < pieces ? *reinterpret_cast<const uint4*>(at) : make_uint4(0, 0, 0, 0);
          words[j] = turn ? make_uint4(read.z, read.w, read.x, read.y) : read;
        }
#pragma unroll
        for (int m = 0; m < P::vectors; ++m) {
          if (m > 0 && m >= vectors) break;
#pragma unroll
          for (int j = 0; j < together; ++j) {
            const int p = first + 32 * j;
            if (p >= pieces) break;
            float w[per];
            Storage<Elem>::unpack(words[j].x, w), Storage<Elem>::unpack(words[j].y, w + per_word);
            Storage<Elem>::unpack(words[j].z, w + 2 * per_word), Storage<Elem>::unpack(words[j].w, w + 3 * per_word);
            const float4* const at = reinterpret_cast<const float4*>(x + m * inner + p * per);
#pragma unroll
            for (int i = 0; i < per; i += 4) {
              const float4 v = at[i / 4 ^ turn];
              sum[m][0] += w[i] * v.x, sum[m][1] += w[i + 1] * v.y, sum[m][2] += w[i + 2] * v.z, sum[m][3] += w[i + 3] * v.w;
            }
          }
        }
      }
      __syncwarp();  // all lanes have read the row
      if (lane_ == 0 && row + kWarps < end) tell(&scratch_.used[warp_], until + (kWarps - 1) * mine.bytes);
#pragma unroll
      for (int m = 0; m < P::vectors; ++m) {
        if (m > 0 && m >= vectors) break;
        const float all = P::made(*this, n, row, token, operands, of_warp(sum[m][0] + sum[m][1] + (sum[m][2] + sum[m][3])));
        if (word >= 0 && lane_ < P::copies) publish(word + m * rows + row, all, lane_);
      }
      if (word >= 0 && row == rows - 1 && lane_ < P::copies) publish_rest(word, rows * vectors, lane_);
    }
    const int all = (end - mine.begin) * mine.bytes;
    stream_ += all, place_ = (place_ + all) % P::ring;
    if (lane_ == 0) tell(&scratch_.used[warp_], stream_);
  }
  // Waits for `count` results and stores them in this block's memory, by the threads of `each`.
  __device__ void gather(int word, int count, float* to) {
    constexpr int together = P::gathers;  // loads in flight
    const unsigned long long* const from = g_.exchanged + blockIdx.x % P::copies * P::words + word;
    for (int first = threadIdx.x; first < count; first += kThreads * together) {
      unsigned long long got[together];
#pragma unroll
      for (int j = 0; j < together; ++j)
        if (const int i = first + kThreads * j; i < count) load_word(got[j], from + i);
      Wait wait;
      for (bool late = true; late;) {  // loads all missing words again at once
        late = false;
#pragma unroll
        for (int j = 0; j < together; ++j)
          if (const int i = first + kThreads * j; i < count && got[j] >> 32 != number_) late = true, load_word(got[j], from + i);
        if (late && over(wait)) break;
      }
#pragma unroll
      for (int j = 0; j < together; ++j)
        if (const int i = first + kThreads * j; i < count) to[i] = __uint_as_float(static_cast<unsigned>(got[j]));
    }
  }

  // Whether a wait has timed out. The error word is in host memory, so threads read it only when a wait takes far too long.
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

  // The feeder: copies weights into the ring until the room it needs is freed only after draw t.
  __device__ void feed(int t) {
    const unsigned until = (t + 1u) * step_bytes_;
    unsigned ends[kAhead] = {};  // stream positions at the ends of the copies in flight
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ends[i] = stream_;
    const auto came = [&](unsigned up_to) {
      __syncwarp();
      if (lane_ == 0) tell(&scratch_.came, up_to);
    };
    while (fed_ < g_.steps) {
      const Part& mine = parts_[job_];
      const int left = (mine.end - mine.begin) * mine.bytes - at_, bytes = left < kPiece ? left : kPiece;
      if (left == 0) {
        at_ = 0;
        if (++job_ == P::jobs) job_ = 0, ++fed_;
        continue;
      }
      const unsigned room = stream_ + bytes - P::ring;  // must have been consumed up to here
      if (static_cast<int>(room - until) > 0) break;
      const auto full = [&] {
        return __any_sync(0xffffffffu, lane_ < kWarps && static_cast<int>(look_at(&scratch_.used[lane_ % kWarps]) - room) < 0);
      };
      if (full()) {
        __pipeline_wait_prior(0);
        came(stream_);
        while (full()) {
        }
      }
      for (int p = lane_ * 16; p < bytes; p += 32 * 16) {
        const int to = place_ + p;
        __pipeline_memcpy_async(ring_ + (to < P::ring ? to : to - P::ring), mine.weight + at_ + p, 16);
      }
      __pipeline_commit();
      at_ += bytes, stream_ += bytes, place_ = (place_ + bytes) % P::ring;
#pragma unroll
      for (int i = 0; i + 1 < kAhead; ++i) ends[i] = ends[i + 1];
      ends[kAhead - 1] = stream_;
      __pipeline_wait_prior(kAhead - 1);
      came(ends[0]);
    }
    __pipeline_wait_prior(0);
    came(stream_);
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
  typename P::Tables& tables_;
  char* const ring_;
  const int warp_, lane_;
  bool lost_ = false;
  int turn_ = 0;
  unsigned number_ = 0;
  unsigned stream_ = 0, place_ = 0;  // positions in the weight stream and in the ring: the feeder's, or the next product's
  unsigned step_bytes_ = 0;  // the feeder's: bytes per step; below, the step, job and offset of its next copy
  int fed_ = 0, job_ = 0, at_ = 0;
};

template <class Elem, class P>
__global__ void __launch_bounds__(kAll, 1) kernel(const __grid_constant__ Args<Elem> g) {
  Block<Elem, P>(g, ptx::dynamic_shared()).run();
}

}  // namespace elman::whole
