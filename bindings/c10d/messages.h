// Sends and receives of c10d's.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "bindings/c10d/work.h"
#include "lockstep/comm.h"

namespace lockstep::pytorch {

class Messages;

/// What goes ahead of a message's values.
using Envelope = std::array<std::int64_t, 2>;  // the tag, and how many elements follow

/// One under way, which ends with an error when `timeout` has passed. Who asks or waits moves them all on.
class MessageWork final : public Work {
 public:
  MessageWork(const std::shared_ptr<Messages>& messages, int rank, ::c10d::OpType type, const char* title,
              const at::Tensor& tensor, int peer, int tag, std::chrono::milliseconds timeout);

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override { return peer_; }

 private:
  friend class Messages;
  /// Of one that has come to its end without an error: gives the tensor what was received.
  void deliver();

  const std::weak_ptr<Messages> messages_;
  const bool sends_;
  at::Tensor tensor_;
  at::Tensor memory_;
  int peer_;  // of a receive from any rank: known when it has begun
  const Envelope envelope_;
  std::shared_ptr<Envelope> theirs_;  // of a receive
  comm::Transfer of_envelope_, of_values_;
  const Deadline deadline_;
};

/// Messages between the ranks of a group, over a group of their own: they are no part of the order of collectives, and
/// move on while those wait. A message is two of lockstep's: its envelope, and its values. Thread-safe.
///
/// Whoever waits for a message moves all of them on, and so does a thread while there are any: the rank may be in
/// another operation meanwhile, or compute. Works are completed under no lock.
///
/// A receive from any rank expects an envelope from each, and takes the values of the first one that comes; later
/// receives use the envelopes that are expected already. Receives begin in the order of issue: after a receive from any
/// rank, a receive that names its rank would otherwise take its values.
class Messages : public std::enable_shared_from_this<Messages> {
 public:
  static constexpr int kAnyRank = -1;

  explicit Messages(std::unique_ptr<comm::ProcessGroup> group);

  /// Throws c10::Error when they have ended.
  void start(c10::intrusive_ptr<MessageWork> work);
  /// Completes what can be completed.
  void advance();
  /// Whether a message has failed.
  bool failed() const { return failed_; }

  /// Collective: ends their group in order, with the help of `all`, a group of the same ranks, until `deadline`. Throws
  /// UsageError where messages are under way, which fail.
  void end(comm::ProcessGroup& all, Deadline deadline);
  /// Those under way fail with `error`; nobody is waited for.
  void abandon(const std::exception_ptr& error);

 private:
  struct Expected {
    std::shared_ptr<Envelope> envelope;  // nullptr: none is expected
    comm::Transfer transfer;
  };
  struct Over {
    c10::intrusive_ptr<MessageWork> work;
    std::exception_ptr error;
  };

  /// Under mutex_, as all that uses the group before the end.
  void look(std::vector<Over>& over);
  void begin(MessageWork& work);
  int who_has_sent();
  Expected take_expected(int rank);
  static bool is_over(const MessageWork& work);
  bool under_way() const { return !begun_.empty() || !waiting_.empty(); }
  /// Ends them: no more use of the group. Those that were under way.
  std::vector<Over> take_all(const std::exception_ptr& error);

  /// Under no lock.
  void complete(std::vector<Over> over);
  void serve();

  const std::unique_ptr<comm::ProcessGroup> group_;
  std::atomic<bool> failed_{false};
  Retired retired_;
  std::mutex mutex_;  // for moments: never while a callback runs or a tensor is released
  std::condition_variable changed_;
  bool has_thread_ = false;
  bool sleeps_ = false;  // the thread, until there are messages
  bool ended_ = false;
  std::list<c10::intrusive_ptr<MessageWork>> begun_;
  std::deque<c10::intrusive_ptr<MessageWork>> waiting_;  // receives that have not begun; the first one is from any rank
  std::vector<Expected> expected_;                       // by rank: envelopes that no receive has yet
};

}  // namespace lockstep::pytorch
