// What a rank reports to the launcher besides its output: short messages on a socket that its wrapper reads.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/function_ref.h"

namespace lockstep {

/// One message. Fields that a kind does not name are empty.
struct StatusReport {
  enum class Kind : std::uint8_t {
    kDefersStops = 1,  // a stop request lets it finish its step and save a checkpoint; a step takes about `seconds`
    kSaving,           // `text` is being written
    kSaved,            // or could not be
    kDataOnStdout,     // what it writes to stdout is for programs: nothing may be added to its lines
    kMissingRanks,     // it gives up because it has waited for `ranks` in vain
    kUsageError,       // `text`, one line, which it has not printed
    kStopped,          // from the wrapper: the program was stopped by signal `number` …
    kContinued,        // … and runs again
    kProgress,         // `step` is complete
    kCheckpointed,     // a checkpoint from which the job could resume after `step` is complete
    kDone,             // the job's work is complete
    kRejoins,   // it outlives the loss of other ranks, and can connect to others in their place: wait_for_place()
    kStranded,  // it has lost ranks and waits for that; `step` is complete here, of -1 there is nothing left
    kComputesWrongly,  // other ranks have found that it does: its memory or a processor is at fault
  };
  static constexpr std::size_t kMaxRanks = 64;
  static constexpr std::size_t kMaxTextBytes = 4096;

  Kind kind = Kind::kDefersStops;
  std::int32_t number = 0;
  std::int64_t step = 0;
  double seconds = 0;
  std::vector<std::int32_t> ranks = {};
  std::string text = {};

  friend bool operator==(const StatusReport&, const StatusReport&) = default;
};

/// At most kMaxRanks and kMaxTextBytes are kept.
std::string encode_status(const StatusReport& report);
/// Nothing for bytes that no encode_status() made.
std::optional<StatusReport> decode_status(std::string_view bytes);
/// What programs write that know nothing of encode_status(): a line "progress STEP", "checkpointed STEP", "done",
/// "rejoins", "stranded STEP" or "computes wrongly".
/// Nothing for any other text.
std::optional<StatusReport> parse_status_line(std::string_view line);

/// Environment variable that names the socket and the pipe that stderr is: "FD:INODE:STDERR_INODE". A program may have
/// closed them, or been given others under the same numbers, so they are recognised by their inodes.
inline constexpr const char* kStatusVariable = "LOCKSTEP_STATUS";
/// The socket's number alone, for any program: lines that parse_status_line() knows may be written to it.
inline constexpr const char* kStatusFdVariable = "LOCKSTEP_STATUS_FD";

/// Sends a message if a launcher listens, and never waits. Whether it was sent. Thread-safe.
bool report_status(const StatusReport& report) noexcept;
/// Variables of the environment, by name.
using Place = std::vector<std::pair<std::string, std::string>>;
/// A place as a message on the status socket, from the wrapper to the program.
std::string encode_place(const Place& place);
/// Nothing for bytes that no encode_place() made.
std::optional<Place> decode_place(std::string_view bytes);
/// For a process that has reported kStranded: the environment with which it would be started now, beside the ranks that
/// take the lost ones' places. Looks at `gives_up` every 10 ms: nothing where that says so, or nobody listens.
std::optional<Place> wait_for_place(FunctionRef<bool()> gives_up);

/// `step` is complete. Sends at most one in a tenth of a second, and the first at once: a message wakes two processes.
void report_progress(std::int64_t step) noexcept;
/// The last report_progress() that has not been sent, if any: at the end of the work, or of the process.
void flush_progress() noexcept;
void report_missing_ranks(std::span<const int> ranks) noexcept;
/// False where nobody listens, or stderr goes somewhere else than to the launcher: the line is to be printed then.
bool report_usage_error(const std::string& line) noexcept;

}  // namespace lockstep
