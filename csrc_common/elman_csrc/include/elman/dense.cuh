// The dense skeleton: h_t = Cell(W h_{t-1} + u_t), all time steps in one persistent launch, forward and backward.
//
// A group is P = ceil(d / R) blocks. Block p owns R rows of the matrix and holds them on chip for the whole launch (dense_product.cuh).
// The batch is cut into independent tiles of up to 8 * N rows; a group takes one tile or several. In each step a block reads the
// whole state of a tile's rows and computes R channels of the next one, in the epilogue (dense_word.cuh). The backward walks from
// the end, with the transposed matrix and another epilogue:
//
//   forward   iteration s = 0 .. T-1  (t = s):       h_t  = Cell::forward(W h_{t-1} + u_t)
//   backward  iteration s = 0 .. T    (t = T-1-s):   gh_t = W^T da_{t+1} + carry,   da_t = Cell::backward(gy_t, gh_t)
//                                                    and gh_{-1} = dL/dh_0
//
// Tied weights: if the same matrix projects the input, h_t = Cell(W (h_{t-1} + x_t) + b), a block adds x to the state before it sends it, so one product
// per step covers both. There is no projection before the loop, and the products of the backward are the gradient of x. The launch can include a SiLU in
// front of x, and it sums the gradient of b.
//
// Blocks exchange their results in one of two ways (Exchange):
//
//   Grid     through L2. The output tensor itself is the exchange: it holds a sentinel NaN some steps ahead (kFilled), every word is
//            then written once, and readers poll until no sentinel is left. There is no barrier and no flag: each word is either
//            the sentinel or final. All blocks must be resident (a cooperative launch); every wait is bounded in time.
//   Cluster  through distributed shared memory, for P <= 16. A group is one thread-block cluster, which the hardware places as
//            a whole. A warp sends 16-byte pieces into every peer's shared memory, where an mbarrier counts them. Two slots
//            alternate. A slot is free again when its reader has sent its own next step, that is, when that step arrives here.
#pragma once

#include "dense_exchange.cuh"
#include "dense_word.cuh"

