// The elementwise skeleton on the GPU as one module: one cell and one storage type. Compiled with
//   -DELMAN_CELL_HEADER="path/of/cell.h"  -DELMAN_CELL=elman::e61::Cell  -DELMAN_DTYPE=code of the storage (dtype.h)
// The interface is that of elementwise_call.h.
#include <elman/elementwise_call.h>
#include <elman/elementwise_launch.cuh>
#include <elman/stored.cuh>

#include ELMAN_CELL_HEADER

#ifndef ELMAN_DTYPE  // default for builds without a known call
#define ELMAN_DTYPE 2
#endif

namespace {

using Cell = ELMAN_CELL;
using Elem = elman::Stored<ELMAN_DTYPE>;
using elman::at;
namespace elementwise = elman::elementwise;
static_assert(elementwise::kWithinLimits<Cell>, "a cell has 1 to 6 streams, up to 8 vectors, 1 to 4 states");

template <class T>
elman::Rows<T> rows(const CallView& v) {
  return {at<T>(v.address), static_cast<std::ptrdiff_t>(v.t), static_cast<std::ptrdiff_t>(v.b)};
}

elementwise::Args<Elem, Cell> describe(const ElementwiseCall& c, bool back) {
  elementwise::Args<Elem, Cell> g{};
  g.T = static_cast<int>(c.steps), g.B = static_cast<int>(c.batch), g.d = static_cast<int>(c.width);
  g.pieces = c.width * sizeof(Elem) % 16 == 0 && elman::in_pieces(back ? rows<Elem>(c.gy) : rows<Elem>(c.y));
  for (int k = 0; k < Cell::streams; ++k) {
    g.x[k] = rows<const Elem>(c.stream[k]), g.dx[k] = rows<Elem>(c.dstream[k]);
    g.pieces = g.pieces && elman::in_pieces(g.x[k]) && (!back || elman::in_pieces(g.dx[k]));
  }
  for (int k = 0; k < Cell::vectors; ++k) g.p[k] = at<const float>(c.vector[k]);
  g.y = rows<Elem>(c.y), g.gy = rows<const Elem>(c.gy);
  g.h0 = at<const float>(c.h0), g.last = at<float>(c.last), g.checkpoints = at<float>(c.checkpoints);
  g.g_last = at<const float>(c.g_last), g.dh0 = at<float>(c.dh0), g.dvector = at<float>(c.dvector);
  g.initial = at<const float>(c.initial), g.dinitial = at<float>(c.dinitial);
  g.mask = at<const unsigned char>(c.mask), g.starts = at<const unsigned char>(c.starts);
  return g;
}

const char* run(const ElementwiseCall& c, elementwise::Direction direction) {
  using elementwise::Direction;
  if (const char* why = elementwise::refuse<Cell>(c, direction, true)) return why;
  const auto g = describe(c, direction == Direction::backward);
  const auto stream = at<CUstream_st>(c.cuda_stream);
  const cudaError_t status = direction == Direction::step       ? elementwise::launch_step(g, c.early != 0, stream)
                             : direction == Direction::backward ? elementwise::launch<Elem, Cell, true>(g, stream)
                                                                : elementwise::launch<Elem, Cell, false>(g, stream);
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

}  // namespace

ELMAN_EXPORT std::int64_t elman_elementwise_dtype() { return ELMAN_DTYPE; }
ELMAN_EXPORT std::int64_t elman_elementwise_declares(std::int64_t i) { return elementwise::declares<Cell>(i); }
ELMAN_EXPORT const char* elman_elementwise_forward(const ElementwiseCall* c) { return run(*c, elementwise::Direction::forward); }
ELMAN_EXPORT const char* elman_elementwise_backward(const ElementwiseCall* c) { return run(*c, elementwise::Direction::backward); }
ELMAN_EXPORT const char* elman_elementwise_step(const ElementwiseCall* c) { return run(*c, elementwise::Direction::step); }
