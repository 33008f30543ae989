// Operations under way, as c10d has them.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace lockstep::pytorch {

/// An error as Python has it: torch.distributed.DistBackendError with lockstep's line, "what → remedy".
std::exception_ptr as_torch_error(const std::exception_ptr& error);

/// An operation whose end somebody else says. Its future has the output tensors; an error is thrown by wait(), and is
/// the future's.
class Work : public ::c10d::Work {
 public:
  Work(int rank, ::c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
       std::vector<at::Tensor> outputs);

  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  /// Once. Callbacks of the future run here.
  void complete(const std::exception_ptr& error = nullptr);

 private:
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// Runs a group's tasks one after the other, in the order in which they come: c10d's calls come from any thread, and a
/// group is used by one at a time. Tasks throw nothing.
class TaskQueue {
 public:
  /// On the thread that brings them, which waits meanwhile: where every rank moves its own operations on, another
  /// thread would only take the core from it. Or on a thread of the queue: where other hosts are waited for.
  enum class RunsOn { kCaller, kThread };
  /// `idle`, of a thread: called again and again while there is no task, for as long as it returns true.
  TaskQueue(RunsOn where, std::function<bool()> idle);
  /// Tasks that have not begun are dropped, and nobody is waited for.
  ~TaskQueue();
  TaskQueue(const TaskQueue&) = delete;
  TaskQueue& operator=(const TaskQueue&) = delete;

  RunsOn where() const { return thread_.joinable() ? RunsOn::kThread : RunsOn::kCaller; }
  void run(std::function<void()> task);
  /// For tasks: the caller of the next run() destroys it. Releasing a tensor takes Python's lock, and a thread that
  /// asks for that while the interpreter ends does not return.
  void retire(c10::intrusive_ptr<::c10d::Work> work);
  /// Runs `task` after all others, and returns when it is done. No others come afterwards.
  void run_last(const std::function<void()>& task);

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

}  // namespace lockstep::pytorch
