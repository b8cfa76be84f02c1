// Binding of one time step of a matrix state on a GPU: one cell, storage type and size of state. It has the
// interface of matrix_state_call.h without the backward and saved states; its calls have one step.
#include "matrix_state_common.h"

#include <elman/matrix_step.cuh>
#include <elman/stored.cuh>

namespace {

namespace matrix = elman::matrix;

template <int columns>
using Plan = matrix::StepPlan<ELMAN_ROWS, ELMAN_LINES, elman::Stored<ELMAN_DTYPE>, Cell, Options, columns>;
using Narrow = Plan<8>;
using Wide = Plan<matrix::power_from(8, ELMAN_LINES < 32 ? ELMAN_LINES : 32)>;

}  // namespace

ELMAN_EXPORT void elman_matrix_info(std::int64_t* out) { out[0] = sizeof(matrix::StepShared<Wide>), out[1] = 0, out[2] = 1; }

ELMAN_EXPORT const char* elman_matrix_forward(const MatrixCall* c) {
  if (const char* wrong = refuse(*c, false, int(c->interval))) return wrong;
  if (c->steps != 1 || c->saved) return "it takes one time step and saves nothing";
  const bool wide = c->batch * c->heads * Wide::blocks >= 3LL * elman::multiprocessors();
  const cudaError_t status = wide ? matrix::launch_step<Wide>(*c) : matrix::launch_step<Narrow>(*c);
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}
