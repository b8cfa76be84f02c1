// For test_kernels_sanitized.py and test_kernels_races.py: forward and backward of one compiled size on a small problem, to be run under
// compute-sanitizer, or on emulated threads under AddressSanitizer or with the detector of races.
#include "matrix_state_cuda.cu"

#include "gpu_driver.h"

#ifndef ELMAN_BATCH
#define ELMAN_BATCH 2
#define ELMAN_STEPS 37  // two segments of 16, and a part of one
#endif
#ifndef ELMAN_HEADS
#define ELMAN_HEADS 3
#endif

namespace {

using Elem = elman::Stored<ELMAN_DTYPE>;
constexpr int B = ELMAN_BATCH, T = ELMAN_STEPS, H = ELMAN_HEADS, N = ELMAN_ROWS, V = ELMAN_LINES;
constexpr std::size_t places = std::size_t(B) * T * H, states = std::size_t(B) * H * N * V;
constexpr int keys = 2 + Cell::vectors, inputs_of_token = keys + Cell::lines;  // q, k, vectors; lines
constexpr int packed_step = H * (keys * N + Cell::lines * V);

struct Variant {
  bool masked, packed, carried;  // carried: there is an initial state, and a gradient of the last one
};
constexpr Variant variants[] = {{false, false, true}, {false, true, false}, {true, true, true}, {true, false, false}};

// q, k, vectors and lines, or their gradients: slices of one tensor, or separate tensors.
template <class Make>
void views(bool packed, CallRows (&to)[inputs_of_token], Make make) {
  Elem* next = packed ? make("of the packed inputs", std::size_t(B) * T * packed_step) : nullptr;
  for (int i = 0; i < inputs_of_token; ++i) {
    const int width = H * (i < keys ? N : V);
    to[i] = {address(packed ? next : make(i < keys ? "of a key" : "of a line", places / H * width)), packed ? packed_step : width};
    next += packed ? width : 0;
  }
}
bool can_be_packed(std::int64_t align) {  // `sliceable` of matrix/run.py
  return packed_step * sizeof(Elem) % align == 0 && H * N * sizeof(Elem) % align == 0 && H * V * sizeof(Elem) % align == 0;
}

// A scalar is float if given.
template <class Make>
std::uint64_t scalar(elman::ScalarKind kind, Make make) {
  return kind == elman::ScalarKind::given ? address(make(float())) : address(make(Elem()));
}
constexpr elman::ScalarKind kinds[2] = {Options::kind0, Options::kind1};

void give(MatrixCall& call, const Variant& variant) {
  call.batch = B, call.steps = T, call.heads = H;
  call.vectors = Cell::vectors, call.lines = Cell::lines, call.scalars = Cell::scalars, call.params = Cell::params;
  call.shared = Options::shared, call.interval = Forward::interval;
  unsigned seed = 1;
  CallRows in[inputs_of_token];
  views(variant.packed, in, [&](const char*, std::size_t count) { return filled<Elem>(count, 2.f, seed++); });
  call.q = in[0], call.k = in[1];
  std::copy_n(in + 2, Cell::vectors, call.vector), std::copy_n(in + keys, Cell::lines, call.line);
  for (int i = 0; i < Cell::params; ++i) call.param[i] = address(filled<float>(std::size_t(H) * V, 1.f, 50 + i));
  for (int i = 0; i < Cell::scalars; ++i)
    call.scalar[i] = {scalar(kinds[i], [&](auto like) { return filled<decltype(like)>(places, 1.f, 10 + i); }), H};
  if (Backward::mamba) call.A_log = address(filled<float>(H, 1.f, 20)), call.dt_bias = address(filled<float>(H, 1.f, 21));
  if (variant.masked) call.mask = address(made_mask(B * T));
  call.state_line = 1, call.state_row = V;
  if (variant.carried) call.S0 = address(filled<float>(states, 1.f, 30));
}

void take(MatrixCall& call, const Variant& variant, Outputs& outputs) {
  constexpr int segments = (T + Backward::interval - 1) / Backward::interval;
  call.s1 = address(outputs.make<float>("last state", states)), call.ds0 = address(outputs.make<float>("its gradient", states));
  call.o = address(outputs.make<Elem>("o", places * V));
  if constexpr (Backward::keeps_r) {
    constexpr std::size_t used = std::size_t(H) * V * (segments * N + T), row = (used + 7) / 8 * 8;
    if constexpr (used == row) call.saved = address(outputs.make<Elem>("saved", B * row));
    else call.saved = address(filled<Elem>(B * row, 0, 0));  // the padding of a row stays unwritten
  } else {
    call.saved = address(outputs.make<float>("saved", states * segments));
  }
  call.dy = address(filled<Elem>(places * V, 1.f, 40));
  if (variant.carried) call.ds1 = address(filled<float>(states, 1.f, 41));
  CallRows d[inputs_of_token];
  views(variant.packed, d, [&](const char* name, std::size_t count) { return outputs.make<Elem>(name, count); });
  call.dq = d[0], call.dk = d[1];
  std::copy_n(d + 2, Cell::vectors, call.dvector), std::copy_n(d + keys, Cell::lines, call.dline);
  for (int i = 0; i < Cell::params; ++i)
    call.dparam[i] = address(outputs.make<float>("gradient of a constant", std::size_t(B) * H * V));
  for (int i = 0; i < Cell::scalars; ++i) {
    const char* name = i ? "gradient of the write strength" : "gradient of the decay";
    call.dscalar[i] = {scalar(kinds[i], [&](auto like) { return outputs.make<decltype(like)>(name, places); }), H};
  }
  const std::size_t parts = elman_matrix_parts(B, H);
  if (Backward::mamba) call.dhead = address(outputs.make<float>("dhead", parts * 2 * B * H));
  if (parts > 1) call.parts = address(filled<float>(parts * places * Backward::part_width, 0, 0));
}

}  // namespace

int main() {
  std::int64_t info[3];
  elman_matrix_info(info);
  for (Variant variant : variants) {
    variant.packed = variant.packed && can_be_packed(info[2]);
    MatrixCall call{};
    Outputs outputs;
    give(call, variant);
    take(call, variant, outputs);
    must_succeed(elman_matrix_forward(&call));
    must_succeed(elman_matrix_backward(&call));
    outputs.must_be_written();
  }
  std::printf("every output was written\n");
}
