// `lockstep _rsh HOST COMMAND…`: what mpirun starts in the place of ssh.
#pragma once

#include <string>
#include <vector>

namespace lockstep::launcher {

/// Has the launcher run the shell command that `arguments` make, after a host and possibly flags before it, on that
/// host, and returns its exit code when it has ended; what it writes comes to stderr. See Note [Helpers on other
/// hosts]. Throws UsageError outside of a `lockstep launch` job, DeviceError when the launcher cannot be reached.
int remote_start(const std::vector<std::string>& arguments);

}  // namespace lockstep::launcher
