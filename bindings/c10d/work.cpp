#include "bindings/c10d/work.h"

#include "lockstep/base/error.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

namespace lockstep::pytorch {
namespace {

// What end() allows the last operation to come to its end in, when its waits have ended.
constexpr std::chrono::seconds kLastEndsWithin{2};

/// Whose streams a future of these has to do with.
std::vector<c10::Device> gpus_of(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> gpus;
  for (const at::Tensor& tensor : tensors)
    if (tensor.is_cuda()) gpus.push_back(tensor.device());
  return gpus;
}

thread_local int of_the_backend = 0;
thread_local const Operations* served_here = nullptr;

}  // namespace

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

void set_timeout(comm::ProcessGroup& group, Deadline deadline) {
  group.set_timeout(std::max<Clock::duration>(deadline.remaining(), std::chrono::milliseconds(1)));
}

Work::Work(int rank, ::c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
           std::vector<at::Tensor> outputs)
    : ::c10d::Work(rank, type, title, std::optional<std::vector<at::Tensor>>(inputs)),
      outputs_(std::move(outputs)),
      future_(
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), gpus_of(outputs_))) {}

void Work::complete(const std::exception_ptr& error) {
  if (error != nullptr)
    future_->setError(error);
  else
    future_->markCompleted(c10::IValue(outputs_));
  finish(error);
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  const auto operations = operations_.lock();
  if (operations != nullptr) operations->help(*this);
  const bool done = Work::wait(timeout);
  if (operations != nullptr) operations->help(*this);
  return done;
}

// ---- What is to be destroyed ----

Retired::OnThread::OnThread() { ++of_the_backend; }
Retired::OnThread::~OnThread() { --of_the_backend; }

Retired::~Retired() {
  if (!works_.empty()) new auto(std::move(works_));
  if (!bodies_.empty()) new auto(std::move(bodies_));
}

void Retired::add(c10::intrusive_ptr<::c10d::Work> work) {
  const std::lock_guard lock(mutex_);
  works_.push_back(std::move(work));
}

void Retired::add(Body body) {
  const std::lock_guard lock(mutex_);
  bodies_.push_back(std::move(body));
}

void Retired::clear() {
  if (of_the_backend > 0) return;
  decltype(works_) works;
  decltype(bodies_) bodies;
  const std::lock_guard lock(mutex_);  // let go before these are destroyed
  works.swap(works_);
  bodies.swap(bodies_);
}

// ---- Operations ----

std::shared_ptr<Operations> Operations::of(std::unique_ptr<comm::ProcessGroup> group) {
  const bool moves_itself = group->size() == 1 || group->sees_all_copies();
  const auto made = std::make_shared<Operations>(std::move(group), moves_itself ? RunsOn::kCaller : RunsOn::kThread);
  // It keeps what it uses: a process may end, or give the group up, while an operation waits for other hosts.
  if (!moves_itself) std::thread([made] { made->serve(); }).detach();
  return made;
}

Operations::Operations(std::unique_ptr<comm::ProcessGroup> group, RunsOn where)
    : group_(std::move(group)), where_(where) {}

void Operations::check_running() const {
  TORCH_CHECK(phase_ == Phase::kRunning || (phase_ == Phase::kEnding && is_own_thread()), kEnded);
}

void Operations::issue(c10::intrusive_ptr<Work> work, std::chrono::milliseconds timeout, Body body) {
  retired_.clear();
  Operation operation{std::move(work), timeout, std::move(body)};
  if (where_ == RunsOn::kCaller) {
    std::exception_ptr error;
    {
      const std::lock_guard use(in_use_);
      {
        const std::lock_guard lock(mutex_);
        check_running();
      }
      error = run(operation);
    }
    operation.work->complete(error);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    check_running();
    if (!is_own_thread()) {
      queued_.push_back(std::move(operation));
      changed_.notify_all();
      return;
    }
  }
  run_and_complete(std::move(operation));  // Note [Callbacks]
}

