// The C interface of the module that repeats a recorded program on a CPU (program_cpu.h). elman_program_run(call)
//
//   code [count,I] int64: instructions, as `Instruction` there
#pragma once

#include <cstdint>

#include "call.h"

struct ProgramCall {
  std::uint64_t code;
  std::int64_t count, words, threads, stream;
};
ELMAN_LAYOUT(program, ProgramCall, code, count, words, threads, stream)
