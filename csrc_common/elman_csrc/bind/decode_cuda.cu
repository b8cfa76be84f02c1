// What decoding does with few rows as a module for one storage type: with a cell the step of its recurrence; without one the
// linear map, the norm, and the draw of a class.
// Compiled with
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

template <class Cell>
const char* product(const DecodeCall& call) {
  static_assert(Cell::extras <= 4, "DecodeCall holds four");
  constexpr bool steps = !std::is_same_v<Cell, decode::NoCell>;
  if (steps ? call.extras != Cell::extras : call.extras > 4) return "not this number of extras";
  decode::Args<Elem> g{};
  g.x = at<const Elem>(call.x), g.weight = at<const Elem>(call.weight), g.bias = at<const Elem>(call.bias);
  g.w = at<const Elem>(call.w), g.h = at<const float>(call.h), g.last = at<float>(call.last), g.out = at<Elem>(call.out);
  g.maps = steps ? 0 : static_cast<int>(call.extras);
  for (int i = 0; i < call.extras; ++i)
    g.extra_out[i] = at<Elem>(call.extra_out[i]), g.extra[i] = at<const Elem>(call.extra[i]),
    g.extra_step[i] = static_cast<std::ptrdiff_t>(call.extra_step[i]);
  g.x_step = static_cast<std::ptrdiff_t>(call.x_step), g.tied = call.w == call.weight;
  g.rows = static_cast<int>(call.rows), g.inputs = static_cast<int>(call.inputs), g.outputs = static_cast<int>(call.outputs);
  g.activated = static_cast<int>(call.activated);
  const auto stream = at<CUstream_st>(call.stream);
  // Up to 8 rows stand in shared memory whole; where they are too wide for that, the kernel for more rows takes them as well.
  const bool fits = decode::shared_bytes<Cell, 1>(g.rows, g.inputs, g.outputs) <= decode::most_shared_bytes();
  if (call.rows <= 8 && fits) return said(decode::launch<Elem, Cell, 1>(g, call.early, stream));
  if (call.rows <= 16) return said(decode::launch<Elem, Cell, 2>(g, call.early, stream));
  if (call.rows <= 32) return said(decode::launch<Elem, Cell, 4>(g, call.early, stream));
  if (call.rows <= 64) return said(decode::launch<Elem, Cell, 8>(g, call.early, stream));
  return "too many rows";
}

}  // namespace

ELMAN_EXPORT int elman_decode_call_bytes() { return sizeof(DecodeCall); }
#ifdef ELMAN_CELL
ELMAN_EXPORT const char* elman_decode_step(const DecodeCall* call) { return product<ELMAN_CELL>(*call); }
#else
#if ELMAN_DTYPE != 1
ELMAN_EXPORT const char* elman_decode_linear(const DecodeCall* call) { return product<decode::NoCell>(*call); }
#endif
ELMAN_EXPORT const char* elman_decode_norm(const DecodeCall* call) {
  decode::NormArgs<Elem> g{};
  g.x = at<const Elem>(call->x), g.weight = at<const Elem>(call->weight), g.residual = at<const float>(call->h);
  g.stream = at<float>(call->last), g.out = at<Elem>(call->out), g.x_step = static_cast<std::ptrdiff_t>(call->x_step);
  g.width = static_cast<int>(call->inputs), g.eps = static_cast<float>(call->value[0]);
  return said(decode::launch_norm(g, static_cast<int>(call->rows), call->early, at<CUstream_st>(call->stream)));
}
ELMAN_EXPORT const char* elman_decode_draw(const DecodeCall* call) {
  if (call->inputs > decode::kMostClasses) return "too many classes";
  decode::DrawArgs<Elem> g{};
  g.logits = at<const Elem>(call->x), g.waits = at<const float>(call->bias), g.seen = at<unsigned char>(call->w);
  g.drawn = at<std::int64_t>(call->out), g.shown = at<std::int64_t>(call->last);
  g.step = static_cast<std::ptrdiff_t>(call->x_step), g.classes = static_cast<int>(call->inputs);
  g.top_k = static_cast<int>(call->activated), g.penalty = static_cast<float>(call->value[0]);
  g.temperature = static_cast<float>(call->value[1]), g.below = static_cast<float>(call->value[2]);
  return said(decode::launch_draw(g, static_cast<int>(call->rows), call->early, at<CUstream_st>(call->stream)));
}
#endif
