// The bytes of a flight record's file: for its writer, its reader and the handler of crashes alone.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <type_traits>

#include "base/flight_record.h"

namespace lockstep::flight {

inline constexpr std::array<char, 8> kMagic = {'l', 'k', 'f', 'l', 'i', 'g', 'h', 't'};
inline constexpr std::uint32_t kVersion = 1;

// Numbers are in the host's byte order; times are CLOCK_MONOTONIC's, in ns, unless said otherwise.

/// Written once.
struct Header {
  std::array<char, 8> magic;
  std::uint32_t version;
  std::uint32_t operations;  // kOperations
  std::int32_t rank;
  std::int32_t world_size;
  std::int32_t pid;
  std::int32_t attempt;
  std::int64_t started_unix_ns;
  std::int64_t started_ns;
  std::array<char, 64> host;
};
inline constexpr std::size_t kHeaderBytes = 256;
static_assert(sizeof(Header) <= kHeaderBytes);

struct Reading {
  std::atomic<std::int64_t> since_ns;  // 0: it reads nothing
  std::atomic<std::uint64_t> sample;
  std::atomic<std::int32_t> thread;  // its id for the kernel
  std::int32_t unused;
};

struct State {
  std::atomic<std::uint64_t> phase;       // the phase << 56 | since when, in µs
  std::atomic<std::int64_t> step;         // 0: none yet
  std::atomic<std::int64_t> waits_since;  // 0: it does not wait
  std::atomic<std::int64_t> waited_ns;    // in all
  std::atomic<std::uint64_t> issued;      // operations
  std::atomic<std::uint32_t> missing_count;
  std::array<std::atomic<std::int32_t>, kMostMissing> missing;
  std::atomic<std::int32_t> signal;  // that it crashed by; 0: it did not
  std::array<Reading, kMostReaders> readings;
  std::atomic<std::uint64_t> fault_address;
};
inline constexpr std::size_t kStateBytes = 768;
static_assert(sizeof(State) <= kStateBytes);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::int32_t>::is_always_lock_free);

inline constexpr int kPhaseShift = 56;
inline constexpr std::uint64_t kSinceMask = (std::uint64_t{1} << kPhaseShift) - 1;

/// Operation `number`, from 1, lies at number % kOperations. While it is written both numbers differ.
struct Record {
  std::atomic<std::uint64_t> number;
  std::atomic<std::uint64_t> sequence;
  std::atomic<std::uint64_t> bytes;
  std::atomic<std::int64_t> step;
  std::atomic<std::int64_t> issued_ns;
  std::atomic<std::int64_t> completed_ns;  // 0: not yet
  std::atomic<std::uint64_t> what;         // bucket << 32 | group << 16 | phase << 8 | kind
  std::atomic<std::uint64_t> check;        // the number again
};
static_assert(sizeof(Record) == 64, "a cache line");

/// The file. What follows it is text: the backtrace of a crash.
struct File {
  Header header;
  std::array<char, kHeaderBytes - sizeof(Header)> reserved;
  State state;
  std::array<char, kStateBytes - sizeof(State)> reserved_too;
  std::array<Record, kOperations> records;
};
static_assert(std::is_standard_layout_v<File>);
inline constexpr std::size_t kFileBytes = sizeof(File);
static_assert(kFileBytes == kHeaderBytes + kStateBytes + kOperations * sizeof(Record));
inline constexpr std::size_t kMostCrashBytes = 64 * 1024;

}  // namespace lockstep::flight
