// Which hosts a job may use, as users write them, and how its ranks are spread over them. Pure but for read_hostfile().
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launcher {

struct HostSpec {
  std::string name;  // what it is called in messages
  std::string user;  // to log in as; empty: whatever the remote agent takes
  int slots = 0;     // ranks that it takes; 0: nobody said

  /// What the remote agent is asked for: "name" or "user@name".
  std::string target() const { return user.empty() ? name : user + "@" + name; }
  /// The name for mpirun: `name`, or where that has characters that mpirun refuses ('_', ':'), one like it.
  std::string mpirun_name() const;
  friend bool operator==(const HostSpec&, const HostSpec&) = default;
};

/// "a:4,b:4" as --hosts takes it; "a" alone says nothing about slots; an IPv6 address stands in brackets. A host that
/// is named again adds up. Throws UsageError.
std::vector<HostSpec> parse_hosts(std::string_view list);

/// The text of a host file: one host per line, `a slots=4 [max_slots=8] [user=u]` (Open MPI's), `a:4` (MPICH's) or `a`
/// alone; everything after '#' is a comment. A host that is named again adds up, and counts 1 per line where no line of
/// it has a number (PBS's node files). Throws UsageError naming `path` and line.
std::vector<HostSpec> parse_hostfile(std::string_view text, const std::string& path);

/// Throws UsageError when the file cannot be read.
std::vector<HostSpec> read_hostfile(const std::string& path);

/// How many of `ranks` each host takes, filled in the order of the list; 0 ranks: all slots. All slots are known.
/// Throws UsageError naming the slots where there are too few.
std::vector<int> place_ranks(std::span<const HostSpec> hosts, int ranks);

/// "a:4, b:2", cut after a few.
std::string text_of(std::span<const HostSpec> hosts);

}  // namespace lockstep::launcher
