#include "base/flight_snapshot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <limits>

#include "base/crash.h"
#include "base/error.h"
#include "base/file.h"
#include "base/flight_layout.h"
#include "base/text.h"

namespace lockstep::flight {
namespace {

constexpr std::size_t kMostBacktrace = 64;  // lines
constexpr std::int64_t kMostRanks = std::int64_t{1} << 24;

/// A number of the file; `offset` + its size is within it.
template <class T>
T number_at(std::string_view bytes, std::size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

template <class T>
T header_field(std::string_view bytes, std::size_t offset) {
  return number_at<T>(bytes, offsetof(File, header) + offset);
}

template <class T>
T state_field(std::string_view bytes, std::size_t offset) {
  return number_at<T>(bytes, offsetof(File, state) + offset);
}

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw IoError(fmt::format("{}: {}", path, what),
                "give a flight record, rank-N, or a directory of them: a job's --log-dir has them after a failure");
}

std::optional<RecordedOperation> operation_at(std::string_view bytes, std::uint64_t number) {
  const std::size_t at = offsetof(File, records) + number % kOperations * sizeof(Record);
  const auto field = [&](std::size_t offset) { return number_at<std::uint64_t>(bytes, at + offset); };
  const auto what = field(offsetof(Record, what));
  if (field(offsetof(Record, number)) != number || field(offsetof(Record, check)) != number) return std::nullopt;
  const std::uint64_t kind = what & 0xff, phase = what >> 8 & 0xff;
  if (kind >= kKinds || phase >= kPhases) return std::nullopt;
  RecordedOperation made;
  made.number = number;
  made.sequence = field(offsetof(Record, sequence));
  made.bytes = field(offsetof(Record, bytes));
  made.step = static_cast<std::int64_t>(field(offsetof(Record, step)));
  made.bucket = static_cast<std::int32_t>(what >> 32);
  made.kind = static_cast<Kind>(kind);
  made.group = static_cast<std::uint16_t>(what >> 16 & 0xffff);
  made.phase = static_cast<Phase>(phase);
  made.issued_ns = static_cast<std::int64_t>(field(offsetof(Record, issued_ns)));
  made.completed_ns = static_cast<std::int64_t>(field(offsetof(Record, completed_ns)));
  return made;
}

std::string of_step(const Snapshot& snapshot) {
  return snapshot.step > 0 ? fmt::format(" of step {}", snapshot.step) : std::string();
}

std::string phase_text(const Snapshot& s) {
  switch (s.phase) {
    case Phase::kStarting: return "starting";
    case Phase::kRunning:
      return s.step > 0 ? fmt::format("running, after the start of step {}", s.step) : std::string("running");
    case Phase::kData: return fmt::format("waiting for its next batch{}", of_step(s));
    case Phase::kForward: return fmt::format("in the forward pass{}", of_step(s));
    case Phase::kBackward: return fmt::format("in the backward pass{}", of_step(s));
    case Phase::kOptimizer: return fmt::format("in the optimizer{}", of_step(s));
    case Phase::kCheckpoint: return fmt::format("in the checkpoint{}", of_step(s));
    case Phase::kEvaluation:
      return s.step > 0 ? fmt::format("in the evaluation after step {}", s.step) : std::string("in the evaluation");
    case Phase::kEnding: return "ending, after its last step";
  }
  return "running";
}

/// The sample that has been read for longest, where data are waited for.
const RecordedReading* slowest_reading(const Snapshot& snapshot) {
  if (snapshot.phase != Phase::kData && snapshot.phase != Phase::kEvaluation) return nullptr;
  const auto first = std::ranges::min_element(snapshot.readings, {}, &RecordedReading::since_ns);
  return first == snapshot.readings.end() ? nullptr : &*first;
}

/// 'R', 'S', 'D', 'T', …: what the kernel says a process or thread does; 0 if it is not there.
char state_of(const std::string& stat_path) {
  std::ifstream file(stat_path);
  std::string line;
  std::getline(file, line);
  // The name is in parentheses, and may have some in it.
  const auto end = line.rfind(") ");
  return end != std::string::npos && end + 2 < line.size() ? line[end + 2] : '\0';
}

}  // namespace

const char* name_of(Phase phase) {
  switch (phase) {
    case Phase::kStarting: return "start";
    case Phase::kRunning: return "running";
    case Phase::kData: return "data";
    case Phase::kForward: return "forward";
    case Phase::kBackward: return "backward";
    case Phase::kOptimizer: return "optimizer";
    case Phase::kCheckpoint: return "checkpoint";
    case Phase::kEvaluation: return "evaluation";
    case Phase::kEnding: return "end";
  }
  return "?";
}

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kAllReduce: return "allreduce";
    case Kind::kReduceScatter: return "reduce_scatter";
    case Kind::kAllGather: return "allgather";
    case Kind::kBroadcast: return "broadcast";
    case Kind::kBarrier: return "barrier";
    case Kind::kReduce: return "reduce";
  }
  return "?";
}

