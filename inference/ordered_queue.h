// Work for several threads, whose results are returned in the order of the work.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::inference {

/// Jobs 0, 1, …, count − 1. Threads take them and put what comes of them, piece by piece; one thread reads all pieces,
/// job by job in their order, as soon as they are there. At most `window` jobs are taken and not yet read to their end:
/// who is far ahead waits, so what is kept does not grow. Thread-safe; nobody may be inside when it is destroyed.
class OrderedQueue {
 public:
  /// `window` ≥ 1.
  OrderedQueue(std::uint64_t count, std::uint64_t window);

  /// The next job. Waits while the queue is full; nothing when all are taken, or after close().
  std::optional<std::uint64_t> take();
  /// More of the result of a job that was taken. False after close(): nobody wants it any more.
  bool put(std::uint64_t job, std::string_view piece);
  /// Nothing more comes of it.
  void finish(std::uint64_t job);
  /// For threads that cannot continue: closes, and read() throws it when it has given out what was there. The first one
  /// counts.
  void fail(std::exception_ptr error);

  enum class Read { kPiece, kNothingYet, kEnd };
  /// All that is there of the first job that is not at its end, in place of `piece`'s content; waits for it at most as
  /// long as `patience`. kEnd when all jobs have been read.
  Read read(std::string& piece, std::chrono::milliseconds patience);

  /// Whoever waits comes back, and nothing more is given out.
  void close();

 private:
  struct Result {
    std::string text;  // not read yet
    bool finished = false;
  };
  Result& result_of(std::uint64_t job) { return results_[job % results_.size()]; }

  const std::uint64_t count_;
  std::mutex mutex_;
  std::condition_variable room_, news_;
  std::vector<Result> results_;  // of jobs [first_, first_ + window)
  std::uint64_t first_ = 0;      // that is not read to its end
  std::uint64_t next_ = 0;       // to be taken
  bool closed_ = false;
  std::exception_ptr error_;
};

}  // namespace lockstep::inference
