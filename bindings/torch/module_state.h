// Parameters and buffers of a module of LibTorch, as the ranks compare and exchange them.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/agree.h"
#include "lockstep/ddp/replicate.h"

namespace lockstep::torch {

struct NamedTensor {
  std::string name;
  ::torch::Tensor tensor;
};

/// The device of the group's arenas, as LibTorch has it.
::torch::Device device_of(const comm::ProcessGroup& group);

/// Of a group of GPUs: the stream that its operations come after, which is the current one when this is made; of others
/// nothing.
class ProducerStream {
 public:
  /// Throws UsageError where another stream is current than DeviceGroupOptions::producer.
  explicit ProducerStream(const comm::ProcessGroup& group);

  /// While one lives, the producer's stream is this thread's current one. It comes after the work of the stream that
  /// was current before; that one comes after the producer's when it ends.
  class [[nodiscard]] Order {
   public:
    explicit Order(const std::optional<c10::Stream>& stream);
    ~Order();
    Order(const Order&) = delete;
    Order& operator=(const Order&) = delete;

   private:
    std::optional<c10::Stream> before_;  // nothing: it is current anyway
    std::optional<c10::StreamGuard> guard_;
  };
  Order order() const { return Order(stream_); }

 private:
  std::optional<c10::Stream> stream_;
};

/// In the module's order, each tensor once, by its first name.
std::vector<NamedTensor> parameters_of(const ::torch::nn::Module& module);
std::vector<NamedTensor> buffers_of(const ::torch::nn::Module& module);

/// "f32", "bf16"; PyTorch's name for types that lockstep has none for.
std::string name_of(::torch::Dtype type);
/// "fc1.weight f32 [4, 5]", with the strides where it is not contiguous.
std::string described(const NamedTensor& named);

/// How many parameters and buffers there are; then each one's name, type, shape and layout, and of a parameter whether
/// it is trained. Differences are reported in the order of the keys: parameters before buffers ("state").
comm::Manifest manifest_of(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers);

/// Collectives over the bytes of tensors: their own memory, or a contiguous copy of those that leave gaps in it.
class TensorBytes {
 public:
  explicit TensorBytes(const std::vector<NamedTensor>& tensors);
  /// Afterwards they are rank 0's.
  void broadcast(comm::ProcessGroup& group);
  /// Throws OutOfStepError unless they are the same on all ranks.
  void check(comm::ProcessGroup& group) const;

 private:
  struct Copied {
    ::torch::Tensor tensor, copy;
  };
  std::vector<ddp::NamedBytes> pieces_;
  std::vector<Copied> copied_;
};

/// A module's buffers on their way from rank 0, in memory of the collectives.
class SharedBuffers {
 public:
  /// Collective.
  SharedBuffers(const ::torch::nn::Module& module, comm::ProcessGroup& group);
  /// Collective: rank 0's become everyone's. Throws UsageError where the module's are no longer those it has had.
  void broadcast();

 private:
  struct Shared {
    NamedTensor mine;
    ::torch::Tensor sent;  // its place in the arena
  };
  void check_intact() const;

  const ::torch::nn::Module& module_;
  comm::ProcessGroup& group_;
  std::unique_ptr<comm::Arena> arena_;  // nullptr: there is nothing to send
  std::vector<Shared> buffers_;
};

}  // namespace lockstep::torch
