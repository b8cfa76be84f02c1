// The C interface of the matrix-state modules, called by elman_core/kernels/matrix/native.py through ctypes. Compiled with
//   -DELMAN_CELL_HEADER="path/of/cell.h"  -DELMAN_CELL=elman::e88::Cell (a template of two bools:)  -DELMAN_LINEAR=0|1  -DELMAN_WRITE=0|1
//   -DELMAN_DTYPE=code of the storage (dtype.h)  -DELMAN_ROWS=N  -DELMAN_LINES=V
//   -DELMAN_SILU=0|1  -DELMAN_L2=0|1  -DELMAN_KIND0, -DELMAN_KIND1 = 0 given, 1 sigmoid, 2 mamba (what the scalars are)
//
// elman_matrix_call_bytes(): sizeof(MatrixCall), whether both sides mean the same structure.
// elman_matrix_info(int64_t out[4]): parts of a head (see `parts` below), bytes of shared memory of a forward and of a backward
//     block, bytes by which the rows of k, q and of the lines must be aligned.
// elman_matrix_forward(const MatrixCall*), elman_matrix_backward(const MatrixCall*): null, or what went wrong.
//
// Addresses; 0 where something is absent. `_step`: elements from one time step to the next; heads and elements are adjacent. On the
// host every tensor is contiguous, in double or float as the storage is. On the GPU:
//   k, q [B,T,H,N], line [B,T,H,V], o, dy and the gradients of k, q, line: storage type; o and dy contiguous
//   scalar, dscalar [B,T,H]: float if given, else storage type;   a_log, dt_bias [H], s0, s1, ds0, ds1 [B,H,N V]: float
//   saved: with 16-bit storage and N > 24, rows [B] of the storage type: states [H,ceil(T/I),V,N], then what was retrieved [T,H,V], to a
//          multiple of 8; else states alone, [B,H,ceil(T/16),V,N] float. I: 16, with N > 32 8, with N > 64 4 steps
//   mask [B,T] bytes, 0 = hold the state
//   dhead [parts,2,B,H] float: shares of the gradients of a_log and dt_bias, to be added over parts and B
//   parts [parts, B T H, 2 N + 2] float if parts > 1, else 0: workspace
#pragma once

#include <cstdint>

#include <elman/call.h>
#include <elman/dtype.h>
#include <elman/matrix_state_cell.h>

#include ELMAN_CELL_HEADER

// The same as the ctypes.Structure in matrix/native.py.
struct MatrixCall {
  std::int64_t batch, steps, heads;
  std::uint64_t k, q, line[4], scalar[2];
  std::int64_t k_step, q_step, line_step[4], scalar_step[2];
  std::uint64_t a_log, dt_bias, mask;
  std::int64_t state_line, state_row;
  std::uint64_t s0, s1, o, saved;
  std::uint64_t dy, ds1, ds0, dk, dq, dline[4], dscalar[2];
  std::int64_t dk_step, dq_step, dline_step[4], dscalar_step[2];
  std::uint64_t dhead, da_log, ddt_bias, parts, stream;
};

using Cell = ELMAN_CELL<ELMAN_LINEAR != 0, ELMAN_WRITE != 0>;
using elman::at;

ELMAN_EXPORT int elman_matrix_call_bytes() { return sizeof(MatrixCall); }
