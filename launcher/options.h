// What `lockstep launch` was asked for.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "launcher/hosts/host_list.h"

namespace lockstep::launcher {

/// How a rank wants its threads placed. The launcher leaves every process unbound and exports the wish as
/// LOCKSTEP_BIND (core, socket or none): a lockstep rank binds itself to its share of the cores, which needs the
/// local rank and the topology. Other programs run unbound, because mpirun's own binding would give a rank one core.
enum class BindTo { kCore, kSocket, kNone };

inline constexpr int kMaxRanks = 4096;
inline constexpr int kMaxRestarts = 1'000'000;
inline constexpr double kMaxGraceSeconds = 3600;
// A link that drops for 2 s is to be survived: what is lost then comes up to 4 s later, by TCP's growing pauses.
inline constexpr double kLeastHostSeconds = 6;
inline constexpr double kMaxHostSeconds = 3600;
inline constexpr double kHostReturnSeconds = 600;  // where nothing is said
inline constexpr double kMaxHostReturnSeconds = 30 * 24 * 3600;

/// Where no number of ranks is given: of what there is to be one for each.
enum class RanksFor { kAny, kGpus, kCores };

struct LaunchOptions {
  int ranks = 0;  // 0: one rank for each core that this process may use, or all slots of the hosts
  RanksFor ranks_for = RanksFor::kAny;
  BindTo bind_to = BindTo::kCore;
  std::string log_dir;                  // DIR/rank-R.log holds what rank R wrote, byte for byte; empty: no log files
  std::optional<double> grace_seconds;  // from "please end" (SIGTERM) to SIGKILL; nothing: see RankStatus::grace()
  bool no_prefix = false;               // lines without "[rank] "
  std::vector<std::string> program;     // program and arguments
  int max_restarts = 0;                 // how often a job that failed is started again
  bool in_place = false;                // ranks may outlive the failure of others (Note [Survivors])
  std::optional<int> min_ranks;         // with how few ranks, after failures in a row; nothing: always as many
  bool mpi = false;  // mpirun starts the ranks, also where they are this very binary on this host and need none

  std::vector<HostSpec> hosts;                // to run on; empty: this host alone
  double host_seconds = 10.0;                 // without a word from a host after which it is taken for lost
  std::optional<double> host_return_seconds;  // for which a job waits that is to be restarted and has too few hosts
  std::string checkpoint_dir;        // of a program that is restarted and keeps checkpoints there, if that is known
  std::vector<std::string> exports;  // NAME or NAME=VALUE: variables that go along to other hosts
  bool use_gpus = false;             // a slot is a GPU, where a host has some, and else a core
  std::function<int()>
      count_own_gpus;  // how many ranks this host's take, asked only where hosts are named; may be empty
};

}  // namespace lockstep::launcher
