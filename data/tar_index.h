// Where the members of tar files lie.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "base/file.h"

namespace lockstep::data {

/// A regular file in an archive. `name` is valid during the call alone.
struct TarMember {
  std::string_view name;
  std::uint64_t offset = 0, bytes = 0;  // of its content in the archive
};

/// Calls `take` for each regular file of the archive, in its order, without reading what they hold: ustar, with the
/// long names and sizes of GNU tar and of POSIX pax headers. Folders, links and devices are passed over. Throws IoError
/// naming the archive: for one that is compressed, cut, sparse or corrupt (checksums of headers are compared). What
/// `take` throws comes out.
void read_tar(const RandomAccessFile& archive, const std::function<void(const TarMember&)>& take);

}  // namespace lockstep::data
