// What the C interfaces of all modules share. Tensors cross as addresses: no torch headers, no Python headers, and a module serves
// every version of both.
#pragma once

#include <cstdint>

#define ELMAN_EXPORT extern "C" __attribute__((visibility("default")))

namespace elman {

template <class T>
T* at(std::uint64_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace elman
