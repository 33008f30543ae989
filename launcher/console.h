// The launcher's stdout and stderr: the lines of all ranks, whole and prefixed, and one live line at the bottom.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/scope.h"
#include "launcher/rank_log.h"

namespace lockstep::launcher {

/// Bytes on their way to one of the launcher's own descriptors. The descriptor may be a pipe without a reader or with
/// several writers, or a stopped terminal: nothing here blocks. Pipes and terminals are opened once more for that,
/// since O_NONBLOCK would change them for all who share them.
class OutputQueue {
 public:
  explicit OutputQueue(int fd);
  int fd() const { return own_ ? own_.get() : fd_; }
  bool is_terminal() const { return is_terminal_; }
  /// The errno of a write that failed (the reader has gone, the disk is full), since when everything is dropped; or 0.
  int error() const { return error_; }
  std::size_t size() const { return bytes_.size() - start_; }
  void append(std::string_view bytes);
  void write_some();
  /// Gives up what is queued; how many bytes that were.
  std::size_t drop();

 private:
  int fd_;
  UniqueFd own_;
  bool is_socket_ = false;
  bool is_terminal_;
  int error_ = 0;
  std::string bytes_;
  std::size_t start_ = 0;
};

/// Lines come out whole, in the order in which they were completed. Where nothing is a terminal the bytes of a line are
/// passed on as they are. On a terminal, a line that is redrawn with '\r' shows its last state only; rank 0's
/// unfinished one stays visible below all others while it is redrawn. Not thread-safe.
class Console {
 public:
  /// `prefix`: "[rank] " before each line, as wide for all ranks; "[rank@host] " where ranks have hosts, whose names
  /// have up to `host_width` characters.
  Console(int ranks, bool prefix, int stdout_fd = 1, int stderr_fd = 2, std::size_t host_width = 0);
  /// Before the rank's first add().
  void set_host(int rank, const std::string& host);
  /// What the rank writes to stdout from now on is for programs: its lines stay as they are.
  void set_plain(int rank) { plain_[static_cast<std::size_t>(rank)] = true; }

  /// Adds what the rank wrote on `stream` (1 or 2).
  void add(int rank, int stream, std::string_view bytes);
  /// The rank writes nothing more: what it left without a newline becomes a line.
  void finish(int rank);
  /// A line of the launcher's own, on stderr.
  void say(std::string_view text);

  /// The queue for stdout and the one for stderr, or one for both: where they are the same file or terminal, separate
  /// queues would cut into each other's lines.
  std::span<OutputQueue> queues() { return queues_; }
  std::size_t backlog_bytes() const;
  /// Columns of the terminal left for rank 0's live line; 0 if stdout is no terminal.
  int live_columns() const;
  /// The columns that its prefix takes, and the terminal's name, empty where it has none here.
  int prefix_columns() const { return static_cast<int>(prefix_of(0).size()); }
  std::string terminal() const;

 private:
  OutputQueue& queue_of(int stream) { return stream == 2 ? queues_.back() : queues_.front(); }
  std::string prefix_of(int rank) const;
  std::string prefix_of(int rank, int stream) const;
  void print(OutputQueue& queue, std::string_view prefix, std::string_view line);
  void erase_live();
  void draw_live();

  std::vector<OutputQueue> queues_;
  int digits_ = 0;                   // of the widest rank in the prefix; 0: no prefix
  std::size_t host_width_;           // of the widest name of a host; 0: no hosts
  std::vector<std::string> hosts_;   // of the ranks
  std::vector<bool> plain_;          // ranks whose stdout has no prefix
  std::vector<LineCutter> cutters_;  // two per rank
  std::string live_;                 // rank 0's unfinished line, as last drawn
  int live_stream_ = 1;
  bool live_shown_ = false;
};

}  // namespace lockstep::launcher
