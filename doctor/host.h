// What is asked of a host before a job: one row for each thing that has made jobs fail or slow, with its remedy.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/network.h"
#include "devices/cpus.h"
#include "devices/machine.h"
#include "lockstep/base/env.h"

namespace lockstep::doctor {

enum class Severity : std::uint8_t {
  kOk,
  kNote,     // it cannot be known here, or does not matter for one host
  kWarning,  // jobs run, slower or not always
  kFailure   // jobs do not run
};
const char* name_of(Severity severity);
/// kOk of what is no name.
Severity severity_of(const std::string& name);

struct Finding {
  std::string check;  // the row's name: "open-files"
  Severity severity = Severity::kOk;
  std::string what;
  std::string remedy = {};
  void members(auto& io) {
    std::string name = name_of(severity);
    io("check", check, "severity", name, "what", what, "remedy", remedy);
    severity = severity_of(name);
  }
  friend bool operator==(const Finding&, const Finding&) = default;
};

/// Of a directory's file system.
struct Space {
  std::uint64_t total_bytes = 0, free_bytes = 0;
  std::uint64_t free_files = 0;
  bool writable = true;
  std::string type = {};  // "nfs", where it is one of those that matter
};

/// How fast a directory's file system takes a file.
struct DiskSpeed {
  double write_bytes_per_s = 0;
  double fsync_ms = 0;  // of a small file, the median
};

/// Where the checks look: this host, or what stands in for it in tests.
struct View {
  std::string root;  // stands for "/" before /proc, /sys and /dev; empty: itself
  EnvLookup env = lockstep::env;
  std::string host_name;
  std::string directory = ".";  // where checkpoints and data are
  bool several_hosts = false;
  devices::CpuMask allowed;  // processors
  devices::Gpus gpus = {};
  bool has_cuda = false;  // this build
  std::vector<NetworkInterface> interfaces = {};
  std::function<std::optional<std::uint64_t>(int resource)> limit = {};  // RLIMIT_*, the hard one; nothing: none
  std::function<std::optional<Space>(const std::string& path)> space = {};
  std::function<std::optional<DiskSpeed>(const std::string& directory)> measure_disk = {};
  std::function<Resolved(const std::string& name)> resolve = {};
  std::optional<bool> clock_synchronised = {};

  static View of_this_host(std::string directory, bool several_hosts, bool has_cuda);
};

/// All rows, in their order; each has at least one finding.
std::vector<Finding> check_host(const View& view);
/// Their names and what each asks, for the help and the documentation.
std::vector<std::pair<std::string, std::string>> host_checks();

}  // namespace lockstep::doctor
