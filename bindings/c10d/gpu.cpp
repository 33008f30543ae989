#include "bindings/c10d/gpu.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

#include "lockstep/base/device.h"
#include "lockstep/base/error.h"

namespace lockstep::pytorch {
namespace {

using c10::impl::VirtualGuardImpl;

constexpr auto kLookEvery = std::chrono::milliseconds(100);
// Between two looks of a wait with a timeout.
constexpr auto kNap = std::chrono::microseconds(100);

/// A stream as CUDA's own library has it. PyTorch 2.11 says it here; in 2.7 only the part of it that is
/// linked with CUDA did.
template <class Guard>
constexpr bool kHasHandles = requires(const Guard& guard, c10::Stream stream) {
  guard.getStreamNativeHandle(stream);
};

template <class Guard>
void* handle_of(const Guard& guard, c10::Stream stream) {
  if constexpr (kHasHandles<Guard>)
    return guard.getStreamNativeHandle(stream);
  else
    return nullptr;  // never: why_not()
}

}  // namespace

// ---- Works ----

bool GpuWork::isCompleted() { return exception() != nullptr || done_.query(); }

bool GpuWork::isSuccess() const { return Work::isSuccess() && done_.query(); }

void GpuWork::synchronize() { done_.block(VirtualGuardImpl(device_.type()).getStream(device_)); }

bool GpuWork::wait(std::chrono::milliseconds timeout) {
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
  if (timeout != kNoTimeout) {
    const auto deadline = Deadline::after(timeout);
    while (!done_.query()) {
      TORCH_CHECK_WITH(DistBackendError, !deadline.expired(), "rank ", rank_, ": an operation on ", device_,
                       " is not done after ", timeout.count(),
                       " ms → look at the logs of all ranks; if they are only slow, wait longer");
      std::this_thread::sleep_for(kNap);
    }
  }
  synchronize();
  return true;
}

// ---- Operations ----

std::string GpuOperations::why_not() {
  if (!kHasHandles<VirtualGuardImpl>)
    return "it was compiled for a PyTorch that does not say which its streams are (2.11 does)";
  if (!probe_cuda().built) return "it was built without CUDA";
  return {};
}

GpuOperations::GpuOperations(std::unique_ptr<comm::ProcessGroup> control, c10::Device device)
    : device_(device),
      stream_(VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      control_(std::move(control)) {
  const c10::StreamGuard guard(stream_);  // the device is this thread's then, which a communicator is made on
  group_ = comm::make_device_group(
      *control_, {.device = device.index(), .producer = {handle_of(VirtualGuardImpl(device.type()), stream_)}});
}

std::shared_ptr<GpuOperations> GpuOperations::join(std::unique_ptr<comm::ProcessGroup> control, c10::Device device) {
  const std::shared_ptr<GpuOperations> made(new GpuOperations(std::move(control), device));
  std::thread([made] { made->watch(); }).detach();
  return made;
}

void GpuOperations::issue(c10::intrusive_ptr<GpuWork> work, const std::vector<at::Tensor>& inputs,
                          std::chrono::milliseconds timeout, const Body& body) {
  const c10::Stream caller = VirtualGuardImpl(device_.type()).getStream(device_);
  const c10::StreamGuard guard(stream_);
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(group_ != nullptr, kEnded);
    try {
      const at::NoGradGuard no_grad;
      c10::Event ready(device_.type());
      ready.record(caller);
      ready.block(stream_);
      // Their memory is given to nobody else before this stream is done with it.
      for (const at::Tensor& tensor : inputs) tensor.record_stream(stream_);
      for (const at::Tensor& tensor : work->result()) tensor.record_stream(stream_);
      group_->set_timeout(timeout);
      body(*group_);
      work->done_.record(stream_);
      under_way_.push_back({group_->last(), Deadline::after(timeout)});
      changed_.notify_all();
    } catch (...) {
      failed_ = true;
      error = as_torch_error(std::current_exception());
    }
  }
  work->complete(error);  // under no lock, and with the stream current, after which the future's callbacks come
}

bool GpuOperations::failed() {
  const std::lock_guard lock(mutex_);
  return failed_;
}

void GpuOperations::end(Deadline deadline) {
  const std::lock_guard lock(mutex_);
  if (group_ == nullptr) return;
  const auto group = std::move(group_);
  changed_.notify_all();
  set_timeout(*group, deadline);
  set_timeout(*control_, deadline);
  group->shutdown();
  control_->shutdown();
}

void GpuOperations::abandon() {
  const std::lock_guard lock(mutex_);
  group_.reset();
  changed_.notify_all();
}

/// The thread's.
void GpuOperations::watch() {
  std::unique_lock lock(mutex_);
  while (group_ != nullptr) {
    if (under_way_.empty())
      changed_.wait(lock, [&] { return group_ == nullptr || !under_way_.empty(); });
    else
      changed_.wait_for(lock, kLookEvery, [&] { return group_ == nullptr; });
    if (group_ == nullptr || failed_) continue;
    try {
      group_->poll();
      while (!under_way_.empty() && under_way_.front().work.done()) under_way_.pop_front();
      if (!under_way_.empty() && under_way_.front().deadline.expired())
        under_way_.front().work.wait_host(Deadline::after({}));  // says who is missing
    } catch (const std::exception& error) {
      give_up(error);
    }
  }
}

void GpuOperations::give_up(const std::exception& error) {
  const auto* const ours = dynamic_cast<const Error*>(&error);
  std::fprintf(stderr, "lockstep: %s\nlockstep: tensors on the GPU may be wrong since then: this process ends\n",
               ours != nullptr ? ours->line().c_str() : error.what());
  std::fflush(stderr);
  std::_Exit(static_cast<int>(ExitCode::kTimeout));
}

}  // namespace lockstep::pytorch
