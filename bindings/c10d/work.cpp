#include "bindings/c10d/work.h"

#include "lockstep/base/error.h"

#include <chrono>
#include <string>
#include <utility>

namespace lockstep::pytorch {

std::exception_ptr as_torch_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& thrown) {
    std::string text = thrown.line();
    const std::string flag = "--timeout-seconds";
    for (auto at = text.find(flag); at != std::string::npos; at = text.find(flag))
      text.replace(at, flag.size(), "the timeout of init_process_group()");
    return std::make_exception_ptr(
        c10::DistBackendError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, text));
  } catch (...) {
    return error;
  }
}

Work::Work(int rank, ::c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
           std::vector<at::Tensor> outputs)
    : ::c10d::Work(rank, type, title, std::optional<std::vector<at::Tensor>>(inputs)),
      outputs_(std::move(outputs)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

void Work::complete(const std::exception_ptr& error) {
  if (error != nullptr)
    future_->setError(error);
  else
    future_->markCompleted(c10::IValue(outputs_));
  finish(error);
}

// ---- The queue ----

struct TaskQueue::Shared {
  std::mutex mutex;  // of kCaller: held while a task runs
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  std::vector<c10::intrusive_ptr<::c10d::Work>> retired;
  bool ends = false;

  /// Of a caller: destroys what is retired, without the lock, which the thread may want.
  void clear() {
    decltype(retired) old;
    {
      const std::lock_guard lock(mutex);
      old.swap(retired);
    }
  }
};

TaskQueue::TaskQueue(RunsOn where, std::function<bool()> idle) : shared_(std::make_shared<Shared>()) {
  if (where == RunsOn::kCaller) return;
  // It keeps what it uses: a process may end, or give the group up, while a task waits for other hosts.
  thread_ = std::thread([shared = shared_, idle = std::move(idle)] {
    constexpr auto kPause = std::chrono::microseconds(50);
    std::unique_lock lock(shared->mutex);
    const auto has_news = [&] { return shared->ends || !shared->tasks.empty(); };
    for (;;) {
      while (!has_news()) {
        lock.unlock();
        const bool again = idle();
        lock.lock();
        if (again)
          shared->changed.wait_for(lock, kPause, has_news);
        else
          shared->changed.wait(lock, has_news);
      }
      if (shared->ends) return;
      {
        const auto task = std::move(shared->tasks.front());
        shared->tasks.pop_front();
        lock.unlock();
        task();
      }
      lock.lock();
    }
  });
}

TaskQueue::~TaskQueue() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->ends = true;
    shared_->tasks.clear();
    shared_->changed.notify_all();
  }
  shared_->clear();
  thread_.detach();
}

void TaskQueue::retire(c10::intrusive_ptr<::c10d::Work> work) {
  if (!thread_.joinable()) return;  // the task's caller is one
  const std::lock_guard lock(shared_->mutex);
  shared_->retired.push_back(std::move(work));
}

void TaskQueue::run(std::function<void()> task) {
  if (!thread_.joinable()) {
    const std::lock_guard lock(shared_->mutex);
    task();
    return;
  }
  shared_->clear();
  const std::lock_guard lock(shared_->mutex);
  shared_->tasks.push_back(std::move(task));
  shared_->changed.notify_all();
}

void TaskQueue::run_last(const std::function<void()>& task) {
  if (!thread_.joinable()) return run(task);
  run([this, &task] {
    task();
    const std::lock_guard lock(shared_->mutex);
    shared_->ends = true;
  });
  thread_.join();
  shared_->clear();
}

}  // namespace lockstep::pytorch
