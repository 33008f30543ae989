// Errors, and how main() ends with one.
#include "base/error.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <string>
#include <system_error>
#include <thread>

#include "base/log.h"
#include "base/status_report.h"
#include "base/text.h"
#include "lockstep/base/env.h"
#include "lockstep/base/run_main.h"

namespace lockstep {

std::string Error::line() const { return remedy_.empty() ? what() : fmt::format("{} → {}", what(), remedy_); }

void fail_assertion(const char* condition, const std::string& detail, std::source_location where) {
  throw InternalError(fmt::format("internal error at {}:{}: {}{}{}", where.file_name(), where.line(), condition,
                                  detail.empty() ? "" : ": ", detail),
                      "this is a bug in lockstep; please report it with the command line", where);
}

std::string errno_text(int error_number) { return std::generic_category().message(error_number); }

namespace detail {
namespace {

constexpr auto kHeadStart = std::chrono::milliseconds(50);

/// Nothing that was thrown ends this process as if all were well, whatever code it has brought along.
int failure_code(const Error& error) {
  return (error.code() & 0xff) != 0 ? error.code() : static_cast<int>(ExitCode::kInternal);
}

/// log_error also takes the progress bar off the terminal first.
int run_and_report(const std::function<int()>& program) noexcept {
  try {
    return program();
  } catch (const PeerError& error) {
    // The rank that reports the error ends first, so that the launcher names it.
    std::this_thread::sleep_for(kHeadStart);
    return failure_code(error);
  } catch (const InterruptedError& error) {
    // All ranks have been asked to stop: rank 0 says so (the others keep quiet at this level), or the launcher does.
    if (!env("LOCKSTEP_LAUNCHER")) log_info("{}", error.line());
    return failure_code(error);
  } catch (const UsageError& error) {
    // All ranks may find the same: the launcher says it once.
    const std::string line = one_line(error.line());
    if (!report_usage_error(line)) log_error("{}", line);
    return failure_code(error);
  } catch (const Error& error) {
    log_error("{}", error.line());
    return failure_code(error);
  } catch (const std::filesystem::filesystem_error& error) {
    log_error("{}: {} → check that path and its permissions", error.path1().string(), error.code().message());
    return static_cast<int>(ExitCode::kData);
  } catch (const std::bad_alloc&) {
    log_error("out of memory → use a smaller batch or model, or fewer ranks on this host");
    return static_cast<int>(ExitCode::kDevice);
  } catch (const std::exception& error) {
    log_error("unexpected error: {}", error.what());
  } catch (...) {
    log_error("unexpected error: the thrown object is no std::exception → throw lockstep::Error, or another one");
  }
  return static_cast<int>(ExitCode::kInternal);
}

}  // namespace

int run_main(const std::function<int()>& program) {
  choose_log_level(LogLevel::kInfo);
  const int code = run_and_report(program);
  if (code == static_cast<int>(ExitCode::kOk)) return code;
  // Other ranks may be gone: nothing that runs at exit, MPI's handlers least of all, may wait for them.
  std::fflush(nullptr);
  std::_Exit(code);
}

}  // namespace detail

}  // namespace lockstep
