// Ranks on several hosts that are one machine: processes that a test forks, so that it can end them as it likes.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/comm/make_group.h"
#include "lockstep/comm/world.h"
#include "tests/support/free_port.h"

namespace lockstep::testing {

struct Setting {
  std::string hosts = {};  // one letter per rank: its host
  int doomed = -1;         // must die by SIGKILL
  double timeout_seconds = 20;
  unsigned alarm_seconds = 40;  // a rank that takes longer is ended
};

/// Runs `body` on forked ranks. A rank is well when `body` returns true. Nobody is waited for before the others have
/// ended: the dead are zombies until then.
inline void on_processes(const Setting& setting, const std::function<bool(comm::World)>& body) {
  const auto size = static_cast<int>(setting.hosts.size());
  comm::World world{.size = size, .local_size = size, .starter = comm::Starter::kTorchrun};
  world.rendezvous.port = free_port();
  std::vector<pid_t> pids;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t pid = ::fork();
    ASSERT_GE(pid, 0);
    if (pid > 0) {
      pids.push_back(pid);
      continue;
    }
    ::alarm(setting.alarm_seconds);
    bool well = false;
    try {
      set_env("LOCKSTEP_HOST_NAME", setting.hosts.substr(static_cast<std::size_t>(rank), 1));
      world.rank = world.local_rank = rank;
      well = body(world);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    }
    ::_exit(well ? 0 : 1);
  }
  for (int pass = 0; pass < 2; ++pass)
    for (int rank = 0; rank < size; ++rank) {
      if ((rank == setting.doomed) != (pass == 1)) continue;
      int status = 0;
      ASSERT_EQ(::waitpid(pids[static_cast<std::size_t>(rank)], &status, 0), pids[static_cast<std::size_t>(rank)]);
      if (rank == setting.doomed)
        EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "rank " << rank;
      else
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank;
    }
}

using GroupBody = std::function<bool(comm::ProcessGroup&)>;

/// Runs `body` on a group of forked ranks.
inline void on_group(const Setting& setting, const GroupBody& body,
                     comm::GroupOptions::Progress progress = comm::GroupOptions::Progress::kAuto) {
  on_processes(setting, [&](const comm::World& world) {
    const auto group = comm::make_group(world, {.timeout_seconds = setting.timeout_seconds, .progress = progress});
    return body(*group);
  });
}

/// On each of `all_hosts`.
inline void on_hosts(const std::vector<std::string>& all_hosts, Setting setting, const GroupBody& body,
                     comm::GroupOptions::Progress progress = comm::GroupOptions::Progress::kAuto) {
  for (const std::string& hosts : all_hosts) {
    SCOPED_TRACE(hosts);
    setting.hosts = hosts;
    on_group(setting, body, progress);
  }
}

/// As if it had crashed: of a rank that is doomed.
[[noreturn]] inline void die() {
  ::raise(SIGKILL);
  ::_exit(9);
}

/// Whether `action` throws an E whose text has all of `parts`; says what is wrong if not.
template <class E, class Action>
bool throws(Action&& action, const std::vector<std::string>& parts, const std::string& without = "") {
  try {
    action();
  } catch (const E& error) {
    for (const std::string& part : parts)
      if (std::string(error.what()).find(part) == std::string::npos) {
        std::fprintf(stderr, "'%s' is not in: %s\n", part.c_str(), error.what());
        return false;
      }
    if (!without.empty() && std::string(error.what()).find(without) != std::string::npos) {
      std::fprintf(stderr, "'%s' is in: %s\n", without.c_str(), error.what());
      return false;
    }
    return true;
  }
  std::fprintf(stderr, "nothing was thrown\n");
  return false;
}

}  // namespace lockstep::testing
