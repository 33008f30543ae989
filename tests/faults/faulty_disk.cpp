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
  const auto has = [&](const char* text) { return path.find(text) != std::string::npos; };
  // A checkpoint's weights come first of its files; they are under the name that it is written under. Other ranks than
  // the first write their part alone, and a receipt of it.
  const bool part = has("/optimizer-0") && !has("/optimizer-00000-") && !has(".sha256");
  if (has("/.step-") && (has("weights.safetensors") || part))
    fails = lockstep::faults::reach(Place::kCheckpoint);
  else if (has("saved.safetensors"))
    fails = lockstep::faults::reach(Place::kSave);
  if (!fails) return static_cast<int>(::syscall(SYS_fsync, fd));
  errno = EIO;
  return -1;
}
