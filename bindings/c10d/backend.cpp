#include "bindings/c10d/backend.h"

#include <algorithm>
#include <exception>
#include <span>
#include <string>
#include <utility>

#include "bindings/c10d/store.h"
#include "bindings/c10d/tensors.h"

namespace lockstep::pytorch {
namespace {

// How long destroy_process_group() waits for what is under way, and for ranks that have not come to it.
constexpr std::chrono::milliseconds kEndWithin = std::chrono::seconds(60);

std::exception_ptr given_up(const char* what) {
  return as_torch_error(std::make_exception_ptr(UsageError(what, "wait for all operations before")));
}

/// What the caller is to be warned of, if anything, when `end` has ended groups in order.
std::string warning_of(FunctionRef<void()> end) {
  try {
    end();
  } catch (const TimeoutError& error) {
    return std::string(error.what()) + " → call destroy_process_group() on all ranks";
  } catch (const DeviceError&) {
    // Another rank has ended without it, which is its right.
  } catch (const PeerError&) {
  } catch (const Error& error) {
    return error.line();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

}  // namespace

std::unique_ptr<comm::ProcessGroup> Backend::join_once_more() {
  return comm::make_group(getRank(), getSize(), store_,
                          {.timeout_seconds = std::chrono::duration<double>(settings_.timeout).count(),
                           .stall_warning_seconds = settings_.stall_warning_seconds,
                           .progress = comm::GroupOptions::Progress::kInline,
                           .encrypt = settings_.encrypt},
                          settings_.job_ranks);
}

Backend::Backend(c10::intrusive_ptr<::c10d::Store> store, int rank, int size, const Settings& settings)
    : ::c10d::Backend(rank, size),
      store_(over_store(std::move(store))),
      settings_(settings),
      timeout_(settings.timeout) {
  try {
    auto group = join_once_more();
    if (getSize() > 1) {
      messages_ = std::make_shared<Messages>(join_once_more());
      // The memory that tensors go through is allocated by the first operation: messages about the program's name
      // theirs.
      group->all_reduce(std::span<float>());
    }
    operations_ = Operations::of(std::move(group));
  } catch (const Error&) {
    std::rethrow_exception(as_torch_error(std::current_exception()));
  }
  init();
}

Backend::~Backend() {
  if (const auto gpu = end_of_gpu()) gpu->abandon();
  const auto error = given_up("the group is gone, and this operation had not been done");
  if (operations_ != nullptr) operations_->abandon(error);
  if (messages_ != nullptr) messages_->abandon(error);
}

c10::intrusive_ptr<Backend::Options> Backend::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), timeout_);
}

void Backend::setTimeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

/// A CPU has the index -1.
bool Backend::supportsTensorAlloc(c10::DeviceIndex device) { return device < 0 && operations_->shares_memory(); }

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  check_process();
  TORCH_CHECK(options.device().is_cpu() && operations_->shares_memory(), "lockstep allocates no tensors on ",
              options.device(), options.device().is_cpu() ? " for ranks of several hosts" : "");
  return operations_->allocate(size, options);
}

WorkPtr Backend::submit(::c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
                        std::vector<at::Tensor> outputs, std::chrono::milliseconds timeout, Body body) {
  const at::Tensor first = !inputs.empty() ? inputs[0] : !outputs.empty() ? outputs[0] : at::Tensor();
  if (!first.defined() || !first.is_cuda())
    return submit_on_host(type, title, inputs, std::move(outputs), timeout, std::move(body));
  check_process();
  ++sequence_;
  const auto gpu = gpu_operations(first.device());
  auto work = c10::make_intrusive<GpuWork>(getRank(), type, title, inputs, std::move(outputs), first.device());
  gpu->issue(work, inputs, limit_of(timeout), body);
  return work;
}

WorkPtr Backend::submit_on_host(::c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
                                std::vector<at::Tensor> outputs, std::chrono::milliseconds timeout, Body body) {
  check_process();
  ++sequence_;
  auto work = c10::make_intrusive<CollectiveWork>(operations_, getRank(), type, title, inputs, std::move(outputs));
  operations_->issue(work, limit_of(timeout), std::move(body));
  return work;
}

