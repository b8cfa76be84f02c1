// For test_kernels_sanitized.py: forward and backward of E23 on a small problem, to be run under compute-sanitizer.
#include "e23_cuda.cu"

#include "gpu_driver.h"

#ifndef ELMAN_STEPS
#define ELMAN_STEPS 5
#endif

int main() {
  constexpr int T = ELMAN_STEPS, each = elman::dense::kRows, B = each + 3, N = e23::kSlots;  // two clusters, one of three rows
  constexpr std::size_t plane = B * d, all = T * plane;
  const auto w_h = address(filled<Elem>(d * d, 0.1f, 1)), w_w = address(filled<Elem>(d * d, 0.1f, 2));
  for (bool with_mask : {false, true}) {
    Outputs outputs;
    const std::uint64_t mask = with_mask ? address(made_mask(T * B)) : 0, starts = packed ? address(made_mask(T * B)) : 0;
    const std::uint64_t error = address(on_device(std::vector<int>{0})), initial = address(filled<float>(N * d, 1.f, 3));
    const std::uint64_t kept[] = {address(outputs.make<Elem>("history", all + plane)), address(outputs.make<Elem>("tape", all * N)),
                                  address(outputs.make<Elem>("w", all)), address(outputs.make<float>("reads", T * B * N)),
                                  address(outputs.make<float>("writes", T * B * N))};
    const auto launch = [&](bool backward, unsigned seed, std::uint64_t made, std::uint64_t dw, std::uint64_t dinitial) {
      run(backward,
          {w_h, w_w, address(filled<Elem>(all, 1.f, seed)), address(filled<float>(plane, 1.f, seed + 1)),
           address(filled<float>(plane * N, 1.f, seed + 2)), mask, kept[0], kept[1], kept[2], kept[3], kept[4], made, dw,
           address(outputs.make<float>("h, or its gradient", plane)),
           address(outputs.make<float>("the tape's end, or gradient", plane * N)), error, starts, initial, dinitial},
          each, T, B, 60000000000ull, 0);
    };
    launch(false, 4, address(outputs.make<Elem>("y", all)), 0, 0);
    const std::uint64_t dinitial = packed ? address(outputs.make<float>("dinitial", plane * N)) : 0;
    launch(true, 7, address(outputs.make<Elem>("du", all)), address(outputs.make<Elem>("dw", all)), dinitial);
    outputs.must_be_written();
  }
  std::printf("every output was written\n");
}
