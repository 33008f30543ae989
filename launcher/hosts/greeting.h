// The first message of the launcher's helper on another host: one line of text, so that different versions can at least
// report the difference.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/hosts/networks.h"

namespace lockstep::launcher {

/// What a host says of itself and of the lockstep that answers there.
struct Greeting {
  std::string version;   // "0.1.0"
  std::string revision;  // of git
  std::string sha256;    // of the binary
  int cores = 1;         // that a process may use there
  int gpus = 0;          // one rank each, as `-n auto` counts them; 0 where there are none
  std::string host;      // what it calls itself
  std::vector<Interface> interfaces;
  std::string reached_at;    // the address at which the connection came in, if ssh says so
  std::string reached_from;  // and the other end's
};

/// This host's. `gpus` as above. Throws IoError when the binary cannot be read.
Greeting own_greeting(int gpus);

/// "lockstep-host 1 version=… …" without a line's end, and back. Nothing for a line that is no greeting; fields that
/// are not there keep their defaults.
std::string to_line(const Greeting& greeting);
std::optional<Greeting> parse_greeting(std::string_view line);

/// Where two builds differ: "it has lockstep 0.1.0 (git a, binary 1f2e…), this host lockstep 0.2.0 (git b, binary
/// 3d…)"; empty if they are the same.
std::string difference(const Greeting& theirs, const Greeting& ours);

}  // namespace lockstep::launcher
