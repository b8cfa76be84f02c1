// Binding of row recurrences on a CPU, in float or bfloat16. Interface: rows_call.h. Compiled with
//   -DELMAN_DTYPE=code of the storage (dtype.h)  -DELMAN_ROWS=K  -DELMAN_COLUMNS=V
#include <elman/rows_call.h>
#include <elman/rows_cpu.h>

namespace {

using Stored = elman::simd::Storage<ELMAN_DTYPE>;
using Skeleton = elman::rows::cpu::Skeleton<Stored, ELMAN_ROWS, ELMAN_COLUMNS>;

const char* run(const RowsCall& c, bool back) {
  return elman::simd::guarded([&] { back ? Skeleton{c}.backward() : Skeleton{c}.forward(); });
}

}  // namespace

ELMAN_EXPORT std::int64_t elman_rows_dtype() { return ELMAN_DTYPE; }

ELMAN_EXPORT const char* elman_rows_forward(const RowsCall* c) { return run(*c, false); }

ELMAN_EXPORT const char* elman_rows_backward(const RowsCall* c) { return run(*c, true); }
