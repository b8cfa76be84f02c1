// Replaces pybind11 where a driver includes the binding of a module: the module's functions are there, and Python is not.
#pragma once

struct NoPython {
  template <class Function>
  void def(const char*, Function) {}
};
#define PYBIND11_MODULE(name, m) [[maybe_unused]] static void name(NoPython m)
