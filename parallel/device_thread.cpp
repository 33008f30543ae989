#include "lockstep/parallel/device_thread.h"

#include <pthread.h>

#include <ctime>
#include <utility>

#include "base/error.h"
#include "base/signals.h"

namespace lockstep::parallel {
namespace {

std::chrono::nanoseconds read_clock(clockid_t clock) {
  timespec now{};
  ::clock_gettime(clock, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

}  // namespace

DeviceThread::DeviceThread(nn::Backend& backend) : backend_(backend), thread_(start_thread([this] { run(); })) {}

DeviceThread::~DeviceThread() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !work_; });
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void DeviceThread::start(FunctionRef<void(std::size_t)> work, std::size_t index) {
  {
    const std::lock_guard lock(mutex_);
    LOCKSTEP_ASSERT(!work_, "a device's thread has work already");
    work_ = work;
    index_ = index;
    giver_ = this_thread();
  }
  changed_.notify_all();
}

std::exception_ptr DeviceThread::finish() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !work_; });
  return std::exchange(error_, nullptr);
}

void DeviceThread::run() {
  backend_.move_to_this_thread();
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return work_ || ends_; });
    if (!work_) return;
    lock.unlock();
    std::exception_ptr error;
    try {
      const ActsFor giver(giver_);
      (*work_)(index_);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    error_ = std::move(error);
    work_.reset();
    changed_.notify_all();
  }
}

std::chrono::nanoseconds DeviceThread::cpu_time() {
  clockid_t clock{};
  if (::pthread_getcpuclockid(thread_.native_handle(), &clock) != 0) return {};
  return read_clock(clock);
}

std::chrono::nanoseconds cpu_time_of_this_thread() { return read_clock(CLOCK_THREAD_CPUTIME_ID); }

}  // namespace lockstep::parallel
