// The registry of backends. A backend is a directory here, which declares a `BackendFamily`, and a line in
// backends.cpp. Nobody else knows one by its name.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/shm/peers.h"
#include "comm/store.h"
#include "lockstep/base/device.h"
#include "lockstep/comm/device_group.h"
#include "lockstep/comm/make_group.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/comm/world.h"

namespace lockstep::comm {

struct MpiRanks;
struct Subgroup;

/// Ranks that a store has introduced to each other. A group that is made of them takes `store` and `peers`; where it
/// cannot be made, both are left as they were, of use for another backend.
struct JoinedRanks {
  const World& world;
  const GroupOptions& options;
  std::unique_ptr<Store>& store;
  Peers& peers;
  const Subgroup* subgroup = nullptr;  // they are a part of a group, which is being split

  Clock::duration timeout() const { return duration_of(options.timeout_seconds); }
};

/// Why ranks cannot use a backend.
struct UnsupportedReason {
  std::string what;
  std::string remedy;
};

struct BackendFamily {
  std::string name;   // as --backend has it, and ProcessGroup::name()
  std::string title;  // in messages
  std::string about;  // in help: what carries the collectives
  /// Where its arenas are. Those of the host's memory join the processes; those of GPUs are made beside one of these.
  DeviceKind memory = DeviceKind::kCpu;
  bool encrypts = false;  // what ranks of different hosts say to each other (Note [Encryption])
  bool (*is_built)() = [] { return true; };
  /// Of the library that it needs, or why there is none; nullptr where it needs none.
  std::string (*library_version)() = nullptr;

  // Of the host's memory.
  /// `peers` are nullptr before the ranks have joined; then it says what is known already.
  std::optional<UnsupportedReason> (*unsupported)(const World& world, const GroupOptions& options,
                                                  const Peers* peers) = nullptr;
  /// Collective, blocking. DeviceError where this backend cannot carry the data between these ranks (PeerError with its
  /// code on the others).
  std::unique_ptr<ProcessGroup> (*make)(JoinedRanks ranks) = nullptr;
  /// Joins the ranks itself, without a store; nullptr where it does not. `over`: make_group_over().
  std::unique_ptr<ProcessGroup> (*start)(const World& world, const GroupOptions& options,
                                         const MpiRanks* over) = nullptr;

  // Of GPUs.
  std::unique_ptr<DeviceGroup> (*make_on_device)(ProcessGroup& control, const DeviceGroupOptions& options) = nullptr;
};

/// Of each kind of memory the fastest first: without a choice, ranks take the first that they can use.
const std::vector<const BackendFamily*>& backend_families();
/// nullptr for kAutoBackend; throws UsageError for any other name that is none, with the nearest right one.
const BackendFamily* backend_family(const std::string& name);
/// The one that GPUs use: the named one, or the first.
const BackendFamily& device_backend(const std::string& name = kAutoBackend);

}  // namespace lockstep::comm
