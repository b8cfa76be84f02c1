// Binding of recorded programs on a CPU. Interface: program_call.h.
#include <elman/program_call.h>
#include <elman/program_cpu.h>

ELMAN_EXPORT std::int64_t elman_program_dtype() { return static_cast<int>(elman::Dtype::f32); }

ELMAN_EXPORT const char* elman_program_run(const ProgramCall* c) {
  namespace program = elman::program;
  if (c->words * sizeof(std::int64_t) != sizeof(program::Instruction)) return "instructions are of another version";
  return elman::simd::guarded(
      [&] { program::Machine(static_cast<int>(c->threads)).run(elman::at<const program::Instruction>(c->code), c->count); });
}