namespace elman::dense {

// A tile has up to 8 * N batch rows. single: a group has one tile; otherwise several, and it works on the others while the
// words of one travel.
// slots: number of d x d blocks of a block-diagonal matrix. They follow one another in g.w, and their groups are independent.
template <class Cell, class Elem, int d, int slots, int KS, int N, Exchange how, bool single, Input input, bool masked, bool packed,
          bool backward>
__global__ void __launch_bounds__(kThreads, 1) dense_kernel(const __grid_constant__ DenseArgs<Elem, Cell::extras> g) {
  constexpr int KC = kChunks<d>, KW = KC * kChunk;
  constexpr bool cluster = how == Exchange::Cluster, tied = input != Input::Projected;
  static_assert(!cluster || (single && N == 1), "clusters take one tile of 8 rows each: more of them run in waves");
  using S = Storage<Elem>;
  using P = Product<Elem, KC, KS, N>;
  using L = Layout<Elem, d, KS, N, how>;
  using Slot = Slots<Elem, KC>;
  constexpr int VW = S::per_word, R = kOwned<Elem>, D = slots * d;  // D: channels of a row
  constexpr int parts = (d + R - 1) / R;  // gridDim.x; a constant, so that sending is four stores in a row and not a loop
  static_assert(slots == 1 || (!tied && d % R == 0), "the last block of a slot owns all of its rows");
  char* const shared = ptx::dynamic_shared();

  const int slot_channel = slots > 1 ? blockIdx.z * d : 0;
  const int part = blockIdx.x, groups = gridDim.y, first_tile = blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int local_tiles = single ? 1 : (g.tiles - first_tile + groups - 1) / groups;
  const unsigned shared_base = ptx::shared_address(shared);
  auto carry = [&](int local, int n) {
    return reinterpret_cast<float*>(shared + L::carry) + (local * N + n) * kThreads * VW + threadIdx.x * VW;
  };
  auto rows_in = [&](int tile) { return min(g.rows, g.B - tile * g.rows); };

  Elem* const exchange = backward ? g.da : tied ? g.sums : g.history;
  P product;
  product.template load<backward>(g.w + static_cast<size_t>(slot_channel) * d, d, part * R, shared + L::spill);
  SpinTimeout timeout{g.error, g.timeout_ns};

  // ---- receiving: this warp's slice of the state, KC chunks of 32 columns ---------------------------------------------------
  constexpr bool full = d == kWarps * KW;  // no column is padding
  const int slice_columns = full ? KW : min(max(d - warp * KW, 0), KW);
  auto barrier = [&](int slot, int w) { return shared_base + L::barriers + (slot * kWarps + w) * 8; };
  uint4 piece[KC][P::pieces];
  unsigned wanted = 0;  // bit k: this lane's piece of chunk k lies inside d
#pragma unroll
  for (int k = 0; k < KC; ++k)
    if (full || k * kChunk + P::column(lane, 0) < slice_columns) wanted |= 1u << k;

  const Elem* from[P::pieces];
  auto look_at = [&](int k) {
#pragma unroll
    for (int j = 0; j < P::pieces; ++j) {
      if constexpr (full) ptx::load_relaxed(piece[k][j], from[j] + k * kChunk);
      else ptx::load_relaxed(piece[k][j], from[j] + k * kChunk, wanted & 1u << k);
    }
  };
  auto clear_piece = [&](int k) {
    if constexpr (!full)
#pragma unroll
      for (int j = 0; j < P::pieces; ++j) piece[k][j] = make_uint4(0, 0, 0, 0);
  };
  // Row t of the exchange tensor (one row longer in the forward). A lane without a batch row repeats the last one.
  auto aim_at = [&](int t, int tile) {
    const int last = rows_in(tile) - 1;
#pragma unroll
    for (int j = 0; j < P::pieces; ++j)
      from[j] = exchange + static_cast<size_t>(t * g.B + tile * g.rows + min(P::row(lane, j), last)) * D + slot_channel +
                warp * KW + P::column(lane, j);
  };
  auto look_first = [&] {
#pragma unroll
    for (int k = 0; k < KC; ++k) {
      clear_piece(k);
      look_at(k);
    }
  };
  auto look_until_there = [&] {  // after a timeout the sentinel remains, and it is a NaN
    timeout.turns = 0;
    while (true) {
      unsigned top = 0;
#pragma unroll
      for (int k = 0; k < KC; ++k)
#pragma unroll
        for (int j = 0; j < P::pieces; ++j) top = max(top, largest(piece[k][j]));
      if (!__any_sync(~0u, top == kSentinel) || timeout.over()) break;
#pragma unroll
      for (int k = 0; k < KC; ++k) look_at(k);
    }
  };
  auto multiply = [&](bool look_again) {  // a chunk, once multiplied, makes room for one of the next tile
#pragma unroll
    for (int k = 0; k < KC; ++k) {
      product.add(k, piece[k], shared + L::stage);
      if (!single && look_again) {
        clear_piece(k);
        look_at(k);
      }
    }
  };
  // 16 bytes of the first product's operand: h_0, from the caller's float tensor, plus the first x if tied.
  auto initial = [&](int row, int column) {
    const float* from = g.h0 + static_cast<size_t>(row) * D + slot_channel + column;
    if constexpr (!tied) return rounded<Elem>(from);
    float sum[4 * VW];
    const Elem* x = g.u.data + row * g.u.b + column;
#pragma unroll
    for (int i = 0; i < 4 * VW; ++i)
      sum[i] = (packed && g.starts[row] ? 0.f : from[i]) + input_of<Elem, input>(static_cast<float>(x[i]));
    return rounded<Elem>(sum);
  };
  auto multiply_initial = [&](int tile) {
#pragma unroll
    for (int k = 0; k < KC; ++k) {
#pragma unroll
      for (int j = 0; j < P::pieces; ++j) {
        const int r = P::row(lane, j), column = warp * KW + k * kChunk + P::column(lane, j);
        const bool inside = r < rows_in(tile) && column < d;
        piece[k][j] = inside ? initial(tile * g.rows + r, column) : make_uint4(0, 0, 0, 0);
      }
      product.add(k, piece[k], shared + L::stage);
    }
  };
  const int slice_bytes = slice_columns * rows_in(first_tile) * static_cast<int>(sizeof(Elem));
  auto multiply_from_slot = [&](int s) {  // data sent in iteration s - 1
    const int slot = (s - 1) & 1, parity = ((s - 1) >> 1) & 1;
    if (!full && slice_columns == 0) return;
    timeout.turns = 0;
    while (!ptx::barrier_passed(barrier(slot, warp), parity) && !timeout.over()) {
    }
    const char* slice = shared + L::slots + slot * Slot::slot_bytes + warp * Slot::slice_bytes;
#pragma unroll
    for (int k = 0; k < KC; ++k) product.add_from(k, slice + k * kChunk * sizeof(Elem), Slot::row_bytes);
    if (lane == 0 && !timeout.lost) ptx::barrier_expect(barrier(slot, warp), slice_bytes);  // after the loads, which it would delay
    if (timeout.lost) product.poison();
  };

  // ---- sending: eight lanes send the eight 16-byte pieces of this warp's batch row to one peer, 32 lanes to four --------------
  const int sent_column = part * R + lane % 8 * 4 * VW, sent_slice = sent_column / KW;
  unsigned send_to = shared_base + L::slots + sent_slice * Slot::slice_bytes + warp * Slot::row_bytes +
                     (sent_column % KW) * static_cast<int>(sizeof(Elem));
  auto send = [&](int s, unsigned v) {
    uint4 x;
    const int i = lane % 8 * 4, slot = s & 1;
    x.x = __shfl_sync(~0u, v, i), x.y = __shfl_sync(~0u, v, i + 1), x.z = __shfl_sync(~0u, v, i + 2),
    x.w = __shfl_sync(~0u, v, i + 3);
    if ((d % R == 0 || sent_column < d) && !timeout.lost)
      for (int peer = lane / 8; peer < parts; peer += 4)
        ptx::store_async(ptx::in_block(send_to + slot * Slot::slot_bytes, peer), x, ptx::in_block(barrier(slot, sent_slice), peer));
  };
  if constexpr (cluster) {
    ptx::pin(send_to);
    for (int i = threadIdx.x; i < 2 * Slot::slot_bytes / 16; i += kThreads)
      reinterpret_cast<uint4*>(shared + L::slots)[i] = make_uint4(0, 0, 0, 0);
    if (lane == 0)
      for (int slot = 0; slot < 2; ++slot) {
        ptx::barrier_init(barrier(slot, warp), 1);
        if (slice_bytes) ptx::barrier_expect(barrier(slot, warp), slice_bytes);
      }
    ptx::cluster_sync();
  }

  // ---- the epilogue: this thread has a word in each of the batch rows warp, warp + 8 ... of a tile --------------------------
  using W = Word<Cell, Elem, D, input, masked, packed, backward>;
  W words[N];
  const int channel = slot_channel + part * R + lane * VW, first_t = backward ? g.T - 1 : 0;
  const bool mine = d % R == 0 || channel < d;
  const ptrdiff_t plane = static_cast<ptrdiff_t>(g.B) * D, forth = backward ? -plane : plane;
  auto works = [&](int tile, int n) { return warp + kRows * n < rows_in(tile); };
  auto row_of = [&](int tile, int n) { return tile * g.rows + warp + kRows * n; };
  auto word_at = [&](int t, int tile) {
    return static_cast<ptrdiff_t>(t * g.B + row_of(tile, 0)) * D + channel;
  };  // the next one lies 8 * D further
  int fetch_s = 0, fetch_tile = first_tile;
  auto fetch = [&](typename W::Inputs(&into)[N]) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const bool has_row = works(fetch_tile, n);
      if (!single && has_row && fetch_s < g.T + (W::derives || (packed && backward)))
        words[n].aim(g, backward ? first_t - fetch_s : fetch_s, row_of(fetch_tile, n), channel);
      into[n] = words[n].fetch(g, has_row, fetch_s);
    }
    fetch_tile += groups;
    if (single || fetch_tile >= g.tiles) fetch_tile = first_tile, ++fetch_s;
  };

  for (int local = 0; local < local_tiles; ++local)  // the initial state, or the gradient of the final one
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int tile = first_tile + local * groups;
      const float* initial = backward ? g.ghT : g.h0;
      const ptrdiff_t at = word_at(0, tile) + n * kRows * D;
      float value[VW];
