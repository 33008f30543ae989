#include "base/kernel.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>

#include "base/text.h"

namespace lockstep {
namespace {

/// Where a hierarchy of control groups is mounted, and which group's directory lies there.
struct Mount {
  std::string point, group;
};

// "36 25 0:31 /group /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
std::optional<Mount> mount_of(const std::string& root, const std::string& controller, bool unified) {
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const auto words = words_of(line);
    const auto dash = std::find(words.begin(), words.end(), "-");
    if (words.size() < 5 || words.end() - dash < 4) continue;
    const auto options = split(dash[3], ',');
    const bool wanted =
        unified ? dash[1] == "cgroup2"
                : dash[1] == "cgroup" && std::find(options.begin(), options.end(), controller) != options.end();
    if (wanted) return Mount{.point = words[4], .group = words[3]};
  }
  return std::nullopt;
}

// "0::/path" or "9:memory:/path"
std::optional<std::string> own_group(const std::string& root, const std::string& controller, bool unified) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const auto controllers = split(line.substr(first + 1, second - first - 1), ',');
    const bool wanted = unified ? line.starts_with("0::")
                                : std::find(controllers.begin(), controllers.end(), controller) != controllers.end();
    if (wanted) return line.substr(second + 1);
  }
  return std::nullopt;
}

}  // namespace

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

std::vector<ControlGroup> control_groups(const std::string& controller, bool unified, const std::string& root) {
  const auto mount = mount_of(root, controller, unified);
  auto group = own_group(root, controller, unified);
  if (!mount || !group) return {};
  // The mount may show a part of the hierarchy alone, and a namespace may have moved the group out of it.
  if (mount->group != "/" && group->starts_with(mount->group)) group->erase(0, mount->group.size());
  if (group->find("..") != std::string::npos) group->clear();
  std::vector<ControlGroup> groups;
  for (std::string at = *group;; at.erase(at.rfind('/'))) {
    groups.push_back({.name = at.empty() ? "/" : at, .directory = root + mount->point + at});
    while (at.ends_with('/')) at.pop_back();
    if (at.find('/') == std::string::npos) return groups;
  }
}

std::int64_t peak_resident_bytes() {
  struct rusage usage = {};
  if (::getrusage(RUSAGE_SELF, &usage) != 0) return 0;
  return static_cast<std::int64_t>(usage.ru_maxrss) * 1024;  // Linux counts in KiB
}

double cpu_seconds() {
  struct timespec time = {};
  if (::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

std::int64_t resident_bytes() {
  std::ifstream in("/proc/self/statm");
  std::int64_t size = 0, resident = 0;
  return in >> size >> resident ? resident * ::sysconf(_SC_PAGESIZE) : 0;
}

}  // namespace lockstep
