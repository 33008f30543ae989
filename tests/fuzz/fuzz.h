// What the fuzz targets share. Each parser has one file NAME_fuzz.cpp, which defines libFuzzer's entry: scripts/fuzz
// compiles it with clang and runs it for minutes, ctest (tests/fuzz/driver.cpp) runs its corpus and some mutations of
// it.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace lockstep::fuzz {

inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// The path of a file in memory that holds the input; the same file every time.
inline std::string file_of(const std::uint8_t* data, std::size_t size) {
  static const int kFd = ::memfd_create("lockstep-fuzz", MFD_CLOEXEC);
  if (kFd < 0 || ::ftruncate(kFd, 0) != 0 || ::pwrite(kFd, data, size, 0) != static_cast<ssize_t>(size)) std::abort();
  return "/proc/self/fd/" + std::to_string(kFd);
}

/// Input that is refused as a user's error or as bad data is as good as any; all else that is thrown ends the program.
template <class Parse>
int parse(const Parse& parse_input) {
  try {
    parse_input();
  } catch (const IoError&) {
  } catch (const UsageError&) {
  }
  return 0;
}

}  // namespace lockstep::fuzz