#pragma unroll
      for (int i = 0; i < VW; ++i) carry(local, n)[i] = value[i] = works(tile, n) && mine ? initial[at + i] : 0.f;
      if (backward || !works(tile, n) || !mine) continue;
      *reinterpret_cast<unsigned*>(g.history + at) = S::pack(value);
      if constexpr (tied) {
#pragma unroll
        for (int i = 0; i < VW; ++i)
          value[i] = (packed && g.starts[row_of(tile, n)] ? 0.f : value[i]) +
                     input_of<Elem, input>(static_cast<float>(g.u.data[row_of(tile, n) * g.u.b + channel + i]));
        *reinterpret_cast<unsigned*>(g.sums + at) = S::pack(value);
      }
    }
  float bias[VW] = {}, dbias[VW] = {}, lost[VW] = {};
  if constexpr (tied && !backward)
#pragma unroll
    for (int i = 0; i < VW; ++i) bias[i] = mine ? g.bias[channel + i] : 0.f;

  // ---- the walk --------------------------------------------------------------------------------------------------------------
  unsigned partial_out = shared_base + L::partial + warp * kRows * N * kStride<Elem> * 4 + P::place(lane);
  unsigned partial_in = shared_base + L::partial + (warp * kStride<Elem> + lane * VW) * 4;
  ptx::pin(partial_out), ptx::pin(partial_in);
  int other = L::partial_bytes;  // offset of the other buffer. Two alternate, so one barrier per iteration is enough
  ptrdiff_t at = word_at(first_t, first_tile);
  int summed = static_cast<int>(clock64());
  if constexpr (single)