std::chrono::milliseconds Backend::limit_of(std::chrono::milliseconds timeout) const {
  return timeout.count() > 0 ? timeout : timeout_.load();
}

/// Joins them when the first tensor on a GPU comes.
std::shared_ptr<GpuOperations> Backend::gpu_operations(c10::Device device) {
  const std::lock_guard lock(gpu_mutex_);
  TORCH_CHECK(!gpu_ended_, kEnded);
  if (gpu_ == nullptr) try {
      gpu_ = GpuOperations::join(join_once_more(), device);
    } catch (const Error&) {
      std::rethrow_exception(as_torch_error(std::current_exception()));
    }
  TORCH_CHECK(gpu_->device() == device, "a tensor on ", device, ", in a group whose first one on this rank was on ",
              gpu_->device(), " → each rank has one GPU: torch.cuda.set_device(int(os.environ[\"LOCAL_RANK\"]))");
  return gpu_;
}

/// Nothing is issued there any more. nullptr: there was nothing.
std::shared_ptr<GpuOperations> Backend::end_of_gpu() {
  const std::lock_guard lock(gpu_mutex_);
  gpu_ended_ = true;
  return gpu_;
}

void Backend::shutdown() {
  if (forks_ != forks()) return;  // it is its parent's, whose threads are not here
  const auto deadline = std::min(Deadline::after(kEndWithin), Deadline::after(timeout_.load()),
                                 [](Deadline a, Deadline b) { return a.when() < b.when(); });
  const auto warning = std::make_shared<std::string>();
  const auto gpu = end_of_gpu();
  if (gpu != nullptr && !gpu->failed()) *warning = warning_of([&] { gpu->end(deadline); });
  if (gpu != nullptr) gpu->abandon();
  const bool ended = operations_->end(
      deadline, [warning, operations = operations_.get(), messages = messages_, deadline](comm::ProcessGroup& group) {
        if (operations->failed() || (messages != nullptr && messages->failed()) || !warning->empty()) return;
        *warning = warning_of([&] {
          set_timeout(group, deadline);
          if (messages != nullptr) messages->end(group, deadline);
          set_timeout(group, deadline);
          group.shutdown();
        });
      });
  const auto error = given_up("the group has been destroyed, and this operation had not been done");
  operations_->abandon(error);
  if (messages_ != nullptr) messages_->abandon(error);
  const std::string text = ended ? *warning
                                 : "the group is destroyed while an operation is under way, which ends by its own "
                                   "timeout → wait for all operations before destroy_process_group()";
  if (!text.empty()) TORCH_WARN("lockstep: ", text);
}

void Backend::abort() {
  if (forks_ != forks()) return;
  if (const auto gpu = end_of_gpu()) gpu->abandon();
  const auto error = given_up("the group has been aborted, and this operation had not been done");
  operations_->abandon(error);
  if (messages_ != nullptr) messages_->abandon(error);
}

WorkPtr Backend::submit_message(::c10d::OpType type, const char* title, const std::vector<at::Tensor>& tensors,
                                int peer, int tag) {
  check_process();
  TORCH_CHECK(tensors.size() == 1, title, " of ", tensors.size(), " tensors, where lockstep's backend takes one");
  check_tensor(tensors[0], title);
  TORCH_CHECK(messages_ != nullptr, title, " in a group of one rank");
  TORCH_CHECK(type == ::c10d::OpType::RECVANYSOURCE || (peer >= 0 && peer < getSize() && peer != getRank()), title,
              " names rank ", peer, " of a group of ", getSize(), ", where this is rank ", getRank());
  auto work =
      c10::make_intrusive<MessageWork>(messages_, getRank(), type, title, tensors[0], peer, tag, timeout_.load());
  messages_->start(work);
  return work;
}

void Backend::check_process() const {
  TORCH_CHECK(forks_ == forks(),
              "an operation in a forked process, on a group that was made before → make a group in the "
              "process that uses it, or start that process by \"spawn\"");
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
