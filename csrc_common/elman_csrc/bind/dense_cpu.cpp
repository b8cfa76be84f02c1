// Binding of the dense skeleton on a CPU, in float or bfloat16. Interface: dense_call.h. Compiled with
//   -DELMAN_CELL_HEADER="path/of/cell.h"  -DELMAN_CELL=elman::e42::Cell  -DELMAN_DTYPE=code of the storage (dtype.h)
#include <elman/dense_cpu.h>

#include ELMAN_CELL_HEADER

namespace {

using Cell = ELMAN_CELL;
using Skeleton = elman::dense::cpu::Skeleton<Cell, elman::simd::Storage<ELMAN_DTYPE>>;

const char* run(const DenseCall& c, bool back) {
  return elman::simd::guarded([&] { back ? Skeleton{c}.backward() : Skeleton{c}.forward(); });
}

}  // namespace

ELMAN_EXPORT std::int64_t elman_dense_declares(std::int64_t i) { return i ? elman::UsesA<Cell>::value : Cell::extras; }
ELMAN_EXPORT std::int64_t elman_dense_dtype() { return ELMAN_DTYPE; }
ELMAN_EXPORT const char* elman_dense_forward(const DenseCall* c) { return run(*c, false); }
ELMAN_EXPORT const char* elman_dense_backward(const DenseCall* c) { return run(*c, true); }
