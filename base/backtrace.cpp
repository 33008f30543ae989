#include "base/backtrace.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "base/crash.h"
#include "base/symbols.h"

namespace lockstep {
namespace {

constexpr std::size_t kLongestName = 300;  // of templates, which have no end

std::string shown(const std::string& name) {
  std::string text = demangled(name.c_str());
  if (text.size() > kLongestName) text.replace(kLongestName, std::string::npos, "…");
  return text;
}

}  // namespace

std::string demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> known(abi::__cxa_demangle(name, nullptr, nullptr, &status), std::free);
  return status == 0 ? known.get() : name;
}

std::string named_frames(std::span<void* const> addresses) {
  std::string text;
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    const auto address = reinterpret_cast<std::uintptr_t>(addresses[i]);
    const std::uintptr_t code = i == 0 ? address : address - 1;  // within the call
    Symbol symbol = symbol_at(code);
    Dl_info info = {};
    const bool known = ::dladdr(reinterpret_cast<void*>(code), &info) != 0;
    if (symbol.name.empty() && known && info.dli_sname != nullptr)
      symbol = {.name = info.dli_sname, .begin = reinterpret_cast<std::uintptr_t>(info.dli_saddr), .line = {}};
    text += kFrameIndent;
    if (!symbol.name.empty()) text += shown(symbol.name);
    if (symbol.begin != 0) text += fmt::format("+{:#x}", address - symbol.begin);
    if (!symbol.line.empty()) text += " at " + symbol.line;
    if (known && info.dli_fname != nullptr)
      text += fmt::format("{}{}(+{:#x})", symbol.name.empty() ? "" : " in ", info.dli_fname,
                          address - reinterpret_cast<std::uintptr_t>(info.dli_fbase));
    else
      text += fmt::format("{}{:#x}", symbol.name.empty() ? "" : " at ", address);
    text += '\n';
  }
  return text;
}

}  // namespace lockstep
