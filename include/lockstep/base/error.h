// Errors in three tiers:
//   UsageError                      the caller asked for something that cannot be (flags, API misuse);
//   IoError, TimeoutError, …        the world failed (files, devices, network, other ranks);
//   InternalError                   we are wrong: a bug in lockstep.
// They are thrown anywhere and caught in main() alone, which prints one line and exits with `code()`: run_main.h.
#pragma once

#include <source_location>
#include <stdexcept>
#include <string>
#include <utility>

namespace lockstep {

/// Exit codes of every subcommand; 128 + n is "ended by signal n".
enum class ExitCode : int {
  kOk = 0,
  kInternal = 1,
  kUsage = 2,
  kData = 3,
  kDevice = 4,
  kTimeout = 5,
  kCheckpoint = 6,
  kDiverged = 7,
  kCheckpointed = 75,
};

/// The cause (`what()`), a remedy (`remedy()`, may be empty) and the place of the throw.
class Error : public std::runtime_error {
 public:
  Error(int code, const std::string& what, std::string remedy, std::source_location where)
      : std::runtime_error(what), code_(code), remedy_(std::move(remedy)), where_(where) {}
  Error(ExitCode code, const std::string& what, std::string remedy, std::source_location where)
      : Error(static_cast<int>(code), what, std::move(remedy), where) {}

  int code() const noexcept { return code_; }
  const std::string& remedy() const noexcept { return remedy_; }
  const std::source_location& where() const noexcept { return where_; }

  /// "what → remedy", the text that follows the `[rank r host h]` prefix.
  std::string line() const;

 private:
  int code_;
  std::string remedy_;
  std::source_location where_;
};

#define LOCKSTEP_DEFINE_ERROR(Name, kCode)                                      \
  class Name : public Error {                                                   \
   public:                                                                      \
    explicit Name(const std::string& what, std::string remedy = {},             \
                  std::source_location where = std::source_location::current()) \
        : Error(ExitCode::kCode, what, std::move(remedy), where) {}             \
  }

LOCKSTEP_DEFINE_ERROR(UsageError, kUsage);
LOCKSTEP_DEFINE_ERROR(IoError, kData);            // input data that is missing, cut or malformed
LOCKSTEP_DEFINE_ERROR(DeviceError, kDevice);      // no such device, or it failed
LOCKSTEP_DEFINE_ERROR(MpiError, kDevice);         // MPI or the network under it failed
LOCKSTEP_DEFINE_ERROR(CudaError, kDevice);        // a GPU, its driver or one of NVIDIA's libraries failed
LOCKSTEP_DEFINE_ERROR(NcclError, kDevice);        // NCCL or the network under it failed
LOCKSTEP_DEFINE_ERROR(TimeoutError, kTimeout);    // a deadline passed
LOCKSTEP_DEFINE_ERROR(OutOfStepError, kTimeout);  // ranks that disagree on what they run
LOCKSTEP_DEFINE_ERROR(CheckpointError, kCheckpoint);
LOCKSTEP_DEFINE_ERROR(DivergedError, kDiverged);  // non-finite loss
LOCKSTEP_DEFINE_ERROR(InternalError, kInternal);  // a bug in lockstep
#undef LOCKSTEP_DEFINE_ERROR

/// A device, or the host, has not as much memory left: it may have when something was given back.
class OutOfMemoryError : public DeviceError {
 public:
  explicit OutOfMemoryError(const std::string& what, std::string remedy = {},
                            std::source_location where = std::source_location::current())
      : DeviceError(what, std::move(remedy), where) {}
};

/// A stop that was asked for by signal `signal_number`; exit code 128 + signal_number.
class InterruptedError : public Error {
 public:
  explicit InterruptedError(int signal_number, const std::string& what,
                            std::source_location where = std::source_location::current())
      : Error(128 + signal_number, what, {}, where) {}
};

/// Another rank has already said what went wrong: this one exits with the same code and prints nothing.
class PeerError : public Error {
 public:
  PeerError(int code, const std::string& what, std::source_location where = std::source_location::current())
      : Error(code, what, {}, where) {}
};

/// Throws UsageError(what → remedy) unless `ok`. `what` is only built by the caller: keep it cheap or test first.
inline void check_usage(bool ok, const char* what, const char* remedy = "",
                        std::source_location where = std::source_location::current()) {
  if (!ok) [[unlikely]]
    throw UsageError(what, remedy, where);
}

}  // namespace lockstep
