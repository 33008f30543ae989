// Directories of a job on a host that was lost. Where hosts share the file system they are in, somebody else must
// remove them: the host itself cannot.
#pragma once

#include <string>

namespace lockstep::launcher {

/// Marks `directory` as one of the job with this token. Throws DeviceError.
void write_token(const std::string& directory, const std::string& token);

/// Removes `directory`, as another host has called it, if it is here too and is marked with the token.
void remove_stale_dirs(const std::string& directory, const std::string& token);

}  // namespace lockstep::launcher