std::string describe(const RecordedOperation& operation) {
  if (operation.sequence == 0) return "an allocation";
  std::vector<std::string> details;
  if (operation.kind != Kind::kBarrier) details.push_back(human_bytes(static_cast<double>(operation.bytes)));
  if (operation.step >= 0) details.push_back(fmt::format("step {}", operation.step));
  if (operation.bucket >= 0) details.push_back(fmt::format("bucket {}", operation.bucket));
  if (operation.group > 1) details.push_back(fmt::format("group {}", operation.group));
  return fmt::format("{} #{}{}", name_of(operation.kind), operation.sequence,
                     details.empty() ? "" : fmt::format(" ({})", join(details, ", ")));
}

const RecordedOperation* Snapshot::pending() const {
  const auto found = std::ranges::find_if(operations, [](const auto& each) { return each.completed_ns == 0; });
  return found == operations.end() ? nullptr : &*found;
}

Snapshot decode(std::string_view bytes, const std::string& path) {
  if (bytes.size() < sizeof kMagic || std::memcmp(bytes.data(), kMagic.data(), sizeof kMagic) != 0)
    refuse(path, "is no flight record");
  if (bytes.size() < kFileBytes)
    refuse(path, fmt::format("is a flight record that ends at byte {} of {}", bytes.size(), kFileBytes));
  if (const auto version = header_field<std::uint32_t>(bytes, offsetof(Header, version)); version != kVersion)
    refuse(path, fmt::format("is a flight record of version {}, and this program reads version {}", version, kVersion));
  Snapshot made;
  made.rank = header_field<std::int32_t>(bytes, offsetof(Header, rank));
  made.world_size = header_field<std::int32_t>(bytes, offsetof(Header, world_size));
  if (header_field<std::uint32_t>(bytes, offsetof(Header, operations)) != kOperations || made.rank < 0 ||
      made.world_size > kMostRanks || made.rank >= made.world_size)
    refuse(path, fmt::format("is a flight record of rank {} of {}, which cannot be", made.rank, made.world_size));
  made.pid = header_field<std::int32_t>(bytes, offsetof(Header, pid));
  made.attempt = header_field<std::int32_t>(bytes, offsetof(Header, attempt));
  made.started_unix_ns = header_field<std::int64_t>(bytes, offsetof(Header, started_unix_ns));
  made.started_ns = header_field<std::int64_t>(bytes, offsetof(Header, started_ns));
  const std::string_view host = bytes.substr(offsetof(File, header) + offsetof(Header, host), sizeof(Header::host));
  made.host = printable(host.substr(0, host.find('\0')));

  const auto phase = state_field<std::uint64_t>(bytes, offsetof(State, phase));
  made.phase = static_cast<Phase>(std::min<std::uint64_t>(phase >> kPhaseShift, kPhases - 1));
  constexpr std::uint64_t kMostMicroseconds = std::numeric_limits<std::int64_t>::max() / 1000;
  made.phase_since_ns = static_cast<std::int64_t>(std::min(phase & kSinceMask, kMostMicroseconds)) * 1000;
  made.step = state_field<std::int64_t>(bytes, offsetof(State, step));
  made.waits_since = state_field<std::int64_t>(bytes, offsetof(State, waits_since));
  made.waited_ns = state_field<std::int64_t>(bytes, offsetof(State, waited_ns));
  const auto missing =
      std::min<std::size_t>(state_field<std::uint32_t>(bytes, offsetof(State, missing_count)), kMostMissing);
  for (std::size_t i = 0; i < missing; ++i) {
    const int rank = state_field<std::int32_t>(bytes, offsetof(State, missing) + i * sizeof(std::int32_t));
    if (rank >= 0 && rank < made.world_size) made.missing.push_back(rank);
  }
  for (std::size_t i = 0; i < kMostReaders; ++i) {
    const std::size_t at = offsetof(State, readings) + i * sizeof(Reading);
    const auto since = state_field<std::int64_t>(bytes, at + offsetof(Reading, since_ns));
    if (since == 0) continue;
    made.readings.push_back({.worker = static_cast<int>(i),
                             .sample = state_field<std::uint64_t>(bytes, at + offsetof(Reading, sample)),
                             .since_ns = since,
                             .thread = state_field<std::int32_t>(bytes, at + offsetof(Reading, thread))});
  }
  made.signal = state_field<std::int32_t>(bytes, offsetof(State, signal));
  made.fault_address = state_field<std::uint64_t>(bytes, offsetof(State, fault_address));
  for (const auto& line : split(bytes.substr(kFileBytes, kMostCrashBytes), '\n'))
    if (!line.empty() && made.backtrace.size() < kMostBacktrace)
      made.backtrace.push_back(printable(line.substr(line.starts_with(kFrameIndent) ? kFrameIndent.size() : 0)));

  made.issued = state_field<std::uint64_t>(bytes, offsetof(State, issued));
  const std::uint64_t kept = std::min<std::uint64_t>(made.issued, kOperations);
  for (std::uint64_t back = kept; back > 0; --back)
    if (auto operation = operation_at(bytes, made.issued - back + 1)) made.operations.push_back(*operation);
  return made;
}