#pragma unroll
    for (int n = 0; n < N; ++n) words[n].aim(g, first_t, row_of(first_tile, n), channel);
  typename W::Inputs next[N], after[N];
  fetch(next);
  fetch(after);
  const int iterations = backward ? g.T + 1 : g.T;
  for (int s = 0; s < iterations; ++s) {
    if (!cluster && s % kFence == 0) ptx::fence();
    for (int local = 0; local < local_tiles; ++local) {
      // Everything up to the wait runs while the other blocks' words travel.
      const int tile = first_tile + local * groups, t = backward ? first_t - s : s;
#pragma unroll
      for (int n = 0; n < N; ++n) words[n].in = next[n], next[n] = after[n];
      fetch(after);
      if constexpr (!single) at = word_at(t, tile);
      Elem* publish_at = exchange + (backward ? 0 : plane) + at;
      ptx::pin(publish_at);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (!cluster && mine && works(tile, n) && s + kFilled < g.T)
          ptx::store_relaxed(publish_at + n * kRows * D + kFilled * forth, kSentinel);
        words[n].prepare(s == 0, carry(local, n));
      }

      product.clear();
      const bool wraps = local + 1 == local_tiles;
      const int next_s = s + wraps;
      const bool look_ahead = !single && next_s > 0 && next_s < iterations;  // the next tile's words have travelled for a while
      auto aim_ahead = [&] { aim_at(backward ? g.T - next_s : next_s, wraps ? first_tile : tile + groups); };
      if (s == 0) {
        if (!backward) multiply_initial(tile);
        if (look_ahead) {
          aim_ahead();
          look_first();
        }
      } else if constexpr (cluster) {
        multiply_from_slot(s);
      } else {
        if constexpr (single) {
          while (static_cast<int>(clock64()) - summed < g.delay) {
          }
          aim_at(backward ? t + 1 : s, tile);
          look_first();
        }
        look_until_there();
        if (look_ahead) aim_ahead();
        multiply(look_ahead);
      }
      product.store(partial_out, g.rows);
      __syncthreads();
      summed = static_cast<int>(clock64());
      const unsigned sums = partial_in;
      partial_out += other, partial_in += other, other = -other;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (!works(tile, n)) continue;
        float sum[kWarps][VW];
#pragma unroll
        for (int k = 0; k < kWarps; ++k) ptx::load_shared(sum[k], sums + (k * N + n) * kRows * kStride<Elem> * 4);
#pragma unroll
        for (int half = kWarps / 2; half > 0; half /= 2)
#pragma unroll
          for (int k = 0; k < half; ++k)
#pragma unroll
            for (int i = 0; i < VW; ++i) sum[k][i] += sum[k + half][i];

        const unsigned published = words[n].finish(sum[0], bias);
        if (!backward || s < g.T) {
          if constexpr (cluster) {
            if (s + 1 < iterations) send(s, published);
          }
          if (mine) {
            Elem* const to = publish_at + n * kRows * D;
            if constexpr (cluster) *reinterpret_cast<unsigned*>(to) = published;
            else ptx::store_relaxed(to, published);
            words[n].write_rest(g, at + n * kRows * D);
            if constexpr (tied && backward) {
              float da[VW];
              S::unpack(published, da);
#pragma unroll
              for (int i = 0; i < VW; ++i) add<sizeof(Elem) == 4>(dbias[i], lost[i], da[i]);
            }
          }
        }
        if (tied && backward && s > 0 && mine) words[n].write_dx(g, at + n * kRows * D);
        words[n].keep(carry(local, n), s + 1 == iterations);
      }
      if constexpr (single) at += forth;
    }
  }
  for (int local = 0; local < local_tiles; ++local)
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int tile = first_tile + local * groups;
      float* const last = (backward ? g.dh0 : g.hT) + word_at(0, tile) + n * kRows * D;
      if (works(tile, n) && mine)
#pragma unroll
        for (int i = 0; i < VW; ++i) last[i] = carry(local, n)[i];
    }
  if (tied && backward && mine)
#pragma unroll
    for (int i = 0; i < VW; ++i) g.dbias[static_cast<size_t>(first_tile * kRows + warp) * d + channel + i] = dbias[i];
  if constexpr (cluster) ptx::cluster_sync(), timeout.linger();  // no block leaves while a peer may still write to it
}

}  // namespace elman::dense
