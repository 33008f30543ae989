// Sends and receives of c10d's.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <list>
#include <memory>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "bindings/c10d/work.h"
#include "lockstep/comm.h"

namespace lockstep::pytorch {

class Messages;

/// What tasks and works of a backend keep.
struct State {
  std::unique_ptr<comm::ProcessGroup> group;
  std::unique_ptr<Messages> messages;
  std::unique_ptr<TaskQueue> queue;
  std::atomic<bool> failed{false};

  static std::shared_ptr<State> make(std::unique_ptr<comm::ProcessGroup> group);
};

/// What goes ahead of a message's values.
using Envelope = std::array<std::int64_t, 2>;  // the tag, and how many elements follow

/// One under way. Where no thread moves the group on, whoever asks and waits does.
class MessageWork final : public Work {
 public:
  MessageWork(std::shared_ptr<State> state, ::c10d::OpType type, const char* title, const at::Tensor& tensor, int peer,
              int tag);

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override { return peer_; }

 private:
  friend class Messages;
  void advance();

  const std::shared_ptr<State> state_;
  const bool sends_;
  at::Tensor tensor_;
  at::Tensor memory_;
  int peer_;  // of a receive from any rank: known when it has begun
  const Envelope envelope_;
  std::shared_ptr<Envelope> theirs_;  // of a receive
  comm::Transfer of_envelope_, of_values_;
  Deadline deadline_;
};

/// A message is two of lockstep's: its envelope, and its values. Used by tasks alone.
///
/// A receive from any rank expects an envelope from each, and takes the values of the first one that comes; the next
/// receives from the others use the envelopes that are expected already. So do the parts of an all-to-all, which have
/// envelopes for that reason.
class Messages {
 public:
  static constexpr int kAnyRank = -1;

  explicit Messages(State& state);

  /// ProcessGroup::all_to_all_host(). Without `all` pairs of ranks that have nothing for each other do not talk.
  void all_to_all(const void* from, const std::vector<std::size_t>& from_counts, void* to,
                  const std::vector<std::size_t>& to_counts, DType dtype, bool all);

  void start(const c10::intrusive_ptr<MessageWork>& work);
  /// Completes what can be completed; whether there is more to come.
  bool advance();
  /// Collective: before the group's shutdown(). Throws UsageError while messages are under way.
  void end();

 private:
  struct Expected {
    std::shared_ptr<Envelope> envelope;  // nullptr: none is expected
    comm::Transfer transfer;
  };
  /// The envelope that comes next from `rank`.
  Expected take_expected(int rank);
  void begin(MessageWork& work);
  void begin_from_any();
  /// Whether it is over, well or not.
  bool finish_if_done(MessageWork& work);
  void end(MessageWork& work, const std::exception_ptr& error);

  State& state_;
  std::list<c10::intrusive_ptr<MessageWork>> begun_;
  std::deque<c10::intrusive_ptr<MessageWork>> from_any_;  // that no envelope has come for
  std::vector<Expected> expected_;                        // by rank: envelopes that no receive has yet
};

}  // namespace lockstep::pytorch
