// Binding of row recurrences on a CPU, in float or bfloat16. The interface: rows_call.h. Compiled with
//   -DELMAN_DTYPE=code of the storage (dtype.h)  -DELMAN_ROWS=K  -DELMAN_COLUMNS=V
#include <new>
#include <type_traits>

#include <elman/dtype.h>
#include <elman/rows_call.h>
#include <elman/rows_cpu.h>

namespace {

using Stored = std::conditional_t<ELMAN_DTYPE == static_cast<int>(elman::Dtype::f32), float, elman::simd::BFloat16>;
using Skeleton = elman::rows::cpu::Skeleton<Stored, ELMAN_ROWS, ELMAN_COLUMNS>;

const char* run(const RowsCall& c, bool back) {
  try {
    back ? Skeleton{c}.backward() : Skeleton{c}.forward();
  } catch (const std::bad_alloc&) {
    return "too little memory";
  }
  return nullptr;
}

}  // namespace

ELMAN_EXPORT std::int64_t elman_rows_dtype() { return ELMAN_DTYPE; }

ELMAN_EXPORT const char* elman_rows_forward(const RowsCall* c) { return run(*c, false); }

ELMAN_EXPORT const char* elman_rows_backward(const RowsCall* c) { return run(*c, true); }
