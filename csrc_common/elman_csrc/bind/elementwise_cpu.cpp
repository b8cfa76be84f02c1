// Binding of the elementwise skeleton on a CPU, in float or bfloat16. Interface: elementwise_call.h. Compiled with
//   -DELMAN_CELL_HEADER="path/of/cell.h"  -DELMAN_CELL=elman::e61::Cell  -DELMAN_DTYPE=code of the storage (dtype.h)
#include <elman/elementwise_cpu.h>

#include ELMAN_CELL_HEADER

namespace {

using Cell = ELMAN_CELL;
namespace elementwise = elman::elementwise;
static_assert(elementwise::kWithinLimits<Cell>, "a cell has 1 to 6 streams, up to 8 vectors, 1 to 4 states");
using Skeleton = elementwise::cpu::Skeleton<Cell, elman::simd::Storage<ELMAN_DTYPE>>;

const char* run(const ElementwiseCall& c, elementwise::Direction direction) {
  const bool back = direction == elementwise::Direction::backward;
  if (const char* why = elementwise::refuse<Cell>(c, direction, true)) return why;
  return elman::simd::guarded([&] { back ? Skeleton{c}.backward() : Skeleton{c}.forward(); });
}

}  // namespace

ELMAN_EXPORT std::int64_t elman_elementwise_declares(std::int64_t i) { return elementwise::declares<Cell>(i); }
ELMAN_EXPORT std::int64_t elman_elementwise_dtype() { return ELMAN_DTYPE; }
ELMAN_EXPORT const char* elman_elementwise_forward(const ElementwiseCall* c) { return run(*c, elementwise::Direction::forward); }
ELMAN_EXPORT const char* elman_elementwise_backward(const ElementwiseCall* c) { return run(*c, elementwise::Direction::backward); }
