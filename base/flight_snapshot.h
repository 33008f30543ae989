// The content of a flight record for its reader: the file may be in use by its writer, or untrusted.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/flight_record.h"

namespace lockstep::flight {

const char* name_of(Phase phase);
const char* name_of(Kind kind);

struct RecordedOperation : Operation {
  std::uint64_t number = 0;  // counts the process's operations from 1
  Phase phase = Phase::kStarting;
  std::int64_t issued_ns = 0;
  std::int64_t completed_ns = 0;  // 0: it was not complete
};

/// "allreduce #7 (4.0 MB, step 3, bucket 0)", with "of group 2" where it is not the first one's; "an allocation" for
/// what a group does by itself.
std::string describe(const RecordedOperation& operation);

/// A sample that a data worker reads.
struct RecordedReading {
  int worker = 0;
  std::uint64_t sample = 0;
  std::int64_t since_ns = 0;
  int thread = 0;
};

/// Times are those of CLOCK_MONOTONIC on the rank's host, in ns, unless said otherwise.
struct Snapshot {
  int rank = 0;
  int world_size = 1;
  int pid = 0;
  int attempt = 0;
  std::string host;  // printable
  std::int64_t started_unix_ns = 0;
  std::int64_t started_ns = 0;
  Phase phase = Phase::kStarting;
  std::int64_t phase_since_ns = 0;
  std::int64_t step = 0;         // 0: none had begun
  std::int64_t waits_since = 0;  // 0: it did not wait
  std::int64_t waited_ns = 0;
  std::vector<int> missing;  // the ranks it waited for, where it knew them
  std::vector<RecordedReading> readings;
  int signal = 0;  // that it crashed by; 0: it did not
  std::uint64_t fault_address = 0;
  std::vector<std::string> backtrace;         // printable
  std::uint64_t issued = 0;                   // operations, of which these are the last
  std::vector<RecordedOperation> operations;  // oldest first

  /// The first of them that is not complete; nullptr: all are.
  const RecordedOperation* pending() const;
  const RecordedOperation* last() const { return operations.empty() ? nullptr : &operations.back(); }
};

/// Checks all of it: no length, rank or index of `bytes` is believed. Throws IoError, which names `path`, for what is
/// no flight record of this version. Operations that were being written are left out.
Snapshot decode(std::string_view bytes, const std::string& path);

/// The bytes of a record's file. Throws IoError for what cannot be read, or is larger than any record.
std::string read_bytes(const std::string& path);

/// The record of `rank` in `directory`, where there is one that is whole.
std::optional<Snapshot> read(const std::string& directory, int rank) noexcept;

/// Where the rank was at `at_ns`:
///   in the forward pass of step 12 for 9.8 s
///   waiting for its next batch of step 12 for 9.8 s: data worker 0 has been reading sample 4711 for 9.7 s
///   waiting in allreduce #119 (25.0 MB, step 12, bucket 0) for 9.8 s for rank 1
std::string describe_state(const Snapshot& snapshot, std::int64_t at_ns);
/// The same where it is not known when that was: "since 1.234 s after its start" in the place of "for 9.8 s".
std::string describe_state(const Snapshot& snapshot);

/// Of a process on this host, now: "", or what its kernel says of it that explains a standstill: "it is stopped (kill
/// -CONT 4711 resumes it)"; of a process that reads data, whether the worker computes or waits for a disk.
std::string standstill_of(const Snapshot& snapshot);

}  // namespace lockstep::flight
