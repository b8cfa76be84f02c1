// For test_kernels_sanitized.py and test_kernels_races.py: one step of a matrix state with one head, of one row in narrow blocks and of many in wide
// ones; which ones four rows have depends on the GPU.
#include "matrix_step_cuda.cu"

#include "gpu_driver.h"

namespace {

using Elem = elman::Stored<ELMAN_DTYPE>;
constexpr int N = ELMAN_ROWS, V = ELMAN_LINES, H = 1;
constexpr elman::ScalarKind kinds[3] = {Options::kind0, Options::kind1, Options::kind2};

void step(int batch, bool marked, bool carried) {
  const std::size_t keys = std::size_t(batch) * H * N, lines = std::size_t(batch) * H * V, states = keys * V;
  unsigned seed = 1;
  const auto rows = [&](auto like, std::size_t count) {
    return CallRows{address(filled<decltype(like)>(count, 1.f, seed++)), std::int64_t(count) / batch};
  };
  MatrixCall call{};
  Outputs outputs;
  call.batch = batch, call.steps = 1, call.heads = H, call.shared = Options::shared, call.interval = 16;
  call.vectors = Cell::vectors, call.lines = Cell::lines, call.scalars = Cell::scalars, call.params = Cell::params;
  call.q = rows(Elem(), keys), call.k = rows(Elem(), keys);
  for (int i = 0; i < Cell::vectors; ++i) call.vector[i] = Options::wide >> i & 1 ? rows(float(), keys) : rows(Elem(), keys);
  for (int i = 0; i < Cell::lines; ++i) call.line[i] = rows(Elem(), lines);
  for (int i = 0; i < Cell::scalars; ++i)
    call.scalar[i] = kinds[i] == elman::ScalarKind::given ? rows(float(), batch * H) : rows(Elem(), batch * H);
  for (int i = 0; i < Cell::params; ++i) call.param[i] = address(filled<float>(std::size_t(H) * V, 1.f, seed++));
  call.A_log = address(filled<float>(H, 1.f, seed++)), call.dt_bias = address(filled<float>(H, 1.f, seed++));
  if (marked) call.mask = address(made_mask(batch)), call.starts = address(made_mask(batch));
  if (carried) call.S0 = address(filled<float>(states, 1.f, seed++));
  call.s1 = address(outputs.make<float>("state", states)), call.o = address(outputs.make<Elem>("o", lines));
  must_succeed(elman_matrix_forward(&call));
  outputs.must_be_written();
}

}  // namespace

int main() {
  step(1, false, true);
  step(4, true, true);
  step(400, false, false);
  std::printf("every output was written\n");
}
