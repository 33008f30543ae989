#include "launcher/loopback/preload.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include "launcher/mpirun_command.h"

extern "C" {
extern const char lockstep_bind_loopback[];
extern const char lockstep_bind_loopback_end[];
}

namespace lockstep::launcher {

LoopbackPreload::LoopbackPreload() : file_(::memfd_create("lockstep-bind-loopback", 0)) {
  for (const char* at = lockstep_bind_loopback; file_ && at < lockstep_bind_loopback_end;) {
    const ssize_t written = ::write(file_.get(), at, static_cast<std::size_t>(lockstep_bind_loopback_end - at));
    if (written <= 0)
      file_.reset();
    else
      at += written;
  }
}

std::vector<std::pair<std::string, std::string>> LoopbackPreload::environment(const EnvLookup& lookup) const {
  if (!file_) return {};
  const std::string users = lookup("LD_PRELOAD").value_or("");
  return {{"LD_PRELOAD", fmt::format("/proc/self/fd/{}{}{}", file_.get(), users.empty() ? "" : ":", users)},
          {kPreloadVariable, users}};
}

}  // namespace lockstep::launcher
