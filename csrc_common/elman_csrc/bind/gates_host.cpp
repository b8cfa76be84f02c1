// Gated cells on the host as one module, for float and double. Compiled with -DELMAN_CELL_HEADER="path/of/cell.h" -DELMAN_CELL=type.
// The interface is that of gates_call.h.
#include <elman/gates_host.h>

#include ELMAN_CELL_HEADER

namespace {
using Cell = ELMAN_CELL;
template <class T, bool back>
const char* run(const GatesCall& call) {
  for (std::int64_t head = 0; head < call.width / call.columns; ++head) {
    const elman::GatesHost<Cell, T> host{call, head};
    back ? host.backward() : host.forward();
  }
  return nullptr;
}
}  // namespace

ELMAN_EXPORT std::int64_t elman_gates_declares(std::int64_t i) { return elman::gates_declares<Cell>(i); }
ELMAN_EXPORT const char* elman_gates_forward_float32(const GatesCall* call) { return run<float, false>(*call); }
ELMAN_EXPORT const char* elman_gates_forward_float64(const GatesCall* call) { return run<double, false>(*call); }
ELMAN_EXPORT const char* elman_gates_backward_float32(const GatesCall* call) { return run<float, true>(*call); }
ELMAN_EXPORT const char* elman_gates_backward_float64(const GatesCall* call) { return run<double, true>(*call); }
