// A model's program as a module. Compiled with
//   -DELMAN_DTYPE=code of the weights (dtype.h)  -DELMAN_CELL_HEADER="path/of/program.h", written by elman-megakernel
// The interface is that of whole_call.h.
#include <elman/whole.cuh>
#include <elman/whole_call.h>
#include <elman/stored.cuh>

#include ELMAN_CELL_HEADER

namespace {

namespace whole = elman::whole;
using elman::at;
using Elem = elman::Stored<ELMAN_DTYPE>;
using Program = whole::Program;

const char* run(const WholeCall& c) {
  if (c.jobs_count != Program::jobs || c.classes != Program::classes) return "this module was compiled for another model";
  if (c.steps < 1 || c.blocks < 1 || c.first < 1 || c.first + c.steps > 0xffffffffLL) return "a number is out of its range";
  if (c.temperature > 0 && !c.waits) return "waits are missing";
  whole::Args<Elem> g{};
  g.jobs = at<const whole::Job>(c.jobs), g.constants = at<const float>(c.constants), g.table = at<const Elem>(c.table);
  g.states = at<float>(c.states), g.own = at<float>(c.own), g.exchanged = at<unsigned long long>(c.exchanged);
  g.token = at<std::int64_t>(c.token), g.shown = at<std::int64_t>(c.shown), g.waits = at<const float>(c.waits);
  g.draw.seen = at<unsigned char>(c.seen), g.draw.classes = Program::classes, g.draw.top_k = static_cast<int>(c.top_k);
  g.draw.penalty = static_cast<float>(c.penalty), g.draw.temperature = static_cast<float>(c.temperature);
  g.draw.below = static_cast<float>(c.below);
  g.steps = static_cast<int>(c.steps), g.first = static_cast<unsigned>(c.first);
  g.timeout_ns = static_cast<unsigned long long>(c.timeout_ns), g.error = at<int>(c.error);

  const auto function = whole::kernel<Elem, Program>;
  const int bytes = whole::Layout<Program>::bytes;
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative, attribute.val.cooperative = 1;
  config.gridDim = dim3(static_cast<unsigned>(c.blocks)), config.blockDim = dim3(whole::kAll), config.dynamicSmemBytes = bytes;
  config.stream = at<CUstream_st>(c.stream), config.attrs = &attribute, config.numAttrs = 1;
  cudaError_t status = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status == cudaSuccess) status = cudaLaunchKernelEx(&config, function, g);
  if (status == cudaSuccess) return nullptr;
  cudaGetLastError();
  return cudaGetErrorString(status);
}

}  // namespace

ELMAN_EXPORT std::int64_t elman_whole_dtype() { return ELMAN_DTYPE; }
ELMAN_EXPORT const char* elman_whole_run(const WholeCall* c) { return run(*c); }
