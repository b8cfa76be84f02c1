// The elementwise skeleton on the host as one module, for float and double. Compiled with
//   -DELMAN_CELL_HEADER="path/of/cell.h"  -DELMAN_CELL=elman::e61::Cell
// The interface is that of elementwise_call.h.
#include <elman/elementwise_call.h>
#include <elman/elementwise_host.h>

#include ELMAN_CELL_HEADER

namespace {

using Cell = ELMAN_CELL;
namespace elementwise = elman::elementwise;
static_assert(elementwise::kWithinLimits<Cell>, "a cell has 1 to 6 streams, up to 8 vectors, 1 to 4 states");

template <class T>
const char* run(const ElementwiseCall& call, elementwise::Direction direction) {
  if (const char* why = elementwise::refuse<Cell>(call, direction, false)) return why;
  const elementwise::Host<Cell, T> host(call);
  direction == elementwise::Direction::forward ? host.forward() : host.backward();
  return nullptr;
}

}  // namespace

ELMAN_EXPORT std::int64_t elman_elementwise_declares(std::int64_t i) { return elementwise::declares<Cell>(i); }
ELMAN_EXPORT const char* elman_elementwise_forward_float32(const ElementwiseCall* c) {
  return run<float>(*c, elementwise::Direction::forward);
}
ELMAN_EXPORT const char* elman_elementwise_forward_float64(const ElementwiseCall* c) {
  return run<double>(*c, elementwise::Direction::forward);
}
ELMAN_EXPORT const char* elman_elementwise_backward_float32(const ElementwiseCall* c) {
  return run<float>(*c, elementwise::Direction::backward);
}
ELMAN_EXPORT const char* elman_elementwise_backward_float64(const ElementwiseCall* c) {
  return run<double>(*c, elementwise::Direction::backward);
}
