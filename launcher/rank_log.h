// What one rank wrote: a log file, byte for byte, and the last lines in memory.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "base/scope.h"

namespace lockstep::launcher {

/// Cuts a byte stream into lines. A line that grows past kMaxLineBytes is cut there.
class LineCutter {
 public:
  static constexpr std::size_t kMaxLineBytes = 16 << 20;

  /// Calls `line(text)` for each line that `bytes` completes; the text is without its '\n'.
  template <class Line>
  void feed(std::string_view bytes, Line&& line) {
    for (;;) {
      const auto end = bytes.find('\n');
      if (end == std::string_view::npos) break;
      if (partial_.empty()) {
        line(bytes.substr(0, end));
      } else {
        partial_.append(bytes.substr(0, end));
        line(std::string_view(partial_));
        partial_.clear();
      }
      bytes.remove_prefix(end + 1);
    }
    partial_.append(bytes);
    if (partial_.size() > kMaxLineBytes) finish(line);
  }
  /// Hands out the line that has no end yet.
  template <class Line>
  void finish(Line&& line) {
    if (!partial_.empty()) line(std::string_view(partial_));
    partial_.clear();
  }
  std::string_view partial() const { return partial_; }
  /// Forgets the states of the unfinished line that a '\r' has overwritten, so that an hour of progress bar stays
  /// small.
  void keep_last_state();

 private:
  std::string partial_;
};

/// What a terminal shows of a line with carriage returns in it: the part after the last redraw, without sequences
/// around it that erase what was there before.
std::string_view last_state(std::string_view line);

/// The logs of all ranks. Not thread-safe.
class RankLogs {
 public:
  /// Makes `directory` and an empty rank-R.log in it for each rank; with an empty `directory` only the last lines are
  /// kept. Throws IoError when that is not possible or the disk is full.
  RankLogs(const std::string& directory, int ranks);

  /// Adds what the rank wrote on `stream` (1 or 2). Returns an error for the user, once, if the disk is full.
  std::string add(int rank, int stream, std::string_view bytes);
  /// Forgets the last lines, not the files: those of the next attempt explain its end.
  void start_attempt();
  /// Up to 20 lines, oldest first, each cut to a readable length, control characters replaced. Without the backtrace of
  /// a crash (base/crash.h), which was there to read when it was written.
  std::vector<std::string> last_lines(int rank) const;
  /// Empty without a directory.
  std::string path(int rank) const;

 private:
  struct Rank {
    UniqueFd file;
    LineCutter cutters[2];
    bool in_backtrace[2] = {};
    std::deque<std::string> last;
  };
  std::string directory_;
  std::vector<Rank> ranks_;
  bool write_failed_ = false;
};

}  // namespace lockstep::launcher