std::string read_bytes(const std::string& path) {
  RegularFile file = open_regular(path);
  if (!file.problem.empty()) refuse(path, file.problem);
  if (file.size > kFileBytes + kMostCrashBytes) refuse(path, "is no flight record: it is larger than any");
  std::string bytes(file.size, '\0');
  std::size_t count = 0;
  if (const auto problem = file.read(std::as_writable_bytes(std::span(bytes)), count); !problem.empty())
    refuse(path, problem);
  bytes.resize(count);
  return bytes;
}

std::optional<Snapshot> read(const std::string& directory, int rank) noexcept {
  try {
    const std::string path = path_of(directory, rank);
    return decode(read_bytes(path), path);
  } catch (...) {
    return std::nullopt;
  }
}

namespace {

/// `since` makes a text of a time: how long ago it was.
template <class Since>
std::string state_text(const Snapshot& snapshot, Since&& since) {
  if (snapshot.waits_since != 0) {
    std::string text = "waiting";
    if (const auto* const operation = snapshot.pending()) text += " in " + describe(*operation);
    text += " " + since(snapshot.waits_since);
    std::vector<std::string> ranks;
    for (const int rank : snapshot.missing) ranks.push_back(std::to_string(rank));
    if (!ranks.empty()) text += fmt::format(" for rank{} {}", ranks.size() == 1 ? "" : "s", listed(ranks));
    return text;
  }
  std::string text = phase_text(snapshot) + " " + since(snapshot.phase_since_ns);
  if (const auto* const reading = slowest_reading(snapshot))
    text += fmt::format(": data worker {} has been reading sample {} {}", reading->worker, reading->sample,
                        since(reading->since_ns));
  return text;
}

}  // namespace

std::string describe_state(const Snapshot& snapshot, std::int64_t at_ns) {
  return state_text(snapshot, [&](std::int64_t since_ns) {
    const double seconds = std::max(0.0, (static_cast<double>(at_ns) - static_cast<double>(since_ns)) * 1e-9);
    return fmt::format("for {:.{}f} s", seconds, seconds < 10 ? 1 : 0);
  });
}

std::string describe_state(const Snapshot& snapshot) {
  return state_text(snapshot, [&](std::int64_t since_ns) {
    const double seconds = (static_cast<double>(since_ns) - static_cast<double>(snapshot.started_ns)) * 1e-9;
    return seconds < 0 ? std::string("since its start") : fmt::format("since {:.3f} s after its start", seconds);
  });
}

std::string standstill_of(const Snapshot& snapshot) {
  const std::string process = fmt::format("/proc/{}", snapshot.pid);
  const char state = state_of(process + "/stat");
  if (state == 'T' || state == 't') return fmt::format("it is stopped, and kill -CONT {} resumes it", snapshot.pid);
  const auto* const reading = slowest_reading(snapshot);
  if (reading == nullptr) return {};
  switch (state_of(fmt::format("{}/task/{}/stat", process, reading->thread))) {
    case 'R': return "that thread computes: an endless loop in the data set, or slow decoding";
    case 'D':
    case 'S': return "that thread sleeps: a slow disk or file system, or a lock";
    default: return {};
  }
}

}  // namespace lockstep::flight
