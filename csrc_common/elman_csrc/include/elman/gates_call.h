// The C interface of the modules of gated cells, host and CUDA: the arguments of a call. bind/launch.cpp fills it in.
//
//   elman_gates_forward(call), elman_gates_backward(call)      as in dense_call.h
//   elman_gates_declares(i) -> gates, kept, states, splits and staged of the cell, by index
//
// Tensors are in the storage type except b and the states (h0, last, g_last, dh0: h, then each of s), which are float, or double with double.
//
//   forward   reads u, w, b, h0, mask, starts; writes y, last, history, h_0 included, and, if a backward follows, kept and memory,
//             s_0 included. In a held row h_t = h_{t-1}, s_t = s_{t-1}, y_t = 0. The history is 0 before a step with a start.
//   backward  reads gy, w, history, kept, memory, g_last, mask, starts; writes dp, du if the cell splits, dbias, dh0.
//
// The caller computes the gradient of W after the loop, as a product with dp. The gradient of b is the sum of dbias over the rows.
#pragma once

#include <cstdint>

#include "call.h"

namespace elman {
template <class Cell>
std::int64_t gates_declares(std::int64_t i) {
  const std::int64_t all[] = {Cell::gates, Cell::kept, 1 + Cell::memory, Cell::splits, Cell::staged};
  return all[i];
}
}  // namespace elman

struct GatesCall {
  std::int64_t steps, batch, width, columns;  // columns: of a head, d / heads
  CallView u, gy;  // [T,B,k d], [T,B,d]
  std::uint64_t w, b, h0, y, last;  // [k d,columns], [k d] or null, [states,B,d], [T,B,d], [states,B,d]
  std::uint64_t history, kept, memory;  // [T+1,B,d], [T,B,kept d], [T+1,(states - 1),B,d] in any order; staged: what inner made
  std::uint64_t g_last, dp, du, dh0;  // [states,B,d], [T,B,k d], [T,B,k d], [states,B,d]
  std::uint64_t dbias;  // [B,k d], float or double: the sums of dp over time
  std::uint64_t mask, starts;  // [T,B] bytes, 0 = hold the state; 1 = the states are 0 before the step, held or not; or null
  std::uint64_t error, stream;  // CUDA, as in dense_call.h
  std::int64_t rows, groups, timeout_ns;  // CUDA: batch rows of a group, groups that run together
  std::int64_t threads;  // CPU only
};
ELMAN_LAYOUT(gates, GatesCall, steps, batch, width, columns, u, gy, w, b, h0, y, last, history, kept, memory, g_last, dp, du, dh0,
             dbias, mask, starts, error, stream, rows, groups, timeout_ns, threads)
