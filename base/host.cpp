#include "base/host.h"

#include <unistd.h>

#include <climits>

#include <array>

#include "base/env.h"

namespace lockstep {

std::string host_name() {
  if (const auto given = env("LOCKSTEP_HOST_NAME"); given && !given->empty()) return *given;
  std::array<char, HOST_NAME_MAX + 1> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "unknown";
  const std::string full(name.data());
  return full.substr(0, full.find('.'));
}

}  // namespace lockstep