std::exception_ptr Operations::run(const Operation& operation) {
  try {
    const at::NoGradGuard no_grad;
    group_->set_timeout(operation.timeout);
    operation.body(*group_);
    return nullptr;
  } catch (...) {
    failed_ = true;
    return as_torch_error(std::current_exception());
  }
}

at::Tensor Operations::allocate(std::int64_t size, const at::TensorOptions& options) {
  const std::lock_guard use(in_use_);
  decltype(released_) released;
  {
    const std::lock_guard lock(mutex_);
    check_running();
    released.swap(released_);
  }
  released.clear();
  std::unique_ptr<comm::Arena> arena;
  try {
    arena = group_->allocate(static_cast<std::size_t>(size) * options.dtype().itemsize());
  } catch (const Error& error) {
    if (error.code() != static_cast<int>(ExitCode::kDevice))
      std::rethrow_exception(as_torch_error(std::current_exception()));
    TORCH_WARN("lockstep: buckets are copied into shared memory in each step: ", error.line());
  }
  if (arena == nullptr || size == 0) return at::empty({size}, options);
  void* const data = arena->data();
  // Whoever lets go of the tensor may do so on any thread, and an arena is the group's user's to destroy.
  const auto release = [self = shared_from_this(), arena = arena.release()](void*) {
    const std::lock_guard lock(self->mutex_);
    self->released_.emplace_back(arena);
  };
  return at::from_blob(data, {size}, release, options.requires_grad(false));
}

void Operations::help(Work& work) {
  if (!is_own_thread()) return retired_.clear();
  while (!work.isCompleted() && run_next()) continue;
}

bool Operations::end(Deadline deadline, Body last) {
  if (where_ == RunsOn::kCaller) {
    std::unique_lock use(in_use_, deadline.when());
    {
      const std::lock_guard lock(mutex_);
      if (std::exchange(phase_, Phase::kEnded) != Phase::kRunning) return true;
    }
    if (!use.owns_lock()) return false;
    last(*group_);
    return true;
  }
  bool ended = true;
  {
    std::unique_lock lock(mutex_);
    if (phase_ != Phase::kRunning) return true;
    phase_ = Phase::kEnding;
    last_ = std::move(last);
    changed_.notify_all();
    if (is_own_thread()) {
      lock.unlock();
      while (run_next()) continue;
      run_last();
    } else {
      ended = changed_.wait_until(lock, deadline.when() + kLastEndsWithin, [&] { return phase_ == Phase::kEnded; });
    }
  }
  retired_.clear();
  return ended;
}

void Operations::abandon(const std::exception_ptr& error) {
  decltype(queued_) dropped;
  {
    const std::lock_guard lock(mutex_);
    phase_ = Phase::kEnded;
    last_ = nullptr;
    dropped.swap(queued_);
    changed_.notify_all();
  }
  if (!dropped.empty()) failed_ = true;
  for (const Operation& operation : dropped) operation.work->complete(error);
  retired_.clear();
}

// ---- The thread ----

bool Operations::is_own_thread() const { return served_here == this; }

void Operations::serve() {
  const Retired::OnThread here;
  served_here = this;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !queued_.empty() || phase_ != Phase::kRunning; });
    }
    if (run_next()) continue;
    run_last();
    return;
  }
}

/// false: there is none.
bool Operations::run_next() {
  std::unique_lock lock(mutex_);
  if (queued_.empty()) return false;
  Operation next = std::move(queued_.front());
  queued_.pop_front();
  lock.unlock();
  run_and_complete(std::move(next));
  return true;
}

void Operations::run_last() {
  std::unique_lock lock(mutex_);
  if (last_ == nullptr) return;
  const Body last = std::exchange(last_, nullptr);
  lock.unlock();
  last(*group_);
  lock.lock();
  phase_ = Phase::kEnded;
  changed_.notify_all();
}

void Operations::run_and_complete(Operation operation) {
  const std::exception_ptr error = run(operation);
  // Before it is complete: who has waited for it destroys the inputs.
  retired_.add(std::move(operation.body));
  operation.work->complete(error);
  retired_.add(std::move(operation.work));
}

}  // namespace lockstep::pytorch
