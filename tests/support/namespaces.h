// Hosts that are network namespaces, for tests of what networks do. Only root may make them.
#pragma once

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "base/error.h"
#include "base/scope.h"

namespace lockstep::testing {

inline bool run_quietly(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()) == 0; }

/// Up to eight hosts, and one namespace more in which the other ends of their cables are: v0, v1, …
class Namespaces {
 public:
  explicit Namespaces(int hosts) : hosts_(hosts), why_not_(make()) {}
  ~Namespaces() {
    for (int host = 0; host <= hosts_; ++host) run_quietly("ip netns del " + name(host));
  }
  Namespaces(const Namespaces&) = delete;

  /// Why there are none; empty where there are.
  const std::string& why_not() const { return why_not_; }
  std::string address(int host) const { return fmt::format("10.80.7.{}", host + 1); }
  std::string name(int host) const { return fmt::format("lsnet{}{}", maker_, host == hosts_ ? 's' : 'a' + host); }
  std::string switch_name() const { return name(hosts_); }
  /// Plugs all cables into one switch. False where there is none to be had.
  bool join() const {
    std::string plug = fmt::format("ip -n {0} link add br0 type bridge && ip -n {0} link set br0 up", switch_name());
    for (int host = 0; host < hosts_; ++host)
      plug += fmt::format(" && ip -n {} link set v{} master br0", switch_name(), host);
    return run_quietly(plug);
  }
  /// Acts like a power failure, as far as a kernel that still runs can.
  void kill_all_on(int host) const { run_quietly(fmt::format("ip netns pids {} | xargs -r kill -9", name(host))); }
  /// This process, whose only thread calls it.
  void enter(const std::string& name) const {
    const UniqueFd name_space(::open(("/run/netns/" + name).c_str(), O_RDONLY | O_CLOEXEC));
    LOCKSTEP_ASSERT(::setns(name_space.get(), CLONE_NEWNET) == 0);
  }

 private:
  std::string make() const {
    if (::geteuid() != 0 || !run_quietly("command -v ip") || !run_quietly("ip netns add " + switch_name()))
      return "this process may not make network namespaces";
    for (int host = 0; host < hosts_; ++host)
      if (!run_quietly(fmt::format(
              "ip netns add {0} && ip link add eth0 netns {0} type veth peer name v{1} netns {2} && "
              "ip -n {2} link set v{1} up && ip -n {0} addr add {3}/24 dev eth0 && ip -n {0} link set lo up && "
              "ip -n {0} link set eth0 up",
              name(host), host, switch_name(), address(host))))
        return "network namespaces cannot be joined here";
    return {};
  }

  const int hosts_;
  const int maker_ = ::getpid();
  const std::string why_not_;
};

}  // namespace lockstep::testing
