// What `lockstep launch` was asked for.
#pragma once

#include <string>
#include <vector>

namespace lockstep::launcher {

/// How a rank wants its threads placed. The launcher leaves every process unbound and exports the wish as
/// LOCKSTEP_BIND (core, socket or none): a lockstep rank binds itself to its share of the cores, which needs the
/// local rank and the topology. Other programs run unbound, because mpirun's own binding would give a rank one core.
enum class BindTo { kCore, kSocket, kNone };

inline constexpr int kMaxRanks = 4096;
inline constexpr double kMaxGraceSeconds = 3600;

struct LaunchOptions {
  int ranks = 0;  // 0: one rank for each core that this process may use
  BindTo bind_to = BindTo::kCore;
  std::string log_dir;               // DIR/rank-R.log holds what rank R wrote, byte for byte; empty: no log files
  double grace_seconds = 1.0;        // from "please end" (SIGTERM) to SIGKILL
  bool no_prefix = false;            // lines without "[rank] "
  std::vector<std::string> program;  // program and arguments
};

}  // namespace lockstep::launcher
