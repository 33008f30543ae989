#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <string>
#include <vector>

#include "base/crash.h"
#include "base/error.h"
#include "base/time_sharing.h"
#include "cli/commands.h"
#include "lockstep/base/run_main.h"

namespace {

/// A descriptor that this process was started without would go to the next file it opens, and what is printed would
/// land in there. Writing to what takes its place fails.
void occupy_standard_descriptors() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

int run(const std::vector<std::string>& args) {
  const int code = lockstep::cli::run(args);
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    throw lockstep::IoError("cannot write to standard output: " + lockstep::errno_text(errno), "is the disk full?");
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  // A file that grows beyond its limit is an error of the write, not the end of the process.
  std::signal(SIGXFSZ, SIG_IGN);
  occupy_standard_descriptors();
  if (argc > 1 && lockstep::cli::computes(argv[1])) lockstep::share_processors_well(argv);
  if (argc > 1 && lockstep::cli::computes(argv[1])) lockstep::install_crash_handlers();
  return lockstep::run_main([&] { return run({argv + std::min(argc, 1), argv + argc}); });
}
