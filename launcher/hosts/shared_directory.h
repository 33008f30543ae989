// Whether the hosts of a job see one and the same directory.
#pragma once

#include <string>
#include <vector>

#include "launcher/hosts/gather.h"
#include "launcher/hosts/protocol.h"

namespace lockstep::launcher {

/// Carries out `request` on this host, in `directory` where its path is relative. Whether that succeeded, or the file
/// exists.
bool handle_file_request(const FileRequest& request, const std::string& directory);

/// The names of the hosts of `gathered` that do not see the first host's directory at `path`. The first host makes the
/// directory, and during this call a file in it; the others look for the file. None if the first host cannot write
/// there, because the program will report that. Hosts that do not answer within a few seconds are left out.
std::vector<std::string> hosts_that_do_not_see(const std::string& path, RemoteHosts& hosts,
                                               const GatheredHosts& gathered, SignalQueue& signals);

}  // namespace lockstep::launcher
