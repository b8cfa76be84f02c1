// The C interface of the matrix-state modules, host and CUDA: what one call is given. bind/launch.cpp fills it in.
//
// elman_matrix_info(int64_t out[4]): parts of a head, bytes of shared memory of a block, floats of a row of `parts` below, bytes
//     by which the rows of k, q and of the lines must be aligned.
// elman_matrix_declares(i) -> vectors, lines, scalars, params, elementwise (or energy) and delta of the cell, by their number
// elman_matrix_forward(const MatrixCall*), elman_matrix_backward(const MatrixCall*): null, or what went wrong, in a buffer that the next call
//     overwrites.
//
// Addresses; 0 where something is absent. A view's step: elements from one time step to the next; heads and elements are adjacent. On the
// host every tensor is contiguous, in double or float as the storage is. On the GPU:
//   k, q [B,T,H,N], or [B,T,N] where shared, vector [B,T,H,N], line [B,T,H,V], or [B,T,V] where shared, o, dy and dk, dq, dvector [B,T,H,N], dline: storage type; o and dy contiguous
//   scalar, dscalar [B,T,H]: float if given, else storage type
//   param [H,V], a_log, dt_bias [H], s0, s1, ds0, ds1 [B,H,N V]: float
//   saved: with 16-bit storage and N > 24, rows [B] of the storage type: states [H,ceil(T/I),V,N], then what was retrieved [T,H,V], to a
//          multiple of 8; else states alone, [B,H,ceil(T/16),V,N] float. I: 16 steps; with N > 32 8 (16 if linear), with N > 64 4; 32 if blocked
//   mask [B,T] bytes, 0 = hold the state
//   dparam [B,H,V] float, on the host [H,V]: shares of the gradient of a param, to be added over B
//   dhead [parts,2,B,H] float: shares of the gradients of a_log and dt_bias, to be added over parts and B
//   parts [parts, B T H, floats of a row] float if parts > 1, else 0: workspace
#pragma once

#include <cstdint>

#include "call.h"
#include "matrix_state_cell.h"

struct MatrixCall {
  std::int64_t batch, steps, heads;
  std::int64_t vectors, lines, scalars, params;  // how many are given
  std::int64_t shared;  // which of k, q and the lines all heads share, a set of bits
  std::int64_t interval;  // steps between saved states
  CallRows k, q, vector[elman::matrix::kMostVectors], line[elman::matrix::kMostLines], scalar[elman::matrix::kMostScalars];
  std::uint64_t param[elman::matrix::kMostParams], a_log, dt_bias, mask;
  std::int64_t state_line, state_row;
  std::uint64_t s0, s1, o, saved;
  std::uint64_t dy, ds1, ds0;
  CallRows dk, dq, dvector[elman::matrix::kMostVectors], dline[elman::matrix::kMostLines], dscalar[elman::matrix::kMostScalars];
  std::uint64_t dparam[elman::matrix::kMostParams], dhead, da_log, ddt_bias, parts, stream;
};
ELMAN_LAYOUT(matrix, MatrixCall, batch, steps, heads, vectors, lines, scalars, params, shared, interval, k, q, vector, line, scalar,
             param, a_log, dt_bias, mask, state_line, state_row, s0, s1, o, saved, dy, ds1, ds0, dk, dq, dvector, dline, dscalar,
             dparam, dhead, da_log, ddt_bias, parts, stream)
