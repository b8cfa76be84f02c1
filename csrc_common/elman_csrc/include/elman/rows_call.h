// The C interface of the modules of row recurrences (rows.cuh): the arguments of a call. bind/launch.cpp fills it in.
//
// elman_rows_dtype(), elman_rows_forward(call), elman_rows_backward(call)      as in matrix_state_call.h
//
//   q, k [B,T,H,K], or [B,T,1,K] if `shared`, v [B,T,H,V]: storage; a step is the number of elements from one time step to the next; steps and
//         addresses are multiples of 16 bytes; heads and elements are adjacent
//   o, dy [B,T,H,V], dq, dk [B,T,H,K], dv [B,T,H,V], w [H,V,V]: storage, contiguous
//   f, df [B,T,H], S0, last, ds0, ds1 [B,H,K,V], saved [B,H,ceil(T/16),K,V], dw [B,H,max(K/16, 1),V,V], which the caller adds over B and K/16:
//         float, contiguous
//   mask, starts [B,T] bytes: 0 = hold the state; 1 = the state is 0 before the step. Each may be null, as S0, ds1 and saved may.
#pragma once

#include <cstdint>

#include "call.h"

struct RowsCall {
  std::int64_t batch, steps, heads, shared;
  CallRows q, k, v;
  std::uint64_t f, w, mask, starts, S0, last, o, saved;
  std::uint64_t dy, ds1, ds0, dq, dk, dv, df, dw, stream;
  std::int64_t threads;
};
ELMAN_LAYOUT(rows, RowsCall, batch, steps, heads, shared, q, k, v, f, w, mask, starts, S0, last, o, saved, dy, ds1, ds0, dq, dk, dv,
             df, dw, stream, threads)
