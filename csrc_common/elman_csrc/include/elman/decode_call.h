// The C interface of the modules of few rows: what one call is given. elman_core/kernels/decode/native.py has the same structure in
// ctypes.
//
//   elman_decode_call_bytes() -> sizeof(DecodeCall)   whether both sides mean the same structure
//   elman_decode_NAME(call)                            null, or what went wrong, in a buffer that the next call overwrites
//
// A module compiled with a cell has `step`; one without has the others, but `linear` only for 16-bit storage. Tensors are in the storage
// type unless said otherwise. Rows are adjacent elements; a step counts the elements from one row to the next. What has no step is
// contiguous.
//
//   linear  out = x weight^T + bias; its first `activated` columns pass through SiLU. Further maps of x without bias beside it, `extras` in
//           all: extra[i] is the weight [N_i,K], extra_step[i] is N_i, extra_out[i] the result
//   step    a = x weight^T + bias + h w^T,  (last, out) = cell(a, h, extra); h and last are float. Without a weight, inputs is 0 and x [B,N]
//           itself is added
//   norm    last = x + h (x alone where h is null), out = weight last / sqrt(mean(last^2) + value[0]); h and last are float
//   draw    a class of each row of logits x: penalty value[0], temperature value[1] (0: the largest), top-k `activated` (0: all), and the
//           fewest classes above the share value[2] (negative: all); bias float [B,N], draws of a standard exponential; w bytes [B,N],
//           classes that have occurred, changed where a penalty reads them; out and last int64 [B], the class, and it again or -1 where
//           logits are not finite
#pragma once

#include <cstdint>

#include "call.h"

struct DecodeCall {
  std::int64_t rows, inputs, outputs, activated, extras;
  std::uint64_t x, weight, bias, out;  // [B,K], [N,K], [N] or null, [B,N]
  std::int64_t x_step;
  std::uint64_t w, h, last, extra[4];  // [N,N], [B,N], [B,N], [B,N] each
  std::int64_t extra_step[4];
  std::uint64_t extra_out[4];
  double value[3];
  std::int64_t early;  // whether it may begin before the kernel in front of it has ended, and waits for that itself
  std::uint64_t stream;
};
