// What symbol tables and debug information know of an address.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

struct Symbol {
  std::string name;          // of the function, mangled; empty: not known
  std::uintptr_t begin = 0;  // its address; 0: not known
  std::string line;          // "FILE:LINE"; empty: not known
};

/// By libbacktrace, which comes with GCC; nothing in a build without it.
Symbol symbol_at(std::uintptr_t address);

}  // namespace lockstep
