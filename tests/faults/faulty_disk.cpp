// fsync() of this program, in the place of the C library's.
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "tests/faults/injection.h"

namespace {

std::string path_of(int fd) {
  char path[4096];
  const ssize_t length = ::readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), path, sizeof path);
  return {path, length > 0 ? static_cast<std::size_t>(length) : 0};
}

}  // namespace

extern "C" int fsync(int fd) {
  using lockstep::faults::Place;
  const std::string path = path_of(fd);
  bool fails = false;
  // A checkpoint's weights come first of its files; they are under the name that it is written under.
  if (path.find("/.step-") != std::string::npos && path.find("weights.safetensors") != std::string::npos)
    fails = lockstep::faults::reach(Place::kCheckpoint);
  else if (path.find("saved.safetensors") != std::string::npos)
    fails = lockstep::faults::reach(Place::kSave);
  if (!fails) return static_cast<int>(::syscall(SYS_fsync, fd));
  errno = EIO;
  return -1;
}
