// This host, as the checks see it.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <vector>

#include "base/error.h"
#include "base/scope.h"
#include "base/statistics.h"
#include "devices/nvml.h"
#include "doctor/host.h"
#include "lockstep/base/deadline.h"

namespace lockstep::doctor {
namespace {

std::optional<std::uint64_t> hard_limit(int resource) {
  rlimit limit{};
  if (::getrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0 || limit.rlim_max == RLIM_INFINITY)
    return std::nullopt;
  return limit.rlim_max;
}

/// Of file systems that other hosts serve (linux/magic.h).
std::string network_type(const std::string& path) {
  struct statfs facts {};
  if (::statfs(path.c_str(), &facts) != 0) return {};
  switch (static_cast<unsigned long>(facts.f_type)) {
    case 0x6969: return "nfs";
    case 0xff534d42: return "cifs";
    case 0xfe534d42: return "smb2";
    case 0x65735546: return "fuse";
    case 0x00c36400: return "ceph";
    case 0x0bd00bd0: return "lustre";
    case 0x01021997: return "9p";
    default: return {};
  }
}

std::optional<Space> space_of(const std::string& path) {
  struct statvfs facts {};
  if (::statvfs(path.c_str(), &facts) != 0) return std::nullopt;
  return Space{.total_bytes = std::uint64_t{facts.f_blocks} * facts.f_frsize,
               .free_bytes = std::uint64_t{facts.f_bavail} * facts.f_frsize,
               // Some file systems count none.
               .free_files = facts.f_files == 0 ? UINT64_MAX : std::uint64_t{facts.f_favail},
               .writable = ::access(path.c_str(), W_OK) == 0 && (facts.f_flag & ST_RDONLY) == 0,
               .type = network_type(path)};
}

/// A file without a name, which the kernel removes; nothing where the file system makes none.
UniqueFd nameless_file(const std::string& directory) {
  return UniqueFd(::open(directory.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600));
}

std::optional<DiskSpeed> speed_of(const std::string& directory) {
  constexpr std::size_t kBlock = std::size_t{1} << 20, kMostBlocks = 64;
  constexpr int kSmallFiles = 5;
  const std::vector<char> block(kBlock, 'x');
  DiskSpeed speed;
  {
    const UniqueFd file = nameless_file(directory);
    if (!file) return std::nullopt;
    const auto begin = Clock::now();
    std::size_t blocks = 0;
    while (blocks < kMostBlocks && seconds_between(begin, Clock::now()) < 1) {
      if (::write(file.get(), block.data(), block.size()) != static_cast<ssize_t>(block.size())) return std::nullopt;
      ++blocks;
    }
    if (::fdatasync(file.get()) != 0) return std::nullopt;
    speed.write_bytes_per_s = static_cast<double>(blocks * kBlock) / seconds_between(begin, Clock::now());
  }
  std::vector<double> times;
  for (int i = 0; i < kSmallFiles; ++i) {
    const UniqueFd file = nameless_file(directory);
    if (!file || ::write(file.get(), block.data(), 4096) != 4096) return std::nullopt;
    const auto begin = Clock::now();
    if (::fsync(file.get()) != 0) return std::nullopt;
    times.push_back(seconds_between(begin, Clock::now()) * 1e3);
  }
  speed.fsync_ms = median(times);
  return speed;
}

std::optional<bool> is_clock_synchronised() {
  timex state{};
  if (::adjtimex(&state) < 0) return std::nullopt;
  return (state.status & STA_UNSYNC) == 0;
}

}  // namespace

View View::of_this_host(std::string directory, bool several_hosts, bool has_cuda) {
  View view;
  view.host_name = lockstep::host_name();
  view.directory = std::move(directory);
  view.several_hosts = several_hosts;
  view.has_cuda = has_cuda;
  view.allowed = devices::allowed_cpus();
  view.gpus = devices::read_gpus(devices::Detail::kAll);
  view.interfaces = list_interfaces();
  view.limit = hard_limit;
  view.space = space_of;
  view.measure_disk = speed_of;
  view.resolve = [](const std::string& name) { return lockstep::resolve(name, 0); };
  view.clock_synchronised = is_clock_synchronised();
  return view;
}

}  // namespace lockstep::doctor
