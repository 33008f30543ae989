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

/// The names of those hosts of `gathered` that do not see the directory which the first of them has at `path`: that one
/// makes it, and a file in it for the moment of this call, which the others look for. None where the first one cannot
/// write there, which is for the program to say, and none of those that do not answer within a few seconds.
std::vector<std::string> hosts_that_do_not_see(const std::string& path, RemoteHosts& hosts,
                                               const GatheredHosts& gathered, SignalQueue& signals);

}  // namespace lockstep::launcher
