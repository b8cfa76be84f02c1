// The C interface of a model's program (whole.cuh): the arguments of a launch. bind/launch.cpp fills it in.
//
//   elman_whole_dtype() -> the storage of weights and embedding;  elman_whole_run(call) -> null, or an error message
#pragma once

#include <cstdint>

#include "call.h"

struct WholeCall {
  std::int64_t steps, blocks, first, jobs_count, classes, floats, words, own_floats;
  std::uint64_t jobs, constants, table, states, own,
      exchanged;  // int64 [J,3]: address, rows and bytes of a row; float; [V,D]; float; float; int64
  std::uint64_t token, shown, waits, seen;  // int64 [1], int64 [T], float [T,V] or null at temperature 0, bytes [V]
  double penalty, temperature, below;  // as in decode_call.h
  std::int64_t top_k, timeout_ns;
  std::uint64_t error, stream;
};
ELMAN_LAYOUT(whole, WholeCall, steps, blocks, first, jobs_count, classes, floats, words, own_floats, jobs, constants, table, states,
             own, exchanged, token, shown, waits, seen, penalty, temperature, below, top_k, timeout_ns, error, stream)
