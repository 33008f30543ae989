// Each process on its share of its host's cores.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "devices/cpus.h"
#include "lockstep/base/env.h"

namespace lockstep::devices {

/// What a process got.
struct Binding {
  int cores = 1;                // for its threads; at least one, which others may use too
  bool spare_core = false;      // more than one: one can be left to the group's progress thread
  bool oversubscribed = false;  // fewer cores than processes: each has a core, none has its own
  std::string text;             // "2 cores (processors 0-1), bound", for logs
};

/// A core: its processors (hardware threads) that may be used, and its socket. Lists of cores go socket by socket.
struct Core {
  CpuMask cpus;
  int socket = 0;
};

/// The cores that process `index` of `count` takes from `cores` (at least one): as equal parts as there are, each one
/// contiguous, the first ones larger by one. With fewer cores than processes, each process takes one, in turn.
std::vector<Core> core_share(const std::vector<Core>& cores, int index, int count);

/// The same for whole sockets: the sockets that process `index` of `count` runs on, with all their cores.
std::vector<Core> socket_share(const std::vector<Core>& cores, int index, int count);

/// core_share for processes whose devices may be closer to some of the cores. near[i] are the processors close to the
/// device of process i; none: it has no device, or one that is as far from all. Processes close to the same cores
/// divide those; one that is close to none of `cores` takes its share of all of them.
std::vector<Core> near_share(const std::vector<Core>& cores, std::span<const CpuMask> near, int index);

/// The cores of this host with a processor in `allowed`, as hwloc sees them.
std::vector<Core> discover_cores(const CpuMask& allowed);

/// What a process has to say to those with which it may share a host's cores; `device` is as below.
std::string binding_claim(const EnvLookup& lookup, const Locality& device);

/// Binds the calling thread, and the threads that it will start, to this process's share. `claims` are the
/// binding_claim()s of all processes, number `index` this one's. Those of one host with the same affinity divide it
/// among themselves; an affinity that a launcher has given to this process alone is kept. Where this process's device
/// is close to some of the processors (`device`), the share is of those (near_share), and memory is taken from there as
/// long as there is any. LOCKSTEP_BIND in the environment: "core" (default), "socket", which takes all cores of the
/// socket, or close to the device, and "none", which binds nothing and only counts the cores of the share. Both
/// functions throw UsageError for another value.
Binding bind_to_share(std::span<const std::string> claims, int index, const EnvLookup& lookup, const Locality& device);

/// A lower bound of what bind_to_share will give one of so many processes of this host.
int expected_cores(int processes);

}  // namespace lockstep::devices
