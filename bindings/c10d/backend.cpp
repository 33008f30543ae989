#include "bindings/c10d/backend.h"

#include <algorithm>
#include <exception>
#include <span>
#include <utility>

#include "bindings/c10d/store.h"
#include "bindings/c10d/tensors.h"

namespace lockstep::pytorch {
namespace {

// How long destroy_process_group() waits for ranks that have not come to it.
constexpr std::chrono::milliseconds kEndWithin = std::chrono::seconds(60);

/// The timeout of one operation.
class TimeoutOf {
 public:
  TimeoutOf(comm::ProcessGroup& group, std::chrono::milliseconds timeout) : group_(group), usual_(group.timeout()) {
    if (timeout.count() > 0) group_.set_timeout(timeout);
  }
  ~TimeoutOf() { group_.set_timeout(usual_); }
  TimeoutOf(const TimeoutOf&) = delete;
  TimeoutOf& operator=(const TimeoutOf&) = delete;

 private:
  comm::ProcessGroup& group_;
  const Clock::duration usual_;
};

}  // namespace

std::shared_ptr<State> Backend::join(c10::intrusive_ptr<::c10d::Store> store, int rank, int size,
                                     const Settings& settings) {
  std::unique_ptr<comm::ProcessGroup> group;
  try {
    group = comm::make_group(rank, size, over_store(std::move(store)),
                             {.timeout_seconds = std::chrono::duration<double>(settings.timeout).count(),
                              .stall_warning_seconds = settings.stall_warning_seconds,
                              .progress = comm::GroupOptions::Progress::kInline,
                              .encrypt = settings.encrypt},
                             settings.job_ranks);
    // The memory that tensors go through is allocated by the first operation: messages about the program's name theirs.
    if (size > 1) group->all_reduce(std::span<float>());
  } catch (const Error&) {
    std::rethrow_exception(as_torch_error(std::current_exception()));
  }
  return State::make(std::move(group));
}

Backend::Backend(c10::intrusive_ptr<::c10d::Store> store, int rank, int size, const Settings& settings)
    : ::c10d::Backend(rank, size), settings_(settings), state_(join(std::move(store), rank, size, settings)) {
  init();
}

c10::intrusive_ptr<Backend::Options> Backend::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), settings_.timeout);
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  state_->queue->run([state = state_, timeout] { state->group->set_timeout(timeout); });
}

WorkPtr Backend::submit(::c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
                        std::vector<at::Tensor> outputs, std::chrono::milliseconds timeout, Body body) {
  ++sequence_;
  auto work = c10::make_intrusive<Work>(getRank(), type, title, inputs, std::move(outputs));
  state_->queue->run([state = state_, work, timeout, body = std::move(body)]() mutable {
    std::exception_ptr error;
    try {
      const at::NoGradGuard no_grad;
      const TimeoutOf scope(*state->group, timeout);
      body(*state->group);
    } catch (...) {
      state->failed = true;
      error = as_torch_error(std::current_exception());
    }
    // The last that this task does with tensors.
    body = nullptr;
    state->queue->retire(work);
    std::exchange(work, {})->complete(error);
  });
  return work;
}

void Backend::shutdown() {
  state_->queue->run_last([&] {
    comm::ProcessGroup& group = *state_->group;
    if (state_->failed.exchange(true)) return;
    try {
      const TimeoutOf scope(group, std::min<std::chrono::milliseconds>(settings_.timeout, kEndWithin));
      state_->messages->end();
      group.shutdown();
    } catch (const TimeoutError& error) {
      TORCH_WARN("lockstep: ", error.what(), " → call destroy_process_group() on all ranks");
    } catch (const Error&) {
      // Another rank has ended without it, which is its right.
    }
  });
}

WorkPtr Backend::submit_message(::c10d::OpType type, const char* title, const std::vector<at::Tensor>& tensors,
                                int peer, int tag) {
  TORCH_CHECK(tensors.size() == 1, title, " of ", tensors.size(), " tensors, where lockstep's backend takes one");
  check_tensor(tensors[0], title);
  TORCH_CHECK(peer == Messages::kAnyRank || (peer >= 0 && peer < getSize() && peer != getRank()), title, " names rank ",
              peer, " of a group of ", getSize(), ", where this is rank ", getRank());
  auto work = c10::make_intrusive<MessageWork>(state_, type, title, tensors[0], peer, tag);
  state_->queue->run([state = state_, work] { state->messages->start(work); });
  return work;
}

void Backend::check_root(std::int64_t root, const char* doing) const {
  TORCH_CHECK(root >= 0 && root < getSize(), doing, " names rank ", root, " of a group of ", getSize());
}

WorkPtr Backend::send(std::vector<at::Tensor>& tensors, int to, int tag) {
  return submit_message(::c10d::OpType::SEND, "lockstep:send", tensors, to, tag);
}
WorkPtr Backend::recv(std::vector<at::Tensor>& tensors, int from, int tag) {
  return submit_message(::c10d::OpType::RECV, "lockstep:recv", tensors, from, tag);
}
WorkPtr Backend::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  return submit_message(::c10d::OpType::RECVANYSOURCE, "lockstep:recvAnySource", tensors, Messages::kAnyRank, tag);
}

}  // namespace lockstep::pytorch
