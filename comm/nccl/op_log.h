// What a group knows of the operations that it has given to a stream.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <vector>

#include "base/cuda/runtime.h"
#include "comm/flight.h"
#include "lockstep/base/deadline.h"
#include "lockstep/comm/device_group.h"
#include "lockstep/comm/op.h"

namespace lockstep::comm {

/// The host's record of a group's operations: descriptions of those that do not end, the time without any end, and the
/// operations that each launch of a CUDA graph issues again. Operations are numbered from 1, launched and completed in
/// order. One thread uses it.
class OpLog {
 public:
  OpLog() : under_way_(kMostUnderWay) {}

  std::uint64_t launched() const { return launched_; }
  /// The last that has been launched, with the history up to it.
  OpDescriptor last() const { return launched_ == 0 ? OpDescriptor() : OpDescriptor(at(launched_)); }
  std::uint64_t completed() const { return completed_; }
  /// Launched and, as far as is known, not complete.
  bool any_under_way() const { return completed_ < launched_; }
  /// There must be one.
  const Op& first_under_way() const { return at(completed_ + 1); }
  /// When `completed` last rose, or the first of those under way was launched.
  RunningClock::time_point progress() const { return progress_; }

  /// The GPU is done with so many. It may be ahead of what has been launched here: a graph is, until replay().
  void complete(std::uint64_t completed);
  /// The operation that must be complete before `count` more may be launched; 0 where none must be.
  std::uint64_t first_blocking(std::uint64_t count) const;
  void launch(const Op& op);

  /// Between these two calls operations are captured, not launched. The number of those captured; the log can then hold
  /// one launch of them that is under way and one more.
  void begin_capture() { captured_.clear(); }
  void capture(const Op& op) { captured_.push_back(op); }
  std::uint64_t end_capture();
  /// Whether there was a capture of `count` operations.
  bool has_captured(std::uint64_t count) const { return in_graphs_.contains(count); }
  /// Launches what the last of them held.
  void replay(std::uint64_t count, std::int64_t step);

 private:
  static constexpr std::size_t kMostUnderWay = 1024;

  Op& at(std::uint64_t sequence) { return under_way_[sequence % under_way_.size()]; }
  const Op& at(std::uint64_t sequence) const { return under_way_[sequence % under_way_.size()]; }

  const std::uint16_t flight_group_ = next_flight_group();
  std::vector<Op> under_way_;  // a ring, by sequence number
  std::uint64_t launched_ = 0;
  std::uint64_t history_ = 0;
  std::uint64_t completed_ = 0;
  RunningClock::time_point progress_{};
  std::vector<Op> captured_;
  std::map<std::uint64_t, std::vector<Op>> in_graphs_;  // by their number
};

/// Operations complete in order: whoever waits for one may as well wait for a later one. So the last few events do for
/// all operations, and one event may stand for many.
class EventRing {
 public:
  /// All operations up to `sequence`, which is above that of the last call, are done where `stream` is now.
  void record(std::uint64_t sequence, cudaStream_t stream);
  /// Orders `stream` after the operation, which has been recorded.
  void make_wait(std::uint64_t sequence, cudaStream_t stream) const;
  /// Forgets all.
  void clear() { recorded_ = 0; }

 private:
  static constexpr std::size_t kEvents = 64;
  struct Entry {
    CudaEvent event;
    std::uint64_t sequence = 0;
  };
  std::array<Entry, kEvents> events_;
  std::uint64_t recorded_ = 0;  // the last kEvents of them are there
};

/// Note [Completion word]
/// A number in host memory that the stream itself counts up, with a kernel of one thread after every operation. The
/// host may read it at any place and as often as it likes. A read costs a load and no call of CUDA, so it works during
/// captures. It also counts operations that a CUDA graph repeats, for which the host sees no events. What it cannot see
/// is an operation that failed: whoever waits asks the stream too.
class CompletionWord {
 public:
  CompletionWord();
  ~CompletionWord();
  CompletionWord(const CompletionWord&) = delete;
  CompletionWord& operator=(const CompletionWord&) = delete;

  /// One more, when `stream` gets there. Those that use one word come one after the other.
  void count_up(StreamView stream);
  std::uint64_t read() const { return word().load(std::memory_order_acquire); }

  /// 64 bytes of the GPU for whoever needs a place that holds nothing.
  void* scratch() const { return device_ + 64; }

 private:
  std::atomic_ref<std::uint64_t> word() const {
    return std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(host_.data()));
  }

  PinnedMemory host_;
  std::byte* device_ = nullptr;  // the count, which the GPU reads where it is near
};

/// Two events round every operation while it is on; they are kept and used again.
class OpTimer {
 public:
  /// Turning it on forgets what was timed before.
  void turn(bool on);
  void begin(const Op& op, cudaStream_t stream);
  void end(cudaStream_t stream);
  /// Blocks until the last of them is done.
  std::vector<OpTime> times(const CudaEvent& origin) const;

 private:
  struct Timed {
    Op op;
    CudaEvent begin{CudaEvent::Timing::kOn};
    CudaEvent end{CudaEvent::Timing::kOn};
  };
  bool on_ = false;
  std::size_t used_ = 0;
  std::vector<Timed> timed_;
};

}  // namespace lockstep::comm
