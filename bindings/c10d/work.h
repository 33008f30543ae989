// Operations under way, as c10d has them.
#pragma once

#include "lockstep/comm.h"

#include <torch/types.h>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace lockstep::pytorch {

/// An error as Python has it: torch.distributed.DistBackendError with lockstep's line, "what → remedy".
std::exception_ptr as_torch_error(const std::exception_ptr& error);

/// What is said of operations after the end.
inline constexpr const char* kEnded =
    "lockstep: the group has been destroyed → issue nothing after destroy_process_group() or abort";

/// How long the group's waits that begin now last: until `deadline`.
void set_timeout(comm::ProcessGroup& group, Deadline deadline);

/// An operation whose end somebody else says. Its future has the output tensors; an error is thrown by wait(), and is
/// the future's.
class Work : public ::c10d::Work {
 public:
  Work(int rank, ::c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
       std::vector<at::Tensor> outputs);

  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  /// Once, and under no lock. Callbacks of the future run here: they take Python's lock, and issue and await
  /// operations.
  void complete(const std::exception_ptr& error = nullptr);

 private:
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

using Body = std::function<void(comm::ProcessGroup&)>;

/// What the backend's threads have finished with, until a thread of the program destroys it: releasing a tensor takes
/// Python's lock, and a thread that asks for that while the interpreter ends does not return. Thread-safe.
class Retired {
 public:
  /// While one lives, the calling thread is one of the backend's.
  class OnThread {
   public:
    OnThread();
    ~OnThread();
    OnThread(const OnThread&) = delete;
    OnThread& operator=(const OnThread&) = delete;
  };

  Retired() = default;
  /// What is left stays for as long as the process does: a thread of the backend's is the last owner.
  ~Retired();
  Retired(const Retired&) = delete;
  Retired& operator=(const Retired&) = delete;

  void add(c10::intrusive_ptr<::c10d::Work> work);
  void add(Body body);
  /// Destroys it all, unless a thread of the backend's calls. The caller has no lock.
  void clear();

 private:
  std::mutex mutex_;
  std::vector<c10::intrusive_ptr<::c10d::Work>> works_;
  std::vector<Body> bodies_;
};

/// A group's collectives, one at a time, in the order in which they come. Thread-safe.
///
/// Note [Callbacks]
/// A callback of an operation's future may issue operations and wait for them, as PyTorch's communication hooks do
/// (PowerSGD). If a thread runs the operations, it also runs the callback. It then runs the callback's operations at
/// once, before the queued ones. So they come right after the operation of the callback. The same holds if that
/// operation was complete before the callback was added, so all ranks have one order.
class Operations : public std::enable_shared_from_this<Operations> {
 public:
  /// On the thread that issues them, which waits meanwhile: where every rank moves its own operations on, another
  /// thread would only take the core from it. Or on a thread of their own: where other hosts are waited for.
  enum class RunsOn { kCaller, kThread };

  static std::shared_ptr<Operations> of(std::unique_ptr<comm::ProcessGroup> group);
  Operations(std::unique_ptr<comm::ProcessGroup> group, RunsOn where);

  /// `body` does the operation, and throws what goes wrong. Throws c10::Error when the end has begun.
  void issue(c10::intrusive_ptr<Work> work, std::chrono::milliseconds timeout, Body body);
  /// Whether an operation has failed.
  bool failed() const { return failed_; }

  /// Whether allocate() has memory that all ranks see, in which they reduce without copies.
  bool shares_memory() const { return where_ == RunsOn::kCaller && group_->size() > 1; }
  /// Collective: `size` elements of it. Where there is too little, with a warning, memory of this process. Throws
  /// c10::DistBackendError.
  at::Tensor allocate(std::int64_t size, const at::TensorOptions& options);

  /// Work of the calling thread while it waits for `work`, one of these: in a callback (Note [Callbacks]) it runs
  /// queued operations; elsewhere it destroys finished ones.
  void help(Work& work);

  /// Runs `last`, which throws nothing, after all that have been issued, and returns when it is done. false: it had not
  /// begun by `deadline`, or not ended a little later, and nobody waits for it. The first call counts.
  bool end(Deadline deadline, Body last);
  /// Nothing is issued any more. What has not begun fails with `error`; nobody waits for what has.
  void abandon(const std::exception_ptr& error);

 private:
  enum class Phase { kRunning, kEnding, kEnded };
  struct Operation {
    c10::intrusive_ptr<Work> work;
    std::chrono::milliseconds timeout;
    Body body;
  };

  std::exception_ptr run(const Operation& operation);
  void check_running() const;
  // The thread's:
  bool is_own_thread() const;
  void serve();
  bool run_next();
  void run_last();
  void run_and_complete(Operation operation);

  const std::unique_ptr<comm::ProcessGroup> group_;
  const RunsOn where_;
  std::atomic<bool> failed_{false};
  std::timed_mutex in_use_;  // of kCaller: held while an operation runs

  std::mutex mutex_;  // for moments
  std::condition_variable changed_;
  Phase phase_ = Phase::kRunning;
  std::deque<Operation> queued_;
  Body last_;
  Retired retired_;
  std::vector<std::unique_ptr<comm::Arena>> released_;  // of tensors that are gone: until somebody has in_use_
};

/// One of these.
class CollectiveWork final : public Work {
 public:
  CollectiveWork(const std::shared_ptr<Operations>& operations, int rank, ::c10d::OpType type, const char* title,
                 const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> outputs)
      : Work(rank, type, title, inputs, std::move(outputs)), operations_(operations) {}

  bool wait(std::chrono::milliseconds timeout) override;

 private:
  const std::weak_ptr<Operations> operations_;
};

}  // namespace lockstep::pytorch
