#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "base/crash.h"
#include "base/error.h"
#include "base/signals.h"
#include "cli/commands.h"
#include "lockstep/base/run_main.h"

namespace {

/// A descriptor that this process was started without would go to the next file it opens, and what is printed would
/// land in there. Writing to what takes its place fails.
void occupy_standard_descriptors() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

/// Libraries' kernels, and MPI's daemons, do not ask how much stack they have.
void check_stack() {
  constexpr rlim_t kLeast = 256 * 1024;
  struct rlimit limit = {};
  if (::getrlimit(RLIMIT_STACK, &limit) == 0 && limit.rlim_cur < kLeast)
    throw lockstep::DeviceError(
        fmt::format("the stack may have {} KB (ulimit -s), and {} are needed", limit.rlim_cur / 1024, kLeast / 1024),
        "ulimit -s 8192");
}

int run(const std::vector<std::string>& args) {
  check_stack();
  const int code = lockstep::cli::run(args);
  const bool flushed = std::fflush(stdout) == 0;
  if (!flushed || std::ferror(stdout) != 0)
    throw lockstep::IoError("cannot write to standard output" + (flushed ? "" : ": " + lockstep::errno_text(errno)),
                            "is the disk full, or standard output closed?");
  return code;
}

struct Start {
  void* (*routine)(void*);
  void* argument;
};

void* run_with_signal_stack(void* given) {
  const Start start = *std::unique_ptr<Start>(static_cast<Start*>(given));
  lockstep::use_alternate_signal_stack();
  return start.routine(start.argument);
}

}  // namespace

// Replaces the C library's pthread_create(), of which OpenMP's, MPI's and all other threads of the program are made, by
// one that gives each thread an alternate signal stack first (Note [Signals] in base/signals.h).
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*routine)(void*),
                              void* argument) noexcept {
  static const auto next = reinterpret_cast<decltype(&::pthread_create)>(::dlsym(RTLD_NEXT, "pthread_create"));
  std::unique_ptr<Start> start(new (std::nothrow) Start{routine, argument});
  if (start == nullptr) return EAGAIN;
  const int code = next(thread, attributes, run_with_signal_stack, start.get());
  if (code == 0) static_cast<void>(start.release());
  return code;
}

int main(int argc, char** argv) {
  // A file that grows beyond its limit is an error of the write, not the end of the process.
  std::signal(SIGXFSZ, SIG_IGN);
  occupy_standard_descriptors();
  if (argc > 1 && lockstep::cli::computes(argv[1])) lockstep::share_processors_well(argv);
  lockstep::install_crash_handlers();
  return lockstep::run_main([&] { return run({argv + std::min(argc, 1), argv + argc}); });
}
