// What a loss of power leaves of a simulated job's files (world.h: Note [Disks]).
#pragma once

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "world.h"

namespace lockstep::simulation {

inline std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void take_back(const DiskStep& step) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  char kept[64];
  std::snprintf(kept, sizeof kept, kKeptPath, step.kept);
  switch (step.kind) {
    case DiskChange::kCreate: fs::remove(step.from, ignored); break;
    case DiskChange::kMakeDirectory: fs::remove_all(step.from, ignored); break;
    case DiskChange::kRename:
      fs::rename(step.to, step.from, ignored);
      if (step.kept != 0) fs::copy_file(kept, step.to, ignored);
      break;
    case DiskChange::kExchange: ::renameat2(AT_FDCWD, step.from, AT_FDCWD, step.to, RENAME_EXCHANGE); break;
    case DiskChange::kRemove:
      if (step.kept != 0) fs::copy_file(kept, step.from, ignored);
      break;
    case DiskChange::kRemoveDirectory: fs::create_directory(step.from, ignored); break;
  }
}

inline void lose_power(World& world) {
  const std::uint32_t keeps =
      world.disk_synced + static_cast<std::uint32_t>(world.draw_below(world.disk_count - world.disk_synced + 1));
  for (std::uint32_t i = world.disk_count; i > keeps; --i) take_back(world.disk[i - 1]);
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::recursive_directory_iterator("/tmp"))
    if (entry.is_regular_file()) paths.push_back(entry.path());
  std::ranges::sort(paths);
  for (const std::string& path : paths) {
    struct stat status = {};
    if (::stat(path.c_str(), &status) != 0) continue;
    char durable[64];
    std::snprintf(durable, sizeof durable, kDurablePath, static_cast<unsigned long>(status.st_ino));
    const std::string was = content_of(durable), is = content_of(path);
    if (was == is) continue;
    const auto same = static_cast<std::size_t>(std::ranges::mismatch(was, is).in2 - is.begin());
    std::string after;
    switch (world.draw_below(3)) {
      case 0: after = was; break;
      case 1: after = is; break;
      default: {  // some of its blocks
        const std::size_t written = same + world.draw_below(is.size() - same + 1);
        after = is.substr(0, written);
        if (was.size() > written)
          after += was.substr(written);
        else if (world.draw_below(2) == 0)
          after.resize(is.size());
      }
    }
    std::ofstream(path, std::ios::binary | std::ios::trunc) << after;
  }
}

}  // namespace lockstep::simulation
