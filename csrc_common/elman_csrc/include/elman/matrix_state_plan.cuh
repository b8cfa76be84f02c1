// The layout of a matrix-state recurrence on a GPU: everything derived from the sizes at compile time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "matrix_state_cell.h"
#include "matrix_state_numbers.cuh"

namespace elman::matrix {

// The architecture that a module is built for. Without kRoomy, a block has 99 KB of shared memory, and half as many heads fit.
#if defined(__CUDA_ARCH_LIST__)
constexpr int kArchitecture = __CUDA_ARCH_LIST__;
constexpr bool kMuchShared = kArchitecture >= 900 && kArchitecture < 1200;  // 227 KB
constexpr bool kRoomy = kMuchShared || kArchitecture == 800 || kArchitecture == 870;
#else
constexpr bool kMuchShared = true, kRoomy = true;
#endif
constexpr std::size_t kMostShared = (kMuchShared ? 227 : kRoomy ? 163 : 99) << 10;  // bytes of a block

// Options: struct with `static constexpr unsigned silu, l2, shared`, sets of inputs (matrix_state_cell.h), `wide`, the set of vectors that are float
// beside 16-bit storage, `static constexpr ScalarKind kind0, kind1`, the kinds of the scalar inputs, and `static constexpr bool linear, packed, one_group`:
// packed if documents start inside rows; one_group if the shared memory of eight own warps of a large head with vectors does not fit.
// lines: lines per lane if the tensor cores compute the sums: 1, or 2 (2 g and 2 g + 1), which halves the number of warps, doubles the work of each and
// fills the products. The forward has 2; the backward has 2 if registers (N <= 16) or shared memory (N > 32) hold the states of a segment.
//
// A team (the warps of a head) then has as many helper warps again. They load the inputs of the next segment and store the
// results of the previous one, while the team's own warps compute only the recurrence: tanh and the chain of a step leave half
// of the cycles free.
//
// heads: most heads per block; fewer if their shared memory does not fit.
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
  // Lines in memory, and lines given to the recurrence; learned constants of the recurrence, and those folded into lines.
  static constexpr bool folds = Cell::folded > 0;
  static constexpr int NI = Cell::lines, NL = kGivenLines<Cell>, NS = Cell::scalars;
  static constexpr int NC = folds ? 0 : Cell::params, NF = folds ? Cell::params : 0;
  static constexpr int AS = NS > 0 ? NS : 1, AC = NC > 0 ? NC : 1, AF = NF > 0 ? NF : 1;  // extents of arrays
  // Vectors of a step: k, q, then p, g and l if they exist.
  static constexpr int NX = Cell::vectors;
  static constexpr bool reads = Cell::read_vector >= 0, keeps = Cell::keep_vector >= 0, seconds = Cell::second_vector >= 0;
  static constexpr int at_p = reads ? 2 : 0, at_g = 2 + reads, at_l = at_g + keeps, slots = at_l + seconds;
  static constexpr int writes = seconds ? 2 : 1;  // outer products per step
  static constexpr int words = seconds ? 3 : NX > 0 ? 2 : 1;  // for the gradients of a row of the vectors, two each
  static constexpr int KH = Opt::shared & kOfK ? 0 : N, QH = Opt::shared & kOfQ ? 0 : N;  // stride from head to head of k and q
  static ELMAN_HD constexpr int line_head(int l) { return of_line(Opt::shared, l) ? 0 : V; }
  // The tensor cores compute sums over a line and over lines: tf32 and bf16 operands are within the limits of 16-bit storage.
  // For large heads, not those of energies and elementwise cells; further vectors need the room.
  static constexpr bool tensor =
      !std::is_same_v<Store, float> && (N <= 32 || (!Cell::energy && !Cell::elementwise && (NX == 0 || kMuchShared)));
  static constexpr bool helped = tensor;
  // If registers do not hold the states of a segment, the backward keeps them in shared memory, in the storage type, and its segments are shorter. They are
  // also shorter if the inputs of sixteen steps would not fit there.
  static constexpr bool large = tensor && N > 32;
  // A large cell without tanh, whose writes are affine in the retrieved values, computes the steps of a segment at once (matrix_state_blocked.cuh).
  static constexpr bool blocked = large && Cell::delta && kMuchShared;
  static constexpr int segment = blocked ? kInterval : large ? (N <= 64 ? 8 : 4) : !tensor && N > 96 ? 8 : kInterval;
  // Helpers also replay a segment while the others walk the following one, if registers suffice for both. They store a state
  // once the walk no longer needs the one in its place. The walk signals that `signals` times per segment, each with a named
  // barrier, of which a block has 16. Without tanh, helpers have time to compute the state before every second segment from the
  // one before it, so half as many are saved.
  static constexpr bool ahead = large && N <= 64 && !blocked;
  static_assert(!Options_::linear || !Cell::squashes, "the option linear_state is on, and the cell says `squashes`");
  // With sixteen steps at once, own warps have the retrieved values and compute every second state with one product (pass_on).
  static constexpr int every = blocked || (ahead && Options_::linear && NX == 0) ? 2 : 1;  // segments between saved states
  static constexpr int interval = every * segment;  // steps between them
  static constexpr int steps = steps_;  // of a segment, whose inputs travel together: `segment` in the backward, 16 in the forward
  static constexpr bool looks_ahead = tensor && !(large && steps == segment);  // the next k is read with this q
  // For long lines the forward saves the retrieved values of every step, so that the replay needs no products. It then also saves states in the storage
  // type, which makes room for them. For short lines the extra traffic of the helpers costs more than it saves.
  static constexpr bool keeps_r = tensor && N > 24;
  using Kept = std::conditional_t<keeps_r, Store, float>;
  static constexpr int L = tensor ? 4 : N <= 8 ? 4 : N <= 16 ? 2 : N <= 32 ? 4 : N <= 64 ? 8 : 16;
  static constexpr int M = tensor ? lines_ : 1;  // lines per lane
  static_assert(M == 1 || M == 2);
  static constexpr int R = tensor ? (M == 2 ? (N + 7) / 8 * 2 : (N + 15) / 16 * 4) : (N + L - 1) / L, NP = R * L;  // rows per lane
  static constexpr int E = R * M;  // elements per lane
  // Two blocks of the backward should fit a multiprocessor. So if a cell has many inputs, gradients of lines overwrite the
  // lines, saved states go straight to registers, and a line gives one share of a scalar.
  static constexpr bool tight = tensor && !large && NI + NX > 2;
  // For cells that fold lines: with one line per lane, updates are products, so a lane reads none of its rows of q and p and at most half of its rows of k.
  // Nothing in the recurrence waits for dkeep, so it is the diagonal of a product: in the storage type if each line has its own keep, in tf32 if keep is a
  // scalar, whose gradient sums all lines.
  static constexpr bool lean = tensor && !large && folds && !keeps && !seconds && !Cell::energy && !Cell::elementwise;
  static constexpr bool outer = lean && lines_ == 1, diagonal = lean && (outer || !Cell::scalar_keep);
  // With p beside k, each lane gives one column of the sums over lines, and three columns are stored at once: number i of a slot lies at i ^ swapped(slot),
  // in different banks for each slot.
  static constexpr bool columns = outer && reads && N == 32;
  static ELMAN_HD constexpr int swapped(int slot) { return slot == 1 ? 16 : slot == 2 ? 2 : 0; }
  // Otherwise dkeep, a sum over the elements of a line, is a product with two lines per lane, if the step waits for a product anyway.
  static constexpr bool sums_keep =
      !diagonal && !Cell::elementwise && (tight || (tensor && !large && lines_ == 2 && Cell::retrieves && !Cell::scalar_keep));
  // Rows come in groups of VW, groups interleaved. A saved line has whole groups, so that each is aligned and none reaches into the next line.
  static constexpr int VW = large && R % 8 == 0 && N % 8 == 0 ? 8 : R % 4 == 0 ? 4 : R % 2 == 0 ? 2 : 1, RV = R / VW;
  static_assert(N % VW == 0);
  static constexpr int C = 32 / L * M;
  static constexpr int warps = (V + C - 1) / C;  // of a head
  static constexpr int group = !helped || kRoomy ? 4 : 2;  // own warps of a block; 4 is a warpgroup
  // A blocked backward of N > 64 in bf16: with eight own warps, two blocks instead of four make a head's keys ready. Its helpers have few registers.
  static constexpr bool broad = blocked && !forward_ && N > 64 && NL == 1 && std::is_same_v<Store, bf16>;
  static constexpr bool two_groups =
      large && kMuchShared && (NX == 0 || (N > 64 && !Opt::one_group)) && (!blocked || (NL == 1 && (N <= 64 || forward_ || broad)));
  static constexpr int most = two_groups ? 8 : group;
  static constexpr int PARTS = (warps + most - 1) / most;
  static constexpr int WPH = (warps + PARTS - 1) / PARTS;
  static constexpr int TL = WPH * 32;
  // A forward that writes results straight to memory. Its launch chooses the heads per block: nearly all that a multiprocessor
  // holds.
  static constexpr bool straight = lean && reads && Cell::squashes && N == 32 && V == 32 && M == 2;
  static constexpr int HB = straight ? heads_ : WPH >= group ? 1 : group / WPH < heads_ ? group / WPH : heads_;  // heads per block
  // Some warps of a group may be idle.
  static constexpr int own = helped && !straight ? (HB * WPH + group - 1) / group * group : HB * WPH;
  static constexpr int threads = own * 32 * (helped ? 2 : 1);
  // Blocks that should fit a multiprocessor; this bounds the registers per thread.
  static constexpr int large_threads = N > 64 ? 512 : blocked ? 1024 : 768;  // per multiprocessor
  static constexpr int forward_blocks = !helped ? 1 : large ? large_threads / threads : straight ? 1 : N > 16 ? 3 : 2;
  static constexpr bool alone = !ELMAN_REGISTERS_MOVE || own > group || (blocked && N > 64);
  static constexpr int backward_blocks = helped ? (alone ? 1 : 2) : threads <= 128 ? 2 : 1;
  static constexpr int signals = !ahead || HB > 2 ? 1 : HB > 1 ? 4 : 8;
  static constexpr int moved = tight ? 72 : broad ? (N > 96 ? 64 : 80) : blocked ? 88 : 48;
  static constexpr bool moves = !blocked || own > group;  // whether helpers give registers to own warps in the backward
  static constexpr int helper_registers = ahead ? 112 : moved,
                       own_registers = 256 - helper_registers;  // in the backward, if registers move
  // The same for the forward of a large head.
  static constexpr int forward_registers[2] = {blocked ? (N > 64 ? 184 : 72) : (N > 64 ? 208 : 112),
                                               blocked ? (N > 64 ? 72 : 56) : 48};
  static constexpr bool renews = large && !ahead && NX > 0;  // helpers compute addresses anew, or they would be spilled
  // For loops outside the recurrence. The helpers' code must leave room in the instruction cache; the forward has more of it.
  static constexpr int unroll = blocked && (forward_ || N > 64) ? 2 : helped ? 1 : 8, forward_ready = 8;
  static constexpr int backward_ready = helped && (!blocked || N <= 64) ? (N > 16 ? 1 : 2) : 8;
  static constexpr bool passage = broad && N > 96;  // three segments of ready inputs do not fit, but a Passage does
  static constexpr int buffers = helped ? 2 : 1, ready_buffers = blocked && !passage ? 3 : buffers;
  static constexpr int raw_buffers = helped ? ready_buffers + 1 : 2;
  static constexpr int result_buffers = large && !ahead ? 1 : buffers;  // buffers for a walk's results
  // Start of q, after k: in other banks than the next k, which is read together with it.
  static constexpr int Q = large ? NP + ((VW == 8 ? 4 : 16) + 32 - NP % 32) % 32 : NP;
  static constexpr int CB = WPH * C;
  // Strides from one step to the next, for lines in fp32 and in the storage type: four steps by eight lines lie in different banks.
  static constexpr int line_pitch = CB + (blocked ? 4 : 0), row_pitch = CB + (blocked ? 8 : 0);
  // Widths of a step's gradients of vectors and scalars from one part of a head, in fp32; with sixteen steps at once, vectors are in the storage type.
  static constexpr int part_width = (blocked ? 1 : 2 + NX) * N + 4;
  static constexpr int sz = sizeof(Store);
  // Lanes that convert a row of k or q; lanes that sum the shares of a scalar: one share per lane, in a large head four per warp.
  static constexpr int KL = two_groups && NX > 0 && N % 32 == 0 && WPH % 2 == 0 ? 32
                            : N > 64 && N % 16 == 0                             ? 16
                            : N > 32 && N % 8 == 0 && tensor                    ? 8
                                                                                : 4;
  static constexpr int SL = large ? 1 : TL >= 128 ? 8 : TL >= 64 ? 4 : 2;
  static constexpr int shares = blocked ? WPH : large ? 4 * WPH : tight ? 8 * WPH : TL;
  static constexpr int piece_kq = largest_power(N * sz, 16);
  static ELMAN_HD constexpr bool wide_vector(int i) { return Opt::wide >> i & 1; }
  static constexpr int vector_size =
      Opt::wide ? 4 : sz;  // bytes of an element in shared memory; one that is not wide leaves half of its row empty
  static constexpr int piece_line = largest_power(largest_power(V * sz, 16) < 4 ? 2 : V * sz, largest_power(CB* sz, 16));
  static constexpr int EV = CB % 4 == 0 ? 4 : 2;  // lines handled at once outside the loop
  static constexpr bool wide = V % EV == 0;
  static ELMAN_HD constexpr int row_of(int rg, int i) { return ((i / VW) * L + rg) * VW + i % VW; }
  static ELMAN_HD constexpr int element(int m, int i) { return i * M + m; }  // row i of line m
  static ELMAN_HD constexpr int line_of(int e) { return e % M; }
  static ELMAN_HD constexpr int k_of(int e) { return e / M; }
  static constexpr int most_lines = large || (tensor && N <= 16) ? 2 : 1;  // per lane in the backward
  // Steps per turn of the forward's loop. Many warps are at different places of the loop, so the instruction cache should hold it.
  static constexpr int unrolled = straight ? 4 : segment;
  static constexpr ScalarKind kind0 = Opt::kind0, kind1 = Opt::kind1, kind2 = Opt::kind2;
  static constexpr bool packed = Opt::packed;
  static constexpr bool mamba = kind0 == ScalarKind::mamba;
  static_assert(kind1 != ScalarKind::mamba && kind2 != ScalarKind::mamba, "only scalar 0 is a decay");
};

}  // namespace elman::matrix
