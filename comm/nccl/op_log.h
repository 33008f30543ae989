// Which operations a stream has been given, and how many of them are done.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "base/deadline.h"
#include "comm/op.h"

namespace lockstep::comm {

/// What a group knows of its operations beside what the GPU knows: the words for one that does not end, since when
/// nothing has ended, and what a CUDA graph issues anew with each launch. Operations are numbered from 1, launched and
/// completed in order. One thread uses it.
class OpLog {
 public:
  OpLog() : under_way_(kMostUnderWay) {}

  std::uint64_t launched() const { return launched_; }
  /// The last that has been launched, with the history up to it.
  OpDescriptor last() const { return launched_ == 0 ? OpDescriptor() : OpDescriptor(at(launched_)); }
  std::uint64_t completed() const { return completed_; }
  /// Launched and, as far as has been told, not complete.
  bool any_under_way() const { return completed_ < launched_; }
  /// There must be one.
  const Op& first_under_way() const { return at(completed_ + 1); }
  /// When `completed` last rose, or the first of those under way was launched.
  Clock::time_point progress() const { return progress_; }

  /// The GPU is done with so many. It may be ahead of what has been launched here: a graph is, until replay().
  void complete(std::uint64_t completed);
  /// The operation that must be complete before `count` more may be launched; 0 where there is room.
  std::uint64_t in_the_way_of(std::uint64_t count) const;
  void launch(const Op& op);

  /// Between these two calls operations are captured, not launched. The number of those captured; there is then room
  /// for one launch of them that is under way and one more.
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

  std::vector<Op> under_way_;  // a ring, by sequence number
  std::uint64_t launched_ = 0;
  std::uint64_t history_ = 0;
  std::uint64_t completed_ = 0;
  Clock::time_point progress_{};
  std::vector<Op> captured_;
  std::map<std::uint64_t, std::vector<Op>> in_graphs_;  // by their number
};

}  // namespace lockstep::comm
