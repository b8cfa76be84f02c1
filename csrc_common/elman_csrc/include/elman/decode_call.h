// The C interface of the decoding modules: the arguments of a call. bind/launch.cpp fills it in.
//
//   elman_decode_NAME(call) -> null, or an error message in a buffer that the next call overwrites
//
// A module compiled with a cell has `step`. A module without a cell has the other functions, `linear` only for 16-bit storage. Tensors are in the storage
// type unless stated otherwise. Elements of a row are adjacent; a step is the distance between rows in elements. Tensors without a step are contiguous.
// `early`: whether the kernel may start before the previous one has ended; it then waits for that kernel itself.
#pragma once

#include <cstdint>

#include "call.h"

// out = x weight^T + bias, with SiLU on its first `activated` columns; and further maps of x without bias
struct DecodeLinearCall {
  std::int64_t rows, inputs, outputs, activated, maps;  // maps: number of further maps
  CallRows x;  // [B,K]
  std::uint64_t weight, bias, out;  // [N,K], [N] or null, [B,N]
  std::uint64_t map[4], map_out[4];  // [N_i,K], [B,N_i] each
  std::int64_t map_sizes[4];  // N_i
  std::int64_t early;
  std::uint64_t stream;
};
ELMAN_LAYOUT(decode_linear, DecodeLinearCall, rows, inputs, outputs, activated, maps, x, weight, bias, out, map, map_out, map_sizes,
             early, stream)

// a = x weight^T + bias + h w^T,  (last, out) = cell(a, h, extra). Without a weight, inputs is 0 and u is added instead
struct DecodeStepCall {
  std::int64_t rows, inputs, outputs, extras;
  CallRows x, u, extra[4];  // [B,K], [B,N], [B,N] each
  std::uint64_t weight, bias, w, out, h, last;  // [N,K], [N] or null, [N,N], [B,N], float [B,N], float [B,N]
  std::int64_t early;
  std::uint64_t stream;
};
ELMAN_LAYOUT(decode_step, DecodeStepCall, rows, inputs, outputs, extras, x, u, extra, weight, bias, w, out, h, last, early, stream)

// stream_out = x + residual (x if residual is null), out = weight stream_out / sqrt(mean(stream_out^2) + eps)
struct DecodeNormCall {
  std::int64_t rows, width;
  CallRows x;  // [B,D]
  std::uint64_t weight, residual, out, stream_out;  // [D], float [B,D] or null, [B,D], float [B,D]
  double eps;
  std::int64_t early;
  std::uint64_t stream;
};
ELMAN_LAYOUT(decode_norm, DecodeNormCall, rows, width, x, weight, residual, out, stream_out, eps, early, stream)

// Draws a class for each row of logits
struct DecodeDrawCall {
  std::int64_t rows, classes;
  CallRows logits;  // [B,V]
  std::uint64_t waits;  // float [B,V], draws of a standard exponential; null at temperature 0
  std::uint64_t seen;  // bytes [B,V], classes that have occurred; updated if there is a penalty, which reads them
  std::uint64_t drawn, shown;  // int64 [B]: the class; the class, or -1 if logits are not finite
  double penalty, temperature, below;  // temperature 0: the largest; below: share of unlikely classes to drop; negative: none
  std::int64_t top_k;  // 0: all
  std::int64_t early;
  std::uint64_t stream;
};
ELMAN_LAYOUT(decode_draw, DecodeDrawCall, rows, classes, logits, waits, seen, drawn, shown, penalty, temperature, below, top_k,
             early, stream)
