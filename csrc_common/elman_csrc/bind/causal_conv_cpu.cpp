// Binding of the causal convolution on a CPU, in float or bfloat16. Interface: causal_conv_call.h. Compiled with
//   -DELMAN_DTYPE=code of the storage (dtype.h)  -DELMAN_TAPS=K
#include <elman/causal_conv_cpu.h>

namespace {

using Stored = elman::simd::Storage<ELMAN_DTYPE>;

const char* run(const CausalConvCall& c, bool back) {
  return elman::simd::guarded([&] { elman::conv::cpu::Walk<Stored, ELMAN_TAPS>{c, back}.run(c.threads); });
}

}  // namespace

ELMAN_EXPORT std::int64_t elman_causal_conv_dtype() { return ELMAN_DTYPE; }
ELMAN_EXPORT std::int64_t elman_causal_conv_shares(std::int64_t, std::int64_t batch, std::int64_t) { return batch; }
ELMAN_EXPORT const char* elman_causal_conv_forward(const CausalConvCall* c) { return run(*c, false); }
ELMAN_EXPORT const char* elman_causal_conv_backward(const CausalConvCall* c) { return run(*c, true); }
