// Keeps mpirun's ports to this host.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/scope.h"
#include "lockstep/base/env.h"

namespace lockstep::launcher {

/// A library in memory. A program that loads it listens at loopback instead of at all addresses
/// (launcher/loopback/bind_loopback.c). Keep it until that program runs.
class LoopbackPreload {
 public:
  /// Where the system has no such memory there is none, and `environment()` is empty.
  LoopbackPreload();
  /// What a child needs to load it. The library takes this out of the child's own environment again.
  std::vector<std::pair<std::string, std::string>> environment(const EnvLookup& lookup) const;

 private:
  UniqueFd file_;  // stays open in children
};

}  // namespace lockstep::launcher
