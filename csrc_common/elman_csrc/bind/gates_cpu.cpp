// Binding of gated cells on a CPU, in float or bfloat16. Interface: gates_call.h. Compiled with
//   -DELMAN_CELL_HEADER="path/of/cell.h"  -DELMAN_CELL=type  -DELMAN_DTYPE=code of the storage (dtype.h)
#include <elman/gates_cpu.h>

#include ELMAN_CELL_HEADER

namespace {

using Cell = ELMAN_CELL;
using Skeleton = elman::gates::cpu::Skeleton<Cell, elman::simd::Storage<ELMAN_DTYPE>>;

const char* run(const GatesCall& c, bool back) {
  return elman::simd::guarded([&] {
    for (std::int64_t head = 0; head < c.width / c.columns; head++)
      back ? Skeleton{c, head}.backward() : Skeleton{c, head}.forward();
  });
}

}  // namespace

ELMAN_EXPORT std::int64_t elman_gates_declares(std::int64_t i) { return elman::gates_declares<Cell>(i); }
ELMAN_EXPORT std::int64_t elman_gates_dtype() { return ELMAN_DTYPE; }
ELMAN_EXPORT const char* elman_gates_forward(const GatesCall* c) { return run(*c, false); }
ELMAN_EXPORT const char* elman_gates_backward(const GatesCall* c) { return run(*c, true); }
