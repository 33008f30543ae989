#include "bindings/torch/module_state.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <unordered_set>

#include "lockstep/base/error.h"
#include "lockstep/comm/arena.h"

namespace lockstep::torch {
namespace {

template <class Dict>
std::vector<NamedTensor> each_once(const Dict& dict) {
  std::vector<NamedTensor> found;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : dict)
    if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second)
      found.push_back({item.key(), item.value()});
  return found;
}

/// A stream as CUDA's own library has it. Not in every version of LibTorch that is taken.
template <class Guard>
void* handle_of(const Guard& guard, c10::Stream stream) {
  if constexpr (requires { guard.getStreamNativeHandle(stream); }) return guard.getStreamNativeHandle(stream);
  throw UsageError(
      "DistributedDataParallel over a group of GPUs, with a LibTorch that does not say which its streams are",
      "take PyTorch 2.11 or newer");
}

std::string text_of(::torch::IntArrayRef numbers) {
  std::string text;
  for (const auto number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return "[" + text + "]";
}

}  // namespace

::torch::Device device_of(const comm::ProcessGroup& group) {
  const Device device = group.device();
  return device.kind == DeviceKind::kCpu ? ::torch::Device(::torch::kCPU)
                                         : ::torch::Device(::torch::kCUDA, static_cast<c10::DeviceIndex>(device.index));
}

// ---- Streams ----

ProducerStream::ProducerStream(const comm::ProcessGroup& group) {
  if (group.device().kind == DeviceKind::kCpu) return;
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  stream_ = guard.getStream(device_of(group));
  check_usage(
      handle_of(guard, *stream_) == group.producer_stream().native,
      "DistributedDataParallel over a group of GPUs whose producer is another stream than the current one",
      "give comm::make_device_group() the current stream (at::cuda::getCurrentCUDAStream().stream()) as producer");
}

ProducerStream::Order::Order(const std::optional<c10::Stream>& stream) {
  if (!stream) return;
  const c10::Stream current = c10::impl::VirtualGuardImpl(stream->device_type()).getStream(stream->device());
  if (current == *stream) return;
  before_ = current;
  c10::Event event(stream->device_type());
  event.record(current);
  event.block(*stream);
  guard_.emplace(*stream);
}

ProducerStream::Order::~Order() {
  if (!before_) return;
  c10::Event event(before_->device_type());
  event.record(guard_->current_stream());
  event.block(*before_);
}

// ---- What a module has ----

std::vector<NamedTensor> parameters_of(const ::torch::nn::Module& module) {
  return each_once(module.named_parameters());
}
std::vector<NamedTensor> buffers_of(const ::torch::nn::Module& module) { return each_once(module.named_buffers()); }

std::string name_of(::torch::Dtype type) {
  switch (type) {
    case ::torch::kFloat32: return "f32";
    case ::torch::kFloat64: return "f64";
    case ::torch::kBFloat16: return "bf16";
    case ::torch::kFloat16: return "f16";
    case ::torch::kInt32: return "i32";
    case ::torch::kInt64: return "i64";
    case ::torch::kUInt8: return "u8";
    default: return c10::toString(type);
  }
}

std::string described(const NamedTensor& named) {
  const auto& tensor = named.tensor;
  std::string text = named.name + " " + name_of(tensor.scalar_type()) + " " + text_of(tensor.sizes());
  if (!tensor.is_contiguous()) text += " with strides " + text_of(tensor.strides());
  return text;
}

comm::Manifest manifest_of(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers) {
  comm::Manifest manifest = {
      {"number of parameters", std::to_string(parameters.size())},
      {"number of buffers", std::to_string(buffers.size())},
  };
  for (std::size_t i = 0; i < parameters.size(); ++i)
    manifest.emplace_back("parameter " + std::to_string(i),
                          described(parameters[i]) + (parameters[i].tensor.requires_grad() ? "" : ", not trained"));
  for (std::size_t i = 0; i < buffers.size(); ++i)
    manifest.emplace_back("state " + std::to_string(i), described(buffers[i]));
  return manifest;
}

TensorBytes::TensorBytes(const std::vector<NamedTensor>& tensors) {
  for (const auto& [name, tensor] : tensors) {
    ::torch::Tensor bytes = tensor.detach();
    if (!bytes.is_non_overlapping_and_dense()) {
      bytes = bytes.contiguous();
      copied_.push_back({tensor, bytes});
    }
    pieces_.push_back({name, {static_cast<std::byte*>(bytes.data_ptr()), bytes.nbytes()}});
  }
}

void TensorBytes::broadcast(comm::ProcessGroup& group) {
  ddp::broadcast_state(group, pieces_, 0);
  const ::torch::NoGradGuard guard;
  for (const auto& [tensor, copy] : copied_) ::torch::Tensor(tensor).copy_(copy);
}

void TensorBytes::check(comm::ProcessGroup& group) const { ddp::check_replicas(group, pieces_); }

SharedBuffers::SharedBuffers(const ::torch::nn::Module& module, comm::ProcessGroup& group)
    : module_(module), group_(group) {
  const auto buffers = buffers_of(module);
  if (group.size() == 1 || buffers.empty()) return;
  std::size_t bytes = 0;
  for (const auto& buffer : buffers) bytes += comm::align_up(buffer.tensor.nbytes());
  arena_ = group.allocate(bytes);
  std::size_t at = 0;
  for (const auto& buffer : buffers) {
    const auto& mine = buffer.tensor;
    buffers_.push_back(
        {buffer, ::torch::from_blob(arena_->data() + at, mine.sizes(), mine.options().requires_grad(false))});
    at += comm::align_up(mine.nbytes());
  }
}

void SharedBuffers::check_intact() const {
  const auto now = buffers_of(module_);
  const auto differs = [](const NamedTensor& is, const Shared& was) {
    return !is.tensor.is_same(was.mine.tensor) || is.tensor.scalar_type() != was.sent.scalar_type() ||
           is.tensor.sizes() != was.sent.sizes();
  };
  const auto remedy = "change them before DistributedDataParallel is made, or in place and with their type";
  if (now.size() != buffers_.size())
    throw UsageError("the module has " + std::to_string(now.size()) + " buffers now, and had " +
                         std::to_string(buffers_.size()) + " when DistributedDataParallel was made",
                     remedy);
  for (std::size_t i = 0; i < now.size(); ++i)
    if (differs(now[i], buffers_[i]))
      throw UsageError("the buffer " + described(now[i]) + " is another one than when DistributedDataParallel was made",
                       remedy);
}

void SharedBuffers::broadcast() {
  if (arena_ == nullptr) return;
  check_intact();
  constexpr int kRoot = 0;
  const ::torch::NoGradGuard guard;
  if (group_.rank() == kRoot)
    for (auto& [mine, sent] : buffers_) sent.copy_(mine.tensor);
  group_.broadcast({.arena = arena_.get(), .count = arena_->bytes(), .dtype = DType::kU8}, kRoot)
      .wait(group_.producer_stream());
  if (group_.rank() != kRoot)
    for (auto& [mine, sent] : buffers_) mine.tensor.copy_(sent);
}

}  // namespace lockstep::torch
