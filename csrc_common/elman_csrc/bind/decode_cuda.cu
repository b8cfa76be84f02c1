// Decoding of few rows as a module for one storage type: with a cell, a step of its recurrence; without one, the linear map, the
// norm, and the draw of a class. Compiled with
//   -DELMAN_DTYPE=code of the storage (dtype.h)
//   -DELMAN_CELL_HEADER="path/of/cell.h"  -DELMAN_CELL=elman::e42::Cell     for a cell
#include <elman/decode_call.h>
#include <elman/decode_launch.cuh>
#include <elman/stored.cuh>

#include <cstdio>

#ifndef ELMAN_DTYPE
#define ELMAN_DTYPE 2
#endif
#ifdef ELMAN_CELL
#include ELMAN_CELL_HEADER
#endif

namespace {

namespace decode = elman::decode;
using Elem = elman::Stored<ELMAN_DTYPE>;
using elman::at;

const char* said(cudaError_t status) {
  static thread_local char text[256];
  if (status == cudaSuccess) return nullptr;
  std::snprintf(text, sizeof(text), "launch: %s", cudaGetErrorString(status));
  return text;
}

template <class Call>
decode::Args<Elem> describe(const Call& call) {
  decode::Args<Elem> g{};
  g.x = at<const Elem>(call.x.address), g.x_step = static_cast<std::ptrdiff_t>(call.x.step);
  g.weight = at<const Elem>(call.weight), g.bias = at<const Elem>(call.bias), g.out = at<Elem>(call.out);
  g.rows = static_cast<int>(call.rows), g.inputs = static_cast<int>(call.inputs), g.outputs = static_cast<int>(call.outputs);
  return g;
}

template <class Cell>
const char* product(const decode::Args<Elem>& g, bool early, CUstream_st* stream) {
  if (g.inputs % 8) return "the columns of x must be a multiple of 8";
  // Up to 8 rows are copied to shared memory whole; if they are too wide for it, the kernel for more rows takes them.
  const bool fits = decode::shared_bytes<Cell, 1>(g.rows, g.inputs, g.outputs) <= decode::most_shared_bytes();
  if (g.rows <= 8 && fits) return said(decode::launch<Elem, Cell, 1>(g, early, stream));
  if (g.rows <= 16) return said(decode::launch<Elem, Cell, 2>(g, early, stream));
  if (g.rows <= 32) return said(decode::launch<Elem, Cell, 4>(g, early, stream));
  if (g.rows <= 64) return said(decode::launch<Elem, Cell, 8>(g, early, stream));
  return "it takes up to 64 rows";
}

}  // namespace

#ifdef ELMAN_CELL
ELMAN_EXPORT std::int64_t elman_decode_step_dtype() { return ELMAN_DTYPE; }
ELMAN_EXPORT const char* elman_decode_step(const DecodeStepCall* call) {
  using Cell = ELMAN_CELL;
  static_assert(Cell::extras <= 4, "DecodeStepCall holds four");
  if (call->extras != Cell::extras) return "this cell reads another number of extras";
  if (call->outputs % 8) return "the width of the state must be a multiple of 8";
  const CallRows& x = call->inputs ? call->x : call->u;
  if (!x.address || (call->inputs && !call->weight)) return "x or its weight is missing";
  auto g = describe(*call);
  g.x = at<const Elem>(x.address), g.x_step = static_cast<std::ptrdiff_t>(x.step);
  g.w = at<const Elem>(call->w), g.h = at<const float>(call->h), g.last = at<float>(call->last), g.tied = call->w == call->weight;
  for (int i = 0; i < Cell::extras; ++i)
    g.extra[i] = at<const Elem>(call->extra[i].address), g.extra_step[i] = static_cast<std::ptrdiff_t>(call->extra[i].step);
  return product<Cell>(g, call->early, at<CUstream_st>(call->stream));
}
#else
#if ELMAN_DTYPE != 1
ELMAN_EXPORT std::int64_t elman_decode_linear_dtype() { return ELMAN_DTYPE; }
ELMAN_EXPORT const char* elman_decode_linear(const DecodeLinearCall* call) {
  auto g = describe(*call);
  g.activated = static_cast<int>(call->activated), g.maps = static_cast<int>(call->maps);
  if (call->maps < 0 || call->maps > 4) return "it takes up to 4 further maps";
  for (int i = 0; i < g.maps; ++i)
    g.extra[i] = at<const Elem>(call->map[i]), g.extra_step[i] = static_cast<std::ptrdiff_t>(call->map_sizes[i]),
    g.extra_out[i] = at<Elem>(call->map_out[i]);
  return product<decode::NoCell>(g, call->early, at<CUstream_st>(call->stream));
}
#endif
ELMAN_EXPORT std::int64_t elman_decode_norm_dtype() { return ELMAN_DTYPE; }
ELMAN_EXPORT const char* elman_decode_norm(const DecodeNormCall* call) {
  decode::NormArgs<Elem> g{};
  g.x = at<const Elem>(call->x.address), g.x_step = static_cast<std::ptrdiff_t>(call->x.step);
  g.weight = at<const Elem>(call->weight), g.residual = at<const float>(call->residual);
  g.stream = at<float>(call->stream_out), g.out = at<Elem>(call->out);
  g.width = static_cast<int>(call->width), g.eps = static_cast<float>(call->eps);
  return said(decode::launch_norm(g, static_cast<int>(call->rows), call->early, at<CUstream_st>(call->stream)));
}
ELMAN_EXPORT std::int64_t elman_decode_draw_dtype() { return ELMAN_DTYPE; }
ELMAN_EXPORT const char* elman_decode_draw(const DecodeDrawCall* call) {
  if (call->classes > decode::kMostClasses) return "too many classes";
  decode::DrawArgs<Elem> g{};
  g.logits = at<const Elem>(call->logits.address), g.step = static_cast<std::ptrdiff_t>(call->logits.step);
  g.waits = at<const float>(call->waits), g.seen = at<unsigned char>(call->seen);
  g.drawn = at<std::int64_t>(call->drawn), g.shown = at<std::int64_t>(call->shown);
  g.classes = static_cast<int>(call->classes), g.top_k = static_cast<int>(call->top_k);
  g.penalty = static_cast<float>(call->penalty), g.temperature = static_cast<float>(call->temperature);
  g.below = static_cast<float>(call->below);
  return said(decode::launch_draw(g, static_cast<int>(call->rows), call->early, at<CUstream_st>(call->stream)));
}
#endif
