// The C interface of the causal convolution, CUDA and CPU: the arguments of a call.
//
//   z[t,b,c] = bias[c] + sum_j weight[c,j] x[t - (K-1) + j, b, c],   y = z, or silu(z)
//
//   elman_causal_conv_shares(T, B, C) -> shares of the weights' gradient that a backward of these sizes writes on the current GPU, or a CPU
//   elman_causal_conv_forward(call), _backward(call) -> null, or an error message
//
// x, y, dy and dx are in the storage type, everything else is float. A view is a [T,B,C] tensor of adjacent channels whose strides count elements;
// it may be a slice of a wider tensor. Tensors without strides are contiguous. Outputs may hold anything before the call. Rows with 16-byte addresses
// and strides are moved fastest; float tensors have 16-byte addresses.
//
//   forward   reads x, weight, bias, window, mask, starts; writes y and last
//   backward  reads x, weight, bias, window, mask, starts, dy, dlast; writes dx, dwindow and shares
//
// window, last [B,K-1,C]: the inputs before the first step and after the last one, oldest first; a null window is zero, a null last or
// dwindow is not written, a null dlast is zero. last may be window if T is 1. mask [T,B]: a step with 0 does not exist: the next step sees the inputs
// before it, and y and dx are 0; null: all steps exist. starts [T,B]: at a 1, the window before that step is zero, whether or not the step exists.
// shares [S,K+1,C]: each holds gradients of weight [C,K], then of bias [C]; the caller adds them up over S.
#pragma once

#include "call.h"

struct CausalConvCall {
  std::int64_t steps, batch, width, silu;
  CallView x, y, dy, dx;
  std::uint64_t weight, bias;  // [C,K], [C] or null
  std::uint64_t window, last, dlast, dwindow, shares, mask, starts;
  std::int64_t early;  // forward: whether it may start before the previous kernel has ended; it then waits for that kernel itself
  std::uint64_t cuda_stream;
  std::int64_t threads;  // CPU only
};
ELMAN_LAYOUT(causal_conv, CausalConvCall, steps, batch, width, silu, x, y, dy, dx, weight, bias, window, last, dlast, dwindow,
             shares, mask, starts, early, cuda_stream, threads)
