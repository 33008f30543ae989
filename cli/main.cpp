// The only place where errors end: one line on stderr, and the exit code.

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "cli/subcommands.h"

namespace {

using lockstep::ExitCode;

/// Whatever names, paths and messages of libraries hold, an error is one line.
std::string one_line(std::string text) {
  std::ranges::replace_if(
      text, [](unsigned char c) { return c < ' ' || c == 0x7f; }, ' ');
  return text;
}

int run(const std::vector<std::string>& args) {
  const int code = lockstep::cli::run(args);
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    throw lockstep::IoError("cannot write to standard output: " + lockstep::errno_text(errno), "is the disk full?");
  return code;
}

/// log_error also takes the progress bar off the terminal first.
int run_and_report(const std::vector<std::string>& args) noexcept {
  try {
    return run(args);
  } catch (const lockstep::PeerError& error) {
    return error.code();
  } catch (const lockstep::Error& error) {
    lockstep::log_error("{}", one_line(error.line()));
    return error.code();
  } catch (const std::bad_alloc&) {
    lockstep::log_error("out of memory → use a smaller batch or model, or fewer ranks on this host");
  } catch (const std::exception& error) {
    lockstep::log_error("unexpected error: {}", one_line(error.what()));
  }
  return static_cast<int>(ExitCode::kInternal);
}

}  // namespace

int main(int argc, char** argv) {
  const int code = run_and_report({argv + std::min(argc, 1), argv + argc});
  if (code == static_cast<int>(ExitCode::kOk)) return code;
  // Other ranks may be gone: nothing that runs at exit, MPI's handlers least of all, may wait for them.
  std::fflush(nullptr);
  std::_Exit(code);
}
