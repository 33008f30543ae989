// A file that a command has written: its size, and the time that took.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/base/deadline.h"

namespace lockstep::session {

struct SavedFile {
  std::string path;
  std::uint64_t bytes = 0;
  double seconds = 0;  // that writing took, its way to the disk included
};

/// Of a file that has just been written, which was begun then.
SavedFile saved_file(const std::string& path, Clock::time_point begun);

/// "saved w.safetensors: 1.2 MB in 0.03 s".
std::string describe(const SavedFile& file);

}  // namespace lockstep::session
