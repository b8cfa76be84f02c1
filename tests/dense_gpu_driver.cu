// For test_kernels_sanitized.py: one forward and one backward of a compiled plan on a small problem, to be run under compute-sanitizer.
#include "dense_cuda.cu"

#include "gpu_driver.h"

int main() {
  constexpr int T = 5, B = 11 * wide;
  const std::size_t plane = static_cast<std::size_t>(B) * d, all = T * plane;
  for (bool with_mask : {false, true}) {
    DenseCall call{};
    Outputs outputs;
    call.steps = T, call.batch = B, call.width = d, call.extras = Cell::extras;
    const auto input = [&](unsigned seed) {
      return CallView{address(filled<Elem>(all, 1.f, seed)), static_cast<std::int64_t>(plane), d};
    };
    for (int i = 0; i < Cell::extras; ++i)
      call.extra[i] = input(3 + i), call.dextra[i] = address(outputs.make<Elem>("the gradient of an extra", all));
    call.w = address(filled<Elem>(static_cast<std::size_t>(d) * d, 0.1f, 1)), call.h0 = address(filled<float>(plane, 1.f, 2));
    call.history = address(outputs.make<Elem>("history", all + plane)), call.y = address(outputs.make<Elem>("y", all));
    call.last = address(outputs.make<float>("last", plane)), call.g_last = address(filled<float>(plane, 1.f, 9));
    call.da = address(outputs.make<Elem>("da", all)), call.dh0 = address(outputs.make<float>("dh0", plane));
    if (tied) {
      call.b = address(filled<float>(d, 1.f, 6));
      call.sums = address(outputs.make<Elem>("sums", all + plane)), call.dx = address(outputs.make<Elem>("dx", all));
      call.x = input(4);
    } else call.u = input(4);
    call.error = address(on_device(std::vector<int>{0})), call.timeout_ns = 60000000000ull;
    if (with_mask) call.mask = address(made_mask(T * B));
    call.rows = (kind == Kind::tiles ? 3 : 4) * wide + (wide - 1), call.groups = kind == Kind::tiles ? 2 : 3;
    if (tied) call.dbias = address(outputs.make<float>("dbias", static_cast<std::size_t>(call.groups) * dense::kRows * d));
    must_succeed(elman_dense_forward(&call));
    call.gy = input(5);
    must_succeed(elman_dense_backward(&call));
    outputs.must_be_written();
  }
  std::printf("every output was written\n");
}
