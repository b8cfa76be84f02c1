// The C interface of the matrix-state modules, host, CPU and CUDA: the arguments of a call. bind/launch.cpp fills it in.
//
// elman_matrix_info(int64_t out[3]): bytes of shared memory per block, floats in a row of `parts` below, alignment in bytes of the rows of k, q and
//     the lines.
// elman_matrix_parts(B, H) -> the blocks of a GPU that share a head in a backward
// elman_matrix_declares(i) -> vectors, lines, scalars, params, elementwise (or energy) and delta of the cell, by index
// elman_matrix_forward(const MatrixCall*), elman_matrix_backward(const MatrixCall*) -> null, or an error message in a buffer that the next call
//     overwrites.
//
// Members are addresses; 0 means absent. A view's step is the number of elements from one time step to the next; heads and elements are adjacent. On the
// host every tensor is contiguous, in double or float like the storage. On a GPU and a CPU:
//   k, q [B,T,H,N], or [B,T,N] if shared, vector [B,T,H,N], line [B,T,H,V], or [B,T,V] if shared, o, dy, dk, dq, dvector [B,T,H,N], dline:
//         storage type, of a wide vector float; o and dy are contiguous
//   scalar, dscalar [B,T,H]: float if given, else storage type
//   param [H,V], A_log, dt_bias [H], S0, s1, ds0, ds1 [B,H,N V]: float
//   saved: with 16-bit storage and N > 24, rows [B] of the storage type: states [H,ceil(T/I),V,N], then retrieved values [T,H,V], padded to a
//          multiple of 8; else only states, [B,H,ceil(T/16),V,N] float. I is 16 steps; 8 if N > 32 (16 if linear), 4 if N > 64; 32 if blocked
//   mask [B,T] bytes, 0 = hold the state; starts [B,T] bytes, 1 = the state is 0 before the step, held or not
//   dparam [B,H,V] float, on the host [H,V]: shares of the gradient of a param, which the caller adds over B
//   dhead [parts,2,B,H] float: shares of the gradients of A_log and dt_bias, which the caller adds over parts and B
//   parts [parts, B T H, floats of a row] float if parts > 1, else 0: workspace
#pragma once

#include <cstdint>

#include "call.h"
#include "matrix_state_cell.h"

struct MatrixCall {
  std::int64_t batch, steps, heads;
  std::int64_t vectors, lines, scalars, params;  // how many of each are given
  std::int64_t shared;  // bits of k, q and the lines that all heads share
  std::int64_t interval;  // steps between saved states
  CallRows k, q, vector[elman::matrix::kMostVectors], line[elman::matrix::kMostLines], scalar[elman::matrix::kMostScalars];
  std::uint64_t param[elman::matrix::kMostParams], A_log, dt_bias, mask, starts;
  std::int64_t state_line, state_row;
  std::uint64_t S0, s1, o, saved;
  std::uint64_t dy, ds1, ds0;
  CallRows dk, dq, dvector[elman::matrix::kMostVectors], dline[elman::matrix::kMostLines], dscalar[elman::matrix::kMostScalars];
  std::uint64_t dparam[elman::matrix::kMostParams], dhead, da_log, ddt_bias, parts, stream;
  std::int64_t threads;  // CPU only
};
ELMAN_LAYOUT(matrix, MatrixCall, batch, steps, heads, vectors, lines, scalars, params, shared, interval, k, q, vector, line, scalar,
             param, A_log, dt_bias, mask, starts, state_line, state_row, S0, s1, o, saved, dy, ds1, ds0, dk, dq, dvector, dline,
             dscalar, dparam, dhead, da_log, ddt_bias, parts, stream, threads)
