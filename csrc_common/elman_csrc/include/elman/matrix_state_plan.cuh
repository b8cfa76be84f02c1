// How a matrix-state recurrence is laid over a GPU: everything that follows from the sizes at compile time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "matrix_state_cell.h"
#include "matrix_state_numbers.cuh"

namespace elman::matrix {

// The one architecture that a module is built for. Those not `roomy` have 99 KB of shared memory for a block: half as many heads fit.
#if defined(__CUDA_ARCH_LIST__)
constexpr int kArchitecture = __CUDA_ARCH_LIST__;
constexpr bool kMuchShared = kArchitecture >= 900 && kArchitecture < 1200;  // 227 KB
constexpr bool kRoomy = kMuchShared || kArchitecture == 800 || kArchitecture == 870;
#else
constexpr bool kMuchShared = true, kRoomy = true;
#endif
constexpr std::size_t kMostShared = (kMuchShared ? 227 : kRoomy ? 163 : 99) << 10;  // bytes of a block

// Options: struct with `static constexpr unsigned silu, l2, shared`, sets of inputs (matrix_state_cell.h), `static constexpr ScalarKind kind0,
// kind1`, the kinds of the scalar inputs, and `static constexpr bool linear`.
// lines: of a lane, where the tensor cores do the sums: 1, or 2 (2 g and 2 g + 1): half as many warps, each with twice the work, and products
// that are used to the full. The forward has 2, the backward where registers (N <= 16) or shared memory (N > 32) hold the states of a segment.
//
// There a team, the warps of a head, has as many helpers again. They bring the inputs of the next segment and take away the results of the
// one before, while the team's own warps do nothing but recur: tanh and the chain of a step leave half of the cycles to them.
//
// heads: of a block, at most; fewer where their shared memory does not fit.
template <int N_, int V_, class Store_, class Cell_, class Options_, int lines_ = 1, int steps_ = kInterval, int heads_ = 4,
          bool forward_ = false>
struct Plan {
  static constexpr int N = N_, V = V_;
  using Store = Store_;
  using Cell = Cell_;
  using Opt = Options_;
  using Math = std::conditional_t<std::is_same_v<Store, float>, Exact, Fast>;
  static_assert(N % 4 == 0 && N >= 4 && N <= 128, "state rows: a multiple of 4 from 4 to 128");
  static_assert(V >= 1 && V <= 4096, "lines of a head: 1 to 4096");
  static_assert(within_limits<Cell>());
  // Lines in memory, and those that the recurrence is given; learned constants of the recurrence, and those that are folded into lines.
  static constexpr bool folds = Cell::folded > 0;
  static constexpr int NI = Cell::lines, NL = kGivenLines<Cell>, NS = Cell::scalars;
  static constexpr int NC = folds ? 0 : Cell::params, NF = folds ? Cell::params : 0;
  static constexpr int AS = NS > 0 ? NS : 1, AC = NC > 0 ? NC : 1, AF = NF > 0 ? NF : 1;  // extents of arrays
  // Vectors of a step: k, q, then p, g and l, those that there are.
  static constexpr int NX = Cell::vectors;
  static constexpr bool reads = Cell::read_vector >= 0, keeps = Cell::keep_vector >= 0, seconds = Cell::second_vector >= 0;
  static constexpr int at_p = reads ? 2 : 0, at_g = 2 + reads, at_l = at_g + keeps, slots = at_l + seconds;
  static constexpr int writes = seconds ? 2 : 1;  // outer products of a step
  static constexpr int KH = Opt::shared & kOfK ? 0 : N, QH = Opt::shared & kOfQ ? 0 : N;  // from one head's k or q to the next
  static ELMAN_HD constexpr int line_head(int l) { return of_line(Opt::shared, l) ? 0 : V; }
  // Sums over a line and over lines by the tensor cores: tf32 and bf16 operands are within the limits of 16-bit storage.
  // Of large heads those of plain cells.
  static constexpr bool tensor = !std::is_same_v<Store, float> && (N <= 32 || (NX == 0 && !Cell::energy && !Cell::elementwise));
  static constexpr bool helped = tensor;
  // Where registers do not hold the states of a segment, the backward has them in shared memory, in the storage type, and its segments are shorter.
  // So they are where the inputs of sixteen steps would not fit there.
  static constexpr bool large = tensor && N > 32;
  // A large cell without tanh whose writes are affine in what they retrieve takes the steps of a segment at once (matrix_state_blocked.cuh).
  static constexpr bool blocked = large && Cell::delta && kMuchShared;
  static constexpr int segment = blocked ? kInterval : large ? (N <= 64 ? 8 : 4) : !tensor && N > 96 ? 8 : kInterval;
  // Helpers replay, too, while the others walk over the segment behind, if registers suffice for both. They store a state when the walk is done with the
  // one in its place, of which it tells them `signals` times a segment: a named barrier each, and a block has 16. Without tanh they have time to reach
  // every second segment over the one before it, so that half as many states are saved.
  static constexpr bool ahead = large && N <= 64 && !blocked;
  static_assert(!Options_::linear || !Cell::squashes, "the option linear_state is on, and the cell says `squashes`");
  // Where steps are taken at once, own warps have what a step retrieved, and reach every second state by one product (pass_on).
  static constexpr int every = blocked || (ahead && Options_::linear) ? 2 : 1;  // segments between saved states
  static constexpr int interval = every * segment;  // steps between them
  static constexpr int steps = steps_;  // of a segment, whose inputs travel together: of a backward `segment`, of a forward 16
  static constexpr bool looks_ahead = tensor && !(large && steps == segment);  // the next k is read with this q
  // Where a line is long the forward keeps, for the backward, what every step retrieved, which spares the replay its products; then also states in
  // the storage type, which makes room for that. In short lines it is not worth what helpers have to bring and to take.
  static constexpr bool keeps_r = tensor && N > 24;
  using Kept = std::conditional_t<keeps_r, Store, float>;
  static constexpr int L = tensor ? 4 : N <= 8 ? 4 : N <= 16 ? 2 : N <= 32 ? 4 : N <= 64 ? 8 : 16;
  static constexpr int M = tensor ? lines_ : 1;  // lines a lane
  static_assert(M == 1 || M == 2);
  static constexpr int R = tensor ? (M == 2 ? (N + 7) / 8 * 2 : (N + 15) / 16 * 4) : (N + L - 1) / L, NP = R * L;  // rows a lane
  static constexpr int E = R * M;  // elements a lane
  // A multiprocessor shall hold two blocks of the backward. Where a cell has many inputs, gradients of lines lie in place of the lines, saved states go
  // straight to registers, and a line gives one share of a scalar.
  static constexpr bool tight = tensor && !large && NI + NX > 2;
  // Of cells that fold lines: with one line a lane, updates are products, so that a lane reads neither its rows of q and p nor more than half of its
  // rows of k. dkeep, for which nothing in the recurrence waits, is the diagonal of a product: in the storage type where keep is a line's, in tf32 where
  // it is a scalar, of which all lines make a sum.
  static constexpr bool lean = tensor && !large && folds && !keeps && !seconds && !Cell::energy && !Cell::elementwise;
  static constexpr bool outer = lean && lines_ == 1, diagonal = lean && (outer || !Cell::scalar_keep);
  // With p beside k each lane then gives one column of the sums over lines, three of them at once: number i of a slot lies at i ^ swapped(slot), in
  // other banks for each slot.
  static constexpr bool columns = outer && reads && N == 32;
  static ELMAN_HD constexpr int swapped(int slot) { return slot == 1 ? 16 : slot == 2 ? 2 : 0; }
  // Elsewhere dkeep, a sum over the elements of a line, is a product with two lines a lane, if a product is waited for anyway.
  static constexpr bool sums_keep =
      !diagonal && !Cell::elementwise && (tight || (tensor && !large && lines_ == 2 && Cell::retrieves && !Cell::scalar_keep));
  // Rows come in groups of VW, groups interleaved.
  static constexpr int VW = large && R % 8 == 0 ? 8 : R % 4 == 0 ? 4 : R % 2 == 0 ? 2 : 1, RV = R / VW;
  static constexpr int C = 32 / L * M;
  static constexpr int warps = (V + C - 1) / C;  // of a head
  static constexpr int group = !helped || kRoomy ? 4 : 2;  // warps that a block recurs with; 4 is a warpgroup
  // A blocked backward of N > 64 in bf16: with eight own warps, two blocks instead of four make a head's keys ready. Its helpers have few registers.
  static constexpr bool broad = blocked && !forward_ && N > 64 && NL == 1 && std::is_same_v<Store, bf16>;
  static constexpr bool two_groups = large && kMuchShared && (!blocked || (NL == 1 && (N <= 64 || forward_ || broad)));
  static constexpr int most = two_groups ? 8 : group;
  static constexpr int PARTS = (warps + most - 1) / most;
  static constexpr int WPH = (warps + PARTS - 1) / PARTS;
  static constexpr int TL = WPH * 32;
  // A forward whose results go straight to memory, and whose launch says how many heads a block has: nearly a whole multiprocessor's.
  static constexpr bool straight = lean && reads && Cell::squashes && N == 32 && V == 32 && M == 2;
  static constexpr int HB = straight ? heads_ : WPH >= group ? 1 : group / WPH < heads_ ? group / WPH : heads_;  // heads of a block
  // Some of a group may have nothing to do.
  static constexpr int own = helped && !straight ? (HB * WPH + group - 1) / group * group : HB * WPH;
  static constexpr int threads = own * 32 * (helped ? 2 : 1);
  // Blocks that a multiprocessor shall hold, which bounds the registers of a thread.
  static constexpr int large_threads = N > 64 ? 512 : blocked ? 1024 : 768;  // of a multiprocessor
  static constexpr int forward_blocks = !helped ? 1 : large ? large_threads / threads : straight ? 1 : N > 16 ? 3 : 2;
  static constexpr bool alone = !ELMAN_REGISTERS_MOVE || own > group || (blocked && N > 64);
  static constexpr int backward_blocks = helped ? (alone ? 1 : 2) : threads <= 128 ? 2 : 1;
  static constexpr int signals = !ahead || HB > 2 ? 1 : HB > 1 ? 4 : 8;
  static constexpr int moved = tight ? 72 : broad ? (N > 96 ? 64 : 80) : blocked ? 88 : 48;
  static constexpr bool moves = !blocked || own > group;  // whether helpers give registers to own warps in the backward
  static constexpr int helper_registers = ahead ? 112 : moved,
                       own_registers = 256 - helper_registers;  // of the backward, where registers move
  // The same of the forward of a large head.
  static constexpr int forward_registers[2] = {blocked ? (N > 64 ? 184 : 72) : (N > 64 ? 208 : 112),
                                               blocked ? (N > 64 ? 72 : 56) : 48};
  // Of loops outside the recurrence. Helpers' code shall leave room in the instruction cache: the forward has more of it.
  static constexpr int unroll = blocked && (forward_ || N > 64) ? 2 : helped ? 1 : 8, forward_ready = 8;
  static constexpr int backward_ready = helped && (!blocked || N <= 64) ? (N > 16 ? 1 : 2) : 8;
  static constexpr bool passage = broad && N > 96;  // there is no room for three segments of ready inputs, but for a Passage
  static constexpr int buffers = helped ? 2 : 1, ready_buffers = blocked && !passage ? 3 : buffers;
  static constexpr int raw_buffers = helped ? ready_buffers + 1 : 2;
  static constexpr int result_buffers = large && !ahead ? 1 : buffers;  // of what a walk leaves
  // Where q begins, after k: in other banks than the next k, which is read with it.
  static constexpr int Q = large ? NP + ((VW == 8 ? 4 : 16) + 32 - NP % 32) % 32 : NP;
  static constexpr int CB = WPH * C;
  // From a step to the next, of lines in fp32 and in the storage type: four steps by eight lines lie in different banks.
  static constexpr int line_pitch = CB + (blocked ? 4 : 0), row_pitch = CB + (blocked ? 8 : 0);
  // Of a step's gradients of vectors and scalars from one part of a head, fp32; of vectors in the storage type where steps are taken at once.
  static constexpr int part_width = (blocked ? 1 : 2 + NX) * N + 4;
  static constexpr int sz = sizeof(Store);
  // Lanes that convert a row of k or q; lanes that add up the shares of a scalar, one of each lane, in a large head four of each warp.
  static constexpr int KL = N > 64 && N % 16 == 0 ? 16 : N > 32 && N % 8 == 0 && tensor ? 8 : 4;
  static constexpr int SL = large ? 1 : TL >= 128 ? 8 : TL >= 64 ? 4 : 2;
  static constexpr int shares = blocked ? WPH : large ? 4 * WPH : tight ? 8 * WPH : TL;
  static constexpr int piece_kq = largest_power(N * sz, 16);
  static constexpr int piece_line = largest_power(largest_power(V * sz, 16) < 4 ? 2 : V * sz, largest_power(CB* sz, 16));
  static constexpr int EV = CB % 4 == 0 ? 4 : 2;  // lines handled at once outside the loop
  static constexpr bool wide = V % EV == 0;
  static ELMAN_HD constexpr int row_of(int rg, int i) { return ((i / VW) * L + rg) * VW + i % VW; }
  static ELMAN_HD constexpr int element(int m, int i) { return i * M + m; }  // row i of line m
  static ELMAN_HD constexpr int line_of(int e) { return e % M; }
  static ELMAN_HD constexpr int k_of(int e) { return e / M; }
  static constexpr int most_lines = large || (tensor && N <= 16) ? 2 : 1;  // of a lane in the backward
  // Steps of a turn of the forward's loop. Many warps are at different places of it: the instruction cache shall hold it.
  static constexpr int unrolled = straight ? 4 : segment;
  static constexpr ScalarKind kind0 = Opt::kind0, kind1 = Opt::kind1;
  static constexpr bool mamba = kind0 == ScalarKind::mamba;
  static_assert(kind1 != ScalarKind::mamba, "only scalar 0 is a decay");
};

}  // namespace elman::matrix
