// `lockstep inspect`: flight records as people and programs read them.
#pragma once

#include <string>
#include <vector>

#include "base/flight_snapshot.h"

namespace lockstep::launcher {

/// The records at `path`, by name: a record, a directory of rank-N, or the --log-dir of a job, which has them in
/// `flight`. Throws IoError where there is none.
std::vector<std::string> records_at(const std::string& path);

/// Several lines: who it is, where it was, the backtrace of a crash, and a table of its last operations, at most `last`
/// of them. Times are in seconds since the process's start.
std::string text_of(const flight::Snapshot& snapshot, std::size_t last);

/// One line of JSON with the same: times in seconds since the start (`*_s`) and in ms (`took_ms`), sizes in bytes; null
/// is what is not known or not complete.
std::string json_of(const flight::Snapshot& snapshot, std::size_t last);

}  // namespace lockstep::launcher
