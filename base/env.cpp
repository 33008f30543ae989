#include "lockstep/base/env.h"

#include <unistd.h>

#include <array>
#include <climits>
#include <cstdlib>
#include <cstring>

namespace lockstep {

std::optional<std::string> env(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr) return std::nullopt;
  return std::string(value);
}

std::vector<std::string> env_names(const std::string& prefix) {
  std::vector<std::string> names;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const char* equals = std::strchr(*entry, '=');
    if (equals == nullptr) continue;
    std::string name(*entry, static_cast<std::size_t>(equals - *entry));
    if (name.starts_with(prefix)) names.push_back(std::move(name));
  }
  return names;
}

void set_env(const std::string& name, const std::string& value, bool overwrite) {
  ::setenv(name.c_str(), value.c_str(), overwrite ? 1 : 0);
}

void unset_env(const std::string& name) { ::unsetenv(name.c_str()); }

std::string host_name() {
  if (const auto given = env("LOCKSTEP_HOST_NAME"); given && !given->empty()) return *given;
  std::array<char, HOST_NAME_MAX + 1> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "unknown";
  const std::string full(name.data());
  return full.substr(0, full.find('.'));
}

}  // namespace lockstep
