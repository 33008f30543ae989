#include "trainer/resume.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/scope.h"
#include "base/text.h"
#include "comm/agree.h"
#include "trainer/survivor.h"

namespace lockstep::trainer {
namespace {

namespace fs = std::filesystem;

struct Wish {
  std::string host;  // empty: any other one
  std::string directory;
};

/// "HOST:DIR" or "DIR"; a directory with a colon in its name is written ./a:b.
Wish parse(const std::string& text) {
  const auto colon = text.find(':');
  if (colon == std::string::npos || text.find('/') < colon) return {.host = {}, .directory = text};
  Wish wish{.host = text.substr(0, colon), .directory = text.substr(colon + 1)};
  if (wish.host.empty() || wish.directory.empty())
    throw UsageError(fmt::format("--checkpoint-mirror {} lacks a {}", text, wish.host.empty() ? "host" : "directory"),
                     "give HOST:DIR, or DIR alone for any other host");
  return wish;
}

/// Of the directory, or of the nearest one above it that is there.
std::optional<dev_t> file_system_of(const std::string& directory) {
  std::error_code ignored;
  for (fs::path at = fs::absolute(directory, ignored).lexically_normal();; at = at.parent_path()) {
    struct stat found = {};
    if (::stat(at.c_str(), &found) == 0) return found.st_dev;
    if (!at.has_relative_path()) return std::nullopt;
  }
}

/// A file that rank 0 makes and another rank looks for. A checkpoint's name while it is written, so that the next run
/// removes it where this one is killed.
std::string probe_in(const std::string& directory, const std::string& nonce) {
  return fmt::format("{}/.step-same-{}", directory, nonce);
}

/// Both ranks would write the same files: a directory that all hosts see.
void check_apart(comm::ProcessGroup& group, const std::string& spec, const std::string& directory,
                 const Mirror& mirror) {
  const std::string nonce = group.all_gather_text(fmt::format("{}-{:x}", host_name(), ::getpid())).front();
  const std::string probe = probe_in(directory, nonce);
  UniqueFd made;
  // Where it cannot be made, that is said when checkpoints are written.
  if (group.rank() == 0) {
    std::error_code ignored;
    fs::create_directories(directory, ignored);
    made.reset(::open(probe.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  }
  group.all_gather_numbers(0);
  const bool same = group.rank() == mirror.rank && ::access(probe_in(mirror.directory, nonce).c_str(), F_OK) == 0;
  const auto anyone = group.all_gather_numbers(same ? 1 : 0);
  if (made) ::unlink(probe.c_str());
  if (std::ranges::max(anyone) == 0) return;
  comm::run_collectively(group, [&] {
    throw UsageError(fmt::format("--checkpoint-mirror {} is the directory of --checkpoint-dir {}, which both hosts see",
                                 spec, directory),
                     "give a directory on the other host's own disk");
  });
}

}  // namespace

std::optional<Mirror> place_mirror(const TrainConfig& config, comm::ProcessGroup& group) {
  // All ranks take rank 0's word: that theirs is the same is compared later.
  const auto hosts = group.all_gather_text(host_name() + "\n" + config.checkpoint_mirror);
  std::vector<std::string> names;
  for (const std::string& host : hosts) names.push_back(host.substr(0, host.find('\n')));
  const std::string spec = hosts.front().substr(names.front().size() + 1);
  if (spec.empty()) return std::nullopt;

  Mirror mirror;
  for (std::size_t rank = 0; rank < names.size(); ++rank)
    if (std::ranges::find(names, names[rank]) - names.begin() == static_cast<std::ptrdiff_t>(rank))
      mirror.on_a_host.push_back(static_cast<int>(rank));
  const auto refuse_or_warn = [&](const std::string& what, const std::string& remedy) {
    // A job that is started again may be on fewer hosts than the user had in mind.
    if (launcher_attempt() == 0) throw UsageError(what, remedy);
    if (group.rank() == 0) log_warn("{}; this attempt continues as it can", what);
  };
  comm::run_collectively(group, [&] {
    const Wish wish = parse(spec);
    mirror.directory = wish.directory;
    const auto host_of = [&](int rank) { return names[static_cast<std::size_t>(rank)]; };
    auto at = std::ranges::find_if(
        mirror.on_a_host, [&](int rank) { return wish.host.empty() ? rank != 0 : host_of(rank) == wish.host; });
    if (at == mirror.on_a_host.end() && !wish.host.empty()) {
      std::vector<std::string> there;
      for (const int rank : mirror.on_a_host) there.push_back(host_of(rank));
      refuse_or_warn(fmt::format("--checkpoint-mirror {}: no rank runs on host {}", spec, wish.host),
                     fmt::format("name one of {}, or give the directory alone", join(there, ", ")));
      at = std::ranges::find_if(mirror.on_a_host, [](int rank) { return rank != 0; });
    }
    mirror.rank = at == mirror.on_a_host.end() ? 0 : *at;
  });
  // What rank 0 sees of its disks is everyone's decision.
  const bool apart = group.rank() != 0 || mirror.rank != 0 ||
                     file_system_of(config.checkpoint_dir) != file_system_of(mirror.directory);
  if (group.all_gather_numbers(apart ? 1 : 0).front() == 0) {
    comm::run_collectively(group, [&] {
      refuse_or_warn(fmt::format("--checkpoint-mirror {} is on rank 0's host, and on the same file system there as "
                                 "--checkpoint-dir {}: both would be lost together",
                                 spec, config.checkpoint_dir),
                     "give a directory on another disk, or run on another host too");
    });
    mirror.rank = -1;
  }
  if (mirror.rank > 0) check_apart(group, spec, config.checkpoint_dir, mirror);
  return mirror;
}

std::vector<std::string> checkpoint_directories(const TrainConfig& config, const std::optional<Mirror>& mirror,
                                                int rank) {
  std::vector<std::string> all;
  if (!config.checkpoint_dir.empty() && rank == 0) all.push_back(config.checkpoint_dir);
  if (mirror && rank == mirror->rank) all.push_back(mirror->directory);
  return all;
}

}  // namespace lockstep::trainer
