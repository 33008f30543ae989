#include "launcher/host_needs.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

#include "base/error.h"
#include "base/network.h"

namespace lockstep::launcher {

void check_proc() {
  if (::access("/proc/self/exe", F_OK) == 0) return;
  throw DeviceError(
      fmt::format("launch: there is no /proc/self/exe ({}), and ranks are found through /proc", errno_text(errno)),
      "mount it: mount -t proc proc /proc");
}

void check_open_files(int ranks, bool over_mpirun) {
  // Measured: with less, the launcher, a rank or mpirun fails, or mpirun hangs.
  const auto needed = static_cast<rlim_t>(over_mpirun ? 32 + 4 * ranks : std::max(20, 16 + 2 * ranks));
  struct rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return;
  const rlim_t allowed = limit.rlim_max;
  limit.rlim_cur = std::min(needed, allowed);
  if (allowed >= needed && ::setrlimit(RLIMIT_NOFILE, &limit) == 0) return;
  throw DeviceError(
      fmt::format("launch: {} rank{}{} need{} {} open files, and the hard limit (ulimit -Hn) is {}", ranks,
                  ranks == 1 ? "" : "s", over_mpirun ? " of mpirun" : "", ranks == 1 ? "s" : "", needed, allowed),
      "start fewer ranks, or have the limit raised: limits.conf, a service's LimitNOFILE, docker run "
      "--ulimit nofile");
}

void check_mpiruns_loopback() {
  const auto problem = loopback_problem("127.0.0.1");
  if (!problem) return;
  throw DeviceError(
      "launch: mpirun's processes find each other at 127.0.0.1, which is not there: " + *problem,
      loopback_problem("::1") ? "bring it up: ip link set lo up" : "add it: ip addr add 127.0.0.1/8 dev lo");
}

bool is_too_long_for_open_mpi(std::string_view host) { return host.size() > 56; }

}  // namespace lockstep::launcher
