// A rank's current activity and its last operations, in a mapped file that outlives the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace lockstep::flight {

/// Note [Flight record]
/// Every process of a job keeps a record: its identity, the phase of its step and the phase's beginning, the collective
/// it waits in and the ranks it waits for, the sample that each of its data workers reads, and the last kOperations
/// operations. If LOCKSTEP_FLIGHT_DIR names a directory, the record is a mapped file in it, rank-N. The kernel keeps
/// its content, so it is readable after SIGKILL, and by others while the process lives or is stopped. A field costs a
/// store: no lock, no system call but the clock's, no allocation. Without a directory the same fields lie in memory of
/// the process, and operations are not kept.
///
/// Each field has one writer at a time, or is one word. `lockstep launch` names a directory in the job's memory files,
/// reads the records when something goes wrong, and keeps them in --log-dir; the ranks of a host read each other's to
/// say in which phase a rank is that they wait for. The reader is base/flight_snapshot.h.

/// Names the directory. Each process makes its file there when its first group is made, in place of an older one.
inline constexpr const char* kDirectoryVariable = "LOCKSTEP_FLIGHT_DIR";

inline constexpr std::size_t kOperations = 1024;
inline constexpr std::size_t kMostReaders = 16;  // data workers that are shown
inline constexpr std::size_t kMostMissing = 16;  // ranks that are named

enum class Phase : std::uint8_t {
  kStarting,  // no group yet
  kRunning,   // anything that no other phase is: programs that set none stay here
  kData,      // waits for its next batch
  kForward,
  kBackward,
  kOptimizer,
  kCheckpoint,
  kEvaluation,
  kEnding,  // the last step is complete
};
inline constexpr std::size_t kPhases = 9;

enum class Kind : std::uint8_t { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kBarrier, kReduce };
inline constexpr std::size_t kKinds = 6;

/// An operation as it is issued.
struct Operation {
  std::uint64_t sequence = 0;  // of its group, from 1; 0: of the group itself
  std::uint64_t bytes = 0;
  std::int64_t step = -1;    // of training; -1: none
  std::int32_t bucket = -1;  // of gradients; -1: none
  Kind kind = Kind::kBarrier;
  std::uint16_t group = 0;  // of this process's groups
};

/// "DIRECTORY/rank-N".
std::string path_of(const std::string& directory, int rank);

/// The first call in a process makes this rank's file where LOCKSTEP_FLIGHT_DIR names a directory, which is made if it
/// is missing (mode 0700), and has crashes recorded (base/crash.h); later calls do nothing. Warns where the file cannot
/// be made; the job runs without it. Not thread-safe with the functions below.
void open(int rank, int world_size) noexcept;
/// Of the file; empty: there is none.
const std::string& directory() noexcept;

// Thread-safe, all of them.

void set_phase(Phase phase) noexcept;
Phase phase() noexcept;
/// Of CLOCK_MONOTONIC: the last set_phase().
std::int64_t phase_since_ns() noexcept;
/// The training step that begins, from 1.
void set_step(std::int64_t step) noexcept;

/// Data worker `worker` of the process starts to read a sample, or is done with its batch.
void begin_reading(int worker, std::uint64_t sample) noexcept;
void end_reading(int worker) noexcept;

/// Returns a number for complete(); 0 where operations are not kept.
std::uint64_t issue(const Operation& operation) noexcept;
/// `at_once`: within a microsecond or so of issue(), so that no clock is read.
void complete(std::uint64_t number, bool at_once = false) noexcept;

/// The caller begins to wait for an operation, or for a message: when it has looked for long enough that it sleeps from
/// now on. Not ended by an exception: what a rank waited for when it gave up stays in its record.
void begin_wait() noexcept;
void end_wait() noexcept;
/// For which ranks of the job it waits, as far as it knows; until end_wait().
void set_missing(std::span<const int> ranks) noexcept;
/// The same of a rank that gives up: it waits from now on, if it has not looked for long enough yet.
void give_up_on(std::span<const int> ranks) noexcept;
/// How long this process has waited so, in all, in ns.
std::int64_t waited_ns() noexcept;

}  // namespace lockstep::flight
