// How a matrix-state recurrence is laid over a GPU: everything that follows from the sizes at compile time.
#pragma once

#include <type_traits>

#include "matrix_state_cell.h"
#include "matrix_state_numbers.cuh"

namespace elman::matrix {

// Options: struct with `static constexpr bool silu, l2;  static constexpr ScalarKind kind0, kind1` (kinds of the scalar inputs).
// Tuned: how one kernel, forward or backward, is laid out where the tensor cores do the sums (elsewhere only `blocks` counts).
//   lines   of a lane: 1, or 2 (g and g + 8): half as many warps, each with twice the work and one product for two
//   vector  elements of k and q that a lane reads at once: 2 or 4
//   blocks  that a multiprocessor must hold, so many registers a thread may have; 0: as `resident` says
//   form    with 2 lines from 1 on readout of a step and retrieval of the next are one product with two columns;
//           2: sums over a line take the state as float16 (matrix_state_half.cuh), needs `vector` 4
template <int lines_, int vector_, int blocks_, int form_>
struct Tuned {
  static constexpr int lines = lines_, vector = vector_, blocks = blocks_, form = form_;
  static_assert((lines == 1 || lines == 2) && (vector == 2 || vector == 4) && blocks >= 0 && form >= 0 && form <= 2 &&
                (form != 2 || vector == 4));
};
using Untuned = Tuned<1, 4, 0, 0>;

template <int N_, int V_, class Store_, class Cell_, class Options_, class Tuned_ = Untuned>
struct Plan {
  static constexpr int N = N_, V = V_;
  using Store = Store_;
  using Cell = Cell_;
  using Opt = Options_;
  using Math = std::conditional_t<std::is_same_v<Store, float>, Exact, Fast>;
  static_assert(N % 4 == 0 && N >= 4 && N <= 128, "state rows: a multiple of 4 from 4 to 128");
  static_assert(V >= 1 && V <= 4096, "lines of a head: 1 to 4096");
  static constexpr int NL = Cell::lines, NS = Cell::scalars;
  static_assert(NS >= 1 && NS <= 2);
  // Sums over a line and over lines by the tensor cores: tf32 and bf16 operands are within the limits of 16-bit storage.
  static constexpr bool tensor = N <= 32 && !std::is_same_v<Store, float>;
  static constexpr bool mma = std::is_same_v<Store, bf16> && !tensor;      // only the sums over lines, through shared memory
  static constexpr int L = tensor ? 4 : N <= 8 ? 4 : N <= 16 ? 2 : N <= 32 ? 4 : N <= 64 ? 8 : 16;
  static constexpr int M = tensor ? Tuned_::lines : 1;  // lines a lane
  static constexpr int blocks = Tuned_::blocks;
  static constexpr bool merged = tensor && M == 2 && Tuned_::form >= 1;  // sums over a line in one accumulator
  static constexpr int R = tensor ? (M == 2 ? (N + 7) / 8 * 2 : (N + 15) / 16 * 4) : (N + L - 1) / L, NP = R * L;  // rows a lane
  static constexpr int E = R * M, Q = E / 4;                   // elements a lane; tensor: in quads, each an A fragment
  static constexpr int VW = tensor       ? (R % 4 == 0 ? Tuned_::vector : 2)
                            : R % 4 == 0 ? 4
                            : R % 2 == 0 ? 2
                                         : 1,
                       RV = R / VW;  // rows come in groups of VW, groups interleaved
  static constexpr bool half = tensor && Tuned_::form == 2 && R % 4 == 0 && Cell::squashes && Cell::retrieves;
  static constexpr int C = 32 / L * M;
  static constexpr int warps = (V + C - 1) / C;  // of a head
  static constexpr int most = mma ? 8 : 4;
  static constexpr int PARTS = (warps + most - 1) / most;
  static constexpr int WPH = (warps + PARTS - 1) / PARTS;
  static constexpr int TL = WPH * 32;
  static constexpr int HB = WPH >= 4 ? 1 : 4 / WPH;
  static constexpr int threads = HB * TL;
  static constexpr int CB = WPH * C;
  static constexpr int sz = sizeof(Store);
  // Rows of shared memory that the tensor cores read: 8 elements a lane, 16-byte chunks swizzled.
  static constexpr int CBP = mma ? (CB + 15) / 16 * 16 : CB;
  static constexpr int ROW = mma ? L * 8 : NP;
  static constexpr int piece_kq = largest_power(N * sz, 16);
  static constexpr int piece_line = largest_power(largest_power(V * sz, 16) < 4 ? 2 : V * sz, largest_power(CB* sz, 16));
  static constexpr int EV = CB % 4 == 0 ? 4 : 2;          // lines handled at once outside the loop
  static constexpr bool wide = V % EV == 0;
  static ELMAN_HD constexpr int row_of(int rg, int i) { return ((i / VW) * L + rg) * VW + i % VW; }
  static ELMAN_HD constexpr int element(int m, int i) { return M == 1 ? i : i / 2 * 4 + i % 2 * 2 + m; }  // row i of line m
  static ELMAN_HD constexpr int line_of(int e) { return M == 1 ? 0 : e % 2; }
  static ELMAN_HD constexpr int k_of(int e) { return M == 1 ? e : e / 4 * 2 + e / 2 % 2; }
  static constexpr ScalarKind kind0 = Opt::kind0, kind1 = Opt::kind1;
  static constexpr bool mamba = kind0 == ScalarKind::mamba;
  static_assert(kind1 != ScalarKind::mamba, "only scalar 0 is a decay");
};

}  // namespace elman::matrix
