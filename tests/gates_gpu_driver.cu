// For test_kernels_sanitized.py: forward and backward of gated cells on a small problem, to be run under compute-sanitizer.
#include "gates_cuda.cu"

#include "gpu_driver.h"

int main() {
  constexpr int T = 5, k = Cell::gates, B = 11 * N, states = 1 + Cell::memory;
  const std::size_t plane = static_cast<std::size_t>(B) * heads * d, all = T * plane;
  for (bool with_mask : {false, true}) {
    GatesCall call{};
    Outputs outputs;
    call.steps = T, call.batch = B, call.width = heads * d, call.columns = d;
    call.w = address(filled<Elem>(static_cast<std::size_t>(heads) * k * d * d, 0.1f, 1)),
    call.b = address(filled<float>(heads * k * d, 1.f, 2));
    call.h0 = address(filled<float>(states * plane, 1.f, 3, 1.f)),  // a normaliser is positive
        call.g_last = address(filled<float>(states * plane, 1.f, 4));
    call.history = address(outputs.make<Elem>("history", all + plane)), call.y = address(outputs.make<Elem>("y", all));
    call.kept = address(outputs.make<Elem>("what the cell keeps", all * Cell::kept));
    call.last = address(outputs.make<float>("last", states * plane)),
    call.dh0 = address(outputs.make<float>("dh0", states * plane));
    call.dp = address(outputs.make<Elem>("dp", all * k)), call.dbias = address(outputs.make<float>("dbias", plane * k));
    if (Cell::splits) call.du = address(outputs.make<Elem>("du", all * k));
    if (Cell::memory) call.memory = address(outputs.make<Elem>("memory", Cell::memory * (all + plane)));
    call.error = address(on_device(std::vector<int>{0})), call.timeout_ns = 60000000000ull;
    if (with_mask) call.mask = address(made_mask(T * B));
    call.rows = 4 * N, call.groups = 2;  // three tiles, the last with fewer rows: two launches
    call.u = {address(filled<Elem>(all * k, 1.f, 7)), static_cast<std::int64_t>(plane) * k, heads * k * d};
    must_succeed(elman_gates_forward(&call));
    call.gy = {address(filled<Elem>(all, 1.f, 8)), static_cast<std::int64_t>(plane), heads * d};
    must_succeed(elman_gates_backward(&call));
    outputs.must_be_written();
  }
  std::printf("every output was written\n");
}
