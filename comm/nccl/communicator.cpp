#include "comm/nccl/communicator.h"

#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "base/cuda/runtime.h"
#include "base/error.h"
#include "base/log.h"
#include "base/signals.h"
#include "comm/wait.h"
#include "lockstep/base/deadline.h"

namespace lockstep::comm {
namespace {

// For a call that starts work NCCL makes a thread. While that is at it, a nap would take longer than it does.
constexpr auto kAwake = std::chrono::microseconds(500);
constexpr auto kEndNap = std::chrono::microseconds(50);
// For which end() waits for abort()'s thread: what ends of itself does so in less.
constexpr auto kAbortPatience = std::chrono::seconds(10);

}  // namespace

struct Communicator::AbortDone {
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;  // guarded by mutex

  void end() {
    const std::lock_guard lock(mutex);
    over = true;
    changed.notify_all();
  }
  bool wait_for(Clock::duration patience) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, patience, [&] { return over; });
  }
};

Communicator::Communicator(const NcclApi& api, int device, int rank, int size)
    : api_(api), device_(device), rank_(rank), size_(size) {}

ncclResult_t Communicator::start_joining(const ncclUniqueId& id) {
  LOCKSTEP_ASSERT(state_ == State::kInitialising && comm_ == nullptr, "a communicator joins twice");
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return api_.comm_init_rank_config(&comm_, size_, id, rank_, &config);
}

void Communicator::end_joining(ncclResult_t result) {
  if (result != ncclSuccess) throw_nccl_error(api_, comm_, result, "joining the ranks by NCCL");
  state_ = State::kReady;
}

void Communicator::join(const ncclUniqueId& id, FunctionRef<void()> look) {
  end_joining(settle(start_joining(id), look));
}

void Communicator::begin_join(const ncclUniqueId& id) {
  const ncclResult_t result = start_joining(id);
  if (result != ncclInProgress) end_joining(result);
}

bool Communicator::has_joined() {
  if (state_ != State::kInitialising) return true;
  const ncclResult_t result = state_of_call();
  if (result == ncclInProgress) return false;
  end_joining(result);
  return true;
}

ncclResult_t Communicator::state_of_call() const {
  ncclResult_t state = ncclInProgress;
  const ncclResult_t asked = api_.comm_get_async_error(comm_, &state);
  return asked == ncclSuccess ? state : asked;
}

ncclResult_t Communicator::settle(ncclResult_t result, FunctionRef<void()> look) {
  const auto ask = [&] {
    result = state_of_call();
    return false;
  };
  const auto sleep = [&](Clock::duration idle) {
    if (idle < kAwake) return std::this_thread::yield();
    look();
    std::this_thread::sleep_for(kEndNap);
  };
  const WaitPolicy policy{.doing = nullptr};  // look() knows what ends it
  wait_until(
      policy, Deadline::never(), [&] { return result != ncclInProgress; }, ask, [](Clock::duration) {}, sleep);
  return result;
}

ncclResult_t Communicator::async_error() const {
  const ncclResult_t state = state_of_call();
  return state == ncclInProgress ? ncclSuccess : state;
}

void Communicator::leave(FunctionRef<void()> look) {
  LOCKSTEP_ASSERT(state_ == State::kReady, "leaving a communicator that is not ready");
  ncclResult_t result = settle(api_.comm_finalize(comm_), look);
  if (result != ncclSuccess) throw_nccl_error(api_, comm_, result, "leaving NCCL");
  // From here on there is nothing that an abort could be given to.
  state_ = State::kLeft;
  result = api_.comm_destroy(std::exchange(comm_, nullptr));
  if (result != ncclSuccess && result != ncclInProgress)
    throw_nccl_error(api_, nullptr, result, "ending NCCL's communicator");
}

void Communicator::abort() noexcept {
  if (state_ == State::kAborted || state_ == State::kLeft) return;
  state_ = comm_ == nullptr ? State::kLeft : State::kAborted;
  if (comm_ == nullptr) return;
  try {
    auto done = std::make_shared<AbortDone>();
    start_thread([&api = api_, comm = comm_, device = device_, done] {
      // A new thread is on the first GPU, where the call would make a context.
      static_cast<void>(cudaSetDevice(device));
      static_cast<void>(api.comm_abort(comm));
      done->end();
    }).detach();
    abort_done_ = std::move(done);
  } catch (const std::exception& error) {
    log_warn("NCCL's communicator could not be aborted: {}", error.what());
  }
}

void Communicator::end() noexcept {
  abort();
  if (abort_done_ != nullptr && !std::exchange(abort_done_, nullptr)->wait_for(kAbortPatience))
    log_warn("NCCL does not release an aborted communicator: this process will end without it");
}

}  // namespace lockstep::comm
