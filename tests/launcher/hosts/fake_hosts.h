// Hosts all of which are this machine: a script in the place of ssh runs what it is given here, with an environment of
// its own.
#pragma once

#include <sys/types.h>

#include <string>

#include "lockstep/base/deadline.h"
#include "tests/launcher/job.h"

namespace lockstep::launcher {

/// A job whose hosts have any name; what a name stands for is in its first part: "refused-1" refuses. A rank finds the
/// name of its host in FAKE_HOST, which the launcher's own does not have.
TestJobSetup fake_hosts();

/// Until this many ranks have written "ready".
bool all_ready(const Job& job, int ranks);

/// The process of the job with this name on a host; -1 if there is none.
pid_t named(const Job& job, const std::string& name, const std::string& host);

/// The launcher's helper on a host, which has the program's name; its wrappers have too.
pid_t helper_on(const Job& job, const std::string& host);

/// Ends the helper on a host, and with it all of the job there; with `stays_down` the host does not answer until it may
/// return.
void kill_host(const Job& job, const std::string& host, bool stays_down);
void let_return(const Job& job, const std::string& host);

// The whole job on one machine, and on busy ones: longer than what one host is promised.
inline Deadline within_eight() { return Deadline::after_seconds(8); }

}  // namespace lockstep::launcher
