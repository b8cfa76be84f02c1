// The C interface of the matrix-state modules, called by elman_core/kernels/matrix/native.py through ctypes. Compiled with
//   -DELMAN_CELL_HEADER="path/of/cell.h"  -DELMAN_CELL=elman::e75::Cell
//   -DELMAN_DTYPE=code of the storage (dtype.h)  -DELMAN_ROWS=N  -DELMAN_LINES=V
//   -DELMAN_SILU, -DELMAN_L2, -DELMAN_SHARED = which inputs pass SiLU, are normalised, are one for all heads: sets of bits, k 1, q 2, lines from 4
//     on (matrix_state_cell.h)
//   -DELMAN_KIND0, -DELMAN_KIND1 = 0 given, 1 sigmoid, 2 mamba (what the scalars are)
//
// elman_matrix_call_bytes(): sizeof(MatrixCall), whether both sides mean the same structure.
// elman_matrix_info(int64_t out[4]): parts of a head (see `parts` below), bytes of shared memory of a forward and of a backward
//     block, bytes by which the rows of k, q and of the lines must be aligned.
// elman_matrix_forward(const MatrixCall*), elman_matrix_backward(const MatrixCall*): null, or what went wrong, in a buffer that the next call
//     overwrites.
//
// Addresses; 0 where something is absent. A view's step: elements from one time step to the next; heads and elements are adjacent. On the
// host every tensor is contiguous, in double or float as the storage is. On the GPU:
//   k, q [B,T,H,N], or [B,T,N] where shared, line [B,T,H,V], o, dy and dk, dq [B,T,H,N], dline: storage type; o and dy contiguous
//   scalar, dscalar [B,T,H]: float if given, else storage type
//   param [H,V], a_log, dt_bias [H], s0, s1, ds0, ds1 [B,H,N V]: float
//   saved: with 16-bit storage and N > 24, rows [B] of the storage type: states [H,ceil(T/I),V,N], then what was retrieved [T,H,V], to a
//          multiple of 8; else states alone, [B,H,ceil(T/16),V,N] float. I: 16, with N > 32 8, with N > 64 4 steps
//   mask [B,T] bytes, 0 = hold the state
//   dparam [B,H,V] float, on the host [H,V]: shares of the gradient of a param, to be added over B
//   dhead [parts,2,B,H] float: shares of the gradients of a_log and dt_bias, to be added over parts and B
//   parts [parts, B T H, 2 N + 2] float if parts > 1, else 0: workspace
#pragma once

#include <cstdint>
#include <cstdio>

#include <elman/call.h>
#include <elman/dtype.h>
#include <elman/matrix_state_cell.h>

#include ELMAN_CELL_HEADER

using elman::matrix::kMostLines;
using elman::matrix::kMostParams;
using elman::matrix::kMostScalars;

struct MatrixView {
  std::uint64_t address;
  std::int64_t step;
};
// The same as the ctypes.Structure in matrix/native.py.
struct MatrixCall {
  std::int64_t batch, steps, heads;
  std::int64_t lines, scalars, params;  // how many are given
  std::int64_t k_head, q_head;  // elements from one head to the next: N, or 0 where it is shared
  MatrixView k, q, line[kMostLines], scalar[kMostScalars];
  std::uint64_t param[kMostParams], a_log, dt_bias, mask;
  std::int64_t state_line, state_row;
  std::uint64_t s0, s1, o, saved;
  std::uint64_t dy, ds1, ds0;
  MatrixView dk, dq, dline[kMostLines], dscalar[kMostScalars];
  std::uint64_t dparam[kMostParams], dhead, da_log, ddt_bias, parts, stream;
};

using Cell = ELMAN_CELL;
using elman::at;

struct Options {
  static constexpr unsigned silu = ELMAN_SILU, l2 = ELMAN_L2, shared = ELMAN_SHARED;
  static constexpr elman::ScalarKind kind0 = static_cast<elman::ScalarKind>(ELMAN_KIND0),
                                     kind1 = static_cast<elman::ScalarKind>(ELMAN_KIND1);
};

// What of a call is not this module's, or missing; null where all is well.
inline const char* refuse(const MatrixCall& c, bool back) {
  static thread_local char said[160];
  if (c.lines != Cell::lines || c.scalars != Cell::scalars || c.params != Cell::params) {
    std::snprintf(said, sizeof said, "the cell takes lines, scalars and params %d, %d, %d (v is a line); the call gives %d, %d, %d",
                  Cell::lines, Cell::scalars, Cell::params, int(c.lines), int(c.scalars), int(c.params));
    return said;
  }
  const auto head = [](unsigned set) { return Options::shared & set ? 0 : ELMAN_ROWS; };
  if (c.k_head != head(elman::matrix::kOfK) || c.q_head != head(elman::matrix::kOfQ))
    return "k or q is shared by all heads, and the module was compiled for one of each head, or the other way round";
  if (c.batch < 1 || c.steps < 1 || c.heads < 1) return "a size is below 1";
  bool there = c.k.address && c.q.address, gradients = c.dk.address && c.dq.address && c.saved && c.dy;
  for (int i = 0; i < Cell::lines; i++) there &= c.line[i].address != 0, gradients &= c.dline[i].address != 0;
  for (int i = 0; i < Cell::scalars; i++) there &= c.scalar[i].address != 0, gradients &= c.dscalar[i].address != 0;
  for (int i = 0; i < Cell::params; i++) there &= c.param[i] != 0, gradients &= c.dparam[i] != 0;
  if (Options::kind0 == elman::ScalarKind::mamba) there &= c.a_log && c.dt_bias;
  if (!there) return "an input is missing";
  if (back && !gradients) return "what the backward needs is missing";
  return nullptr;
}

ELMAN_EXPORT int elman_matrix_call_bytes() { return sizeof(MatrixCall); }
