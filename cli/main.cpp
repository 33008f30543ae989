// The only place where errors end: one line on stderr, and the exit code.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "base/env.h"
#include "base/error.h"
#include "base/log.h"
#include "base/status_report.h"
#include "base/time_sharing.h"
#include "cli/commands.h"

namespace {

using lockstep::ExitCode;

constexpr auto kHeadStart = std::chrono::milliseconds(50);

/// Whatever names, paths and messages of libraries hold, an error is one line.
std::string one_line(std::string text) {
  std::ranges::replace_if(
      text, [](unsigned char c) { return c < ' ' || c == 0x7f; }, ' ');
  return text;
}

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

/// Nothing that was thrown ends this process as if all were well, whatever code it has brought along.
int failure_code(const lockstep::Error& error) {
  return (error.code() & 0xff) != 0 ? error.code() : static_cast<int>(ExitCode::kInternal);
}

/// log_error also takes the progress bar off the terminal first.
int run_and_report(const std::vector<std::string>& args) noexcept {
  try {
    return run(args);
  } catch (const lockstep::PeerError& error) {
    // The rank that says what went wrong ends first: it is the one that whoever watches the ranks shall name.
    std::this_thread::sleep_for(kHeadStart);
    return failure_code(error);
  } catch (const lockstep::InterruptedError& error) {
    // All ranks have been asked to stop: rank 0 says so (the others keep quiet at this level), or the launcher does.
    if (!lockstep::env("LOCKSTEP_LAUNCHER")) lockstep::log_info("{}", one_line(error.line()));
    return failure_code(error);
  } catch (const lockstep::UsageError& error) {
    // All ranks may find the same: the launcher says it once.
    const std::string line = one_line(error.line());
    if (!lockstep::report_usage_error(line)) lockstep::log_error("{}", line);
    return failure_code(error);
  } catch (const lockstep::Error& error) {
    lockstep::log_error("{}", one_line(error.line()));
    return failure_code(error);
  } catch (const std::bad_alloc&) {
    lockstep::log_error("out of memory → use a smaller batch or model, or fewer ranks on this host");
    return static_cast<int>(ExitCode::kDevice);
  } catch (const std::exception& error) {
    lockstep::log_error("unexpected error: {}", one_line(error.what()));
  }
  return static_cast<int>(ExitCode::kInternal);
}

}  // namespace

int main(int argc, char** argv) {
  // A file that grows beyond its limit is an error of the write, not the end of the process.
  std::signal(SIGXFSZ, SIG_IGN);
  occupy_standard_descriptors();
  if (argc > 1 && lockstep::cli::computes(argv[1])) lockstep::share_processors_well(argv);
  const int code = run_and_report({argv + std::min(argc, 1), argv + argc});
  if (code == static_cast<int>(ExitCode::kOk)) return code;
  // Other ranks may be gone: nothing that runs at exit, MPI's handlers least of all, may wait for them.
  std::fflush(nullptr);
  std::_Exit(code);
}
