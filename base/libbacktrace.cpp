#include <backtrace.h>
#include <fmt/format.h>

#include "base/crash.h"

namespace lockstep {
namespace {

void ignore_error(void*, const char*, int) {}

// Called for functions that are inlined there, and then for the one that contains them.
int take_line(void* into, std::uintptr_t, const char* file, int line, const char* function) {
  Symbol& symbol = *static_cast<Symbol*>(into);
  if (symbol.line.empty() && file != nullptr) symbol.line = fmt::format("{}:{}", file, line);
  if (symbol.name.empty() && function != nullptr) symbol.name = function;
  return 0;
}

void take_name(void* into, std::uintptr_t, const char* name, std::uintptr_t begin, std::uintptr_t) {
  Symbol& symbol = *static_cast<Symbol*>(into);
  if (name == nullptr) return;
  symbol.name = name;
  symbol.begin = begin;
}

}  // namespace

Symbol symbol_at(std::uintptr_t address) {
  static backtrace_state* const state = ::backtrace_create_state(nullptr, /*threaded=*/0, ignore_error, nullptr);
  Symbol symbol, whole;
  if (state == nullptr) return symbol;
  ::backtrace_pcinfo(state, address, take_line, ignore_error, &symbol);
  // Without debug information that has the same name, and not where the function begins. One that is inlined begins
  // nowhere.
  ::backtrace_syminfo(state, address, take_name, ignore_error, &whole);
  if (symbol.name.empty()) symbol.name = whole.name;
  if (symbol.name == whole.name) symbol.begin = whole.begin;
  return symbol;
}

}  // namespace lockstep
