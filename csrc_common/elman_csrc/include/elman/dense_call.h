// The C interface of the dense modules, host and CUDA: the arguments of a call. bind/launch.cpp fills it in.
//
//   elman_dense_forward(call), elman_dense_backward(call) -> null, or an error message in a buffer that the next call overwrites
//
// On the host these end in _float32 or _float64. All tensors are in the storage type except the four of the state (h0, last, g_last, dh0), which are
// float, or double with double. A View is a [T,B,d] tensor of adjacent channels whose strides count elements; tensors without strides are contiguous.
// Members that a direction does not use are 0. Outputs may hold anything before the call.
//
//   elman_dense_declares(i) -> extras, and whether the cell's backward uses a, by index
//   elman_dense_dtype() -> code of the storage type (dtype.h); a host module serves float and double
//
//   forward   reads u, extra, w, h0, mask, starts; writes y, last, the whole history, h_0 included, and a. In a held row h_t = h_{t-1} and y_t = 0, and a is
//             undefined.
//   backward  reads gy, extra, w, history, a, g_last, mask, starts; writes da, dextra (0 where held) and dh0.
//
// A module of tied weights (h_t = W (h_{t-1} + x_t) + b, CUDA only) has x in place of u, or z with x = SiLU(z). Its forward also reads b and writes all
// of sums. Its backward writes dx and dbias beside da, and reads x again if it differentiates SiLU.
//
// The caller computes the gradient of W after the loop: one product of da and the history, or the sums. The history has the state before a start, which
// the caller takes as 0; the sums have x alone.
#pragma once

#include <cstdint>

#include "call.h"

struct DenseCall {
  std::int64_t steps, batch, width, extras;
  std::int64_t slots;  // more than 1: W is block-diagonal, stored as [slots,d/slots,d/slots]
  CallView u, gy, extra[4];  // extra: inputs of the cell beside u
  std::uint64_t w, h0, history, y, last;  // [d,d], [B,d], [T+1,B,d], [T,B,d], [B,d]
  std::uint64_t g_last, da, dextra[4], dh0;  // [B,d], [T,B,d], [T,B,d], [B,d]
  std::uint64_t mask, starts;  // [T,B] bytes, 0 = hold the state; 1 = the state is 0 before the step, held or not; or null
  std::uint64_t a;  // [T,B,d] if the cell uses it
  CallView x;  // tied weights, in place of u
  std::uint64_t b, sums, dx, dbias;  // tied weights: [d] float, [T+1,B,d], [T,B,d], [8 groups,d] float
  std::uint64_t error, stream;  // CUDA: pinned int32, set when a wait gives up
  std::int64_t rows, groups, delay, timeout_ns;  // CUDA: the launch plan
  std::uint64_t product, state;  // a step of the fallback: [B,d] float, product with W; carried state, updated
  std::int64_t t;  // the index of that step
  std::int64_t threads;  // CPU only
};
ELMAN_LAYOUT(dense, DenseCall, steps, batch, width, extras, slots, u, gy, extra, w, h0, history, y, last, g_last, da, dextra, dh0,
             mask, starts, a, x, b, sums, dx, dbias, error, stream, rows, groups, delay, timeout_ns, product, state, t, threads)
