#include "base/kernel.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <fstream>

namespace lockstep {

std::string boot_id(const std::string& root) {
  std::string id;
  std::ifstream(root + "/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

std::string namespace_id(const char* kind, const std::string& root) {
  std::array<char, 64> name{};
  const ssize_t length =
      ::readlink(fmt::format("{}/proc/self/ns/{}", root, kind).c_str(), name.data(), name.size() - 1);
  return length > 0 ? std::string(name.data(), static_cast<std::size_t>(length)) : std::string();
}

}  // namespace lockstep
