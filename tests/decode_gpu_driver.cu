// For test_kernels_sanitized.py: the decoding kernels on small problems, to be run under compute-sanitizer, or on emulated
// threads under AddressSanitizer. With a cell its step; without one the linear maps, the norm and the draw.
#include "decode_cuda.cu"

#include "gpu_driver.h"

namespace {

#if defined(__CUDA_ARCH_LIST__) && __CUDA_ARCH_LIST__ >= 900
constexpr int most_early = 1;
#else
constexpr int most_early = 0;
#endif
constexpr int numbers_of_rows[] = {1, 8, 16, 33, 64};  // each of the kernels; 33: with partly filled tiles

std::size_t area(std::int64_t rows, std::int64_t columns) { return static_cast<std::size_t>(rows * columns); }

// Rows that lie `step` apart; the last ends where the memory does.
template <class T>
CallRows apart(std::int64_t rows, std::int64_t columns, std::int64_t step, unsigned seed) {
  return {address(filled<T>(area(rows - 1, step) + columns, 1.f, seed)), step};
}

#ifdef ELMAN_CELL
void step(int rows, int inputs, int width, bool tied, int early) {
  Outputs outputs;
  DecodeStepCall call{};
  call.rows = rows, call.inputs = inputs, call.outputs = width, call.early = early;
  call.x = apart<Elem>(rows, inputs, inputs + 8, 1), call.h = address(filled<float>(area(rows, width), 1.f, 2));
  call.w = address(filled<Elem>(area(width, width), 0.2f, 3)), call.bias = tied ? 0 : address(filled<Elem>(width, 1.f, 4));
  call.weight = tied ? call.w : address(filled<Elem>(area(width, inputs), 0.2f, 5));
  call.extras = ELMAN_CELL::extras;
  for (int i = 0; i < ELMAN_CELL::extras; ++i) call.extra[i] = apart<Elem>(rows, width, 2 * width, 6 + i);
  call.out = address(outputs.make<Elem>("y", area(rows, width)));
  call.last = address(outputs.make<float>("last", area(rows, width)));
  must_succeed(elman_decode_step(&call));
  outputs.must_be_written();
}

void run(int early) {
  for (int rows : numbers_of_rows) {
    step(rows, 40, 40, true, early);
    step(rows, 72, 40, false, early);
  }
  for (int rows : {8, 17}) step(rows, 2200, 16, false, early);  // more chunks than are loaded together
}
#else
// columns: outputs of the first map, then of each further map.
void linear(int rows, int inputs, std::vector<int> columns, bool bias, int activated, int early) {
#if ELMAN_DTYPE != 1
  Outputs outputs;
  DecodeLinearCall call{};
  call.rows = rows, call.inputs = inputs, call.outputs = columns[0], call.early = early;
  call.activated = activated, call.maps = static_cast<std::int64_t>(columns.size()) - 1;
  call.x = apart<Elem>(rows, inputs, inputs + 8, 1);
  if (bias) call.bias = address(filled<Elem>(columns[0], 1.f, 2));
  for (std::size_t i = 0; i < columns.size(); ++i) {
    const auto weight = address(filled<Elem>(area(columns[i], inputs), 0.2f, 3 + static_cast<unsigned>(i)));
    const auto out = address(outputs.make<Elem>("a product", area(rows, columns[i])));
    if (i == 0) call.weight = weight, call.out = out;
    else call.map[i - 1] = weight, call.map_sizes[i - 1] = columns[i], call.map_out[i - 1] = out;
  }
  must_succeed(elman_decode_linear(&call));
  outputs.must_be_written();
#endif
}

void norm(int rows, int width, bool residual, int early) {
  Outputs outputs;
  DecodeNormCall call{};
  call.rows = rows, call.width = width, call.early = early;
  call.x = apart<Elem>(rows, width, width + 3, 1), call.weight = address(filled<Elem>(width, 1.f, 2));
  if (residual) call.residual = address(filled<float>(area(rows, width), 1.f, 3));
  call.out = address(outputs.make<Elem>("n", area(rows, width)));
  call.stream_out = address(outputs.make<float>("the stream", area(rows, width)));
  call.eps = 1e-5;
  must_succeed(elman_decode_norm(&call));
  outputs.must_be_written();
}

struct Rule {
  double penalty, temperature;
  int top_k;
  double below;
};
void draw(int rows, int classes, Rule rule, int early) {
  DecodeDrawCall call{};
  call.rows = rows, call.classes = classes, call.early = early;
  call.logits = apart<Elem>(rows, classes, classes + 5, 1), call.top_k = rule.top_k;
  call.penalty = rule.penalty, call.temperature = rule.temperature, call.below = rule.below;
  if (rule.temperature > 0) {
    std::vector<float> waits(area(rows, classes));
    for (std::size_t i = 0; i < waits.size(); ++i) waits[i] = 0.01f + static_cast<float>(i * 7919 % 997) / 400.f;
    call.waits = address(on_device(waits));
  }
  const auto was_seen = [](int j) { return j % 3 == 0; };
  unsigned char* seen = nullptr;  // read only if there is a penalty
  if (rule.penalty != 1) {
    std::vector<unsigned char> before(area(rows, classes));
    for (std::size_t i = 0; i < before.size(); ++i) before[i] = was_seen(static_cast<int>(i % classes));
    call.seen = address(seen = on_device(before));
  }
  auto* drawn = on_device(std::vector<std::int64_t>(rows, -7));
  auto* shown = on_device(std::vector<std::int64_t>(rows, -7));
  call.drawn = address(drawn), call.shown = address(shown);
  must_succeed(elman_decode_draw(&call));
  must(cudaDeviceSynchronize() == cudaSuccess, "run");
  const auto got = on_host(drawn, rows), told = on_host(shown, rows);
  const auto marks = seen ? on_host(seen, area(rows, classes)) : std::vector<unsigned char>();
  for (int b = 0; b < rows; ++b) {
    must(got[b] >= 0 && got[b] < classes && told[b] == got[b], "a row drew no class");
    for (int j = 0; seen && j < classes; ++j)
      must(marks[area(b, classes) + j] == (was_seen(j) || j == got[b]), "the classes seen are wrong");
  }
}

void run(int early) {
  for (int rows : numbers_of_rows) linear(rows, 72, {40}, rows != 1, rows == 16 ? 40 : 24, early);
  linear(8, 2600, {16}, true, 16, early);  // more chunks than are loaded together, as in the next line
  linear(64, 1096, {24}, false, 0, early);
  for (int rows : {1, 33}) linear(rows, 72, {40, 7, 16, 1, 33}, false, 0, early);
  for (bool residual : {false, true}) {
    for (int rows : {1, 64}) norm(rows, 40, residual, early);
    norm(3, 2600, residual, early);  // more columns than are in flight together
  }
  for (int classes : {50, 256})
    for (Rule rule : {Rule{1, 0, 0, -1}, Rule{1.3, 0, 0, -1}, Rule{1, 0.8, 0, -1}, Rule{1, 0.8, 5, -1}, Rule{1, 1, 0, 0.1},
                      Rule{1.3, 0.8, 5, 0.1}})
      draw(2, classes, rule, early);
}
#endif

}  // namespace

int main() {
  for (int early = 0; early <= most_early; ++early) run(early);
  std::printf("every output was written\n");
}
