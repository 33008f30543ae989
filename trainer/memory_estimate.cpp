#include "trainer/memory_estimate.h"

#include <utility>
#include <vector>

#include "lockstep/data/loader.h"
#include "lockstep/ddp/comm_hooks.h"
#include "lockstep/parallel/bound_gradients.h"
#include "lockstep/parallel/model_averaging.h"
#include "lockstep/trainer/forward.h"
#include "nn/ops/meta_backend.h"
#include "trainer/build.h"

namespace lockstep::trainer {
namespace {

// The bytes of tensors that the allocator has been asked for in its life.
std::uint64_t asked(nn::Backend& backend) { return backend.allocator().stats().bytes_asked; }

/// The largest pass of one device. Gradients lie in the reducer's arena, not among what is asked for here.
std::uint64_t bytes_of_pass(const TrainConfig& config, nn::Backend& backend, nn::Module& module,
                            const SampleFormat& format, std::int64_t samples, bool train) {
  const std::uint64_t before = asked(backend);
  nn::Tape tape(backend);
  tape.set_recording(train);
  tape.set_activations(dtype_of(config.precision));
  if (dropout_of(config.model) > 0) tape.set_dropout_state(backend.empty({3}, DType::kI64));
  module.train(train);
  const Inputs on_host = make_inputs(format, samples, [&](int input, const nn::Shape& shape, DType dtype) {
    return backend.stage(nn::meta_address(), shape, dtype, input);
  });
  const Inputs inputs = with_activations(backend, on_host, dtype_of(config.precision));
  const nn::Loss loss = forward(tape, module, inputs, training_loss(config), 1.0f);
  if (train) tape.backward(loss.value);
  return backend.allocator().stats().peak_bytes_asked - before;
}

/// What a pass leaves: the parameters' copies in 16 bits, which all passes share.
std::uint64_t bytes_of_copies(const TrainConfig& config, nn::Backend& backend, nn::Module& module,
                              const SampleFormat& format, std::int64_t samples, bool train) {
  if (config.precision == Precision::kF32) return 0;
  const std::uint64_t before = asked(backend);
  bytes_of_pass(config, backend, module, format, samples, train);
  return asked(backend) - before;
}

ddp::CommHook::Memory memory_of_hook(const TrainConfig& config, const std::vector<nn::NamedParameter>& trained,
                                     int ranks) {
  const auto hook = ddp::make_comm_hook(config.comm_hook);
  return hook != nullptr ? hook->memory(parallel::slots_of(trained), ranks) : ddp::CommHook::Memory();
}

}  // namespace

session::MemoryNeeds estimate_memory(const TrainConfig& config, nn::Backend& backend, const data::Dataset& dataset,
                                     const MemoryPlan& plan) {
  const auto meta = nn::make_meta_backend(backend);
  session::MemoryNeed on_device;
  ddp::CommHook::Memory hook;
  const auto model = build_shapes(config, *meta, dataset);
  const std::uint64_t state = asked(*meta);
  std::unique_ptr<nn::Optimizer> optimizer;
  std::uint64_t average = 0, moments = 0, whole_moments = 0;
  if (plan.train) {
    auto trained = model->named_parameters();
    std::erase_if(trained, [](const auto& named) { return !named.parameter->requires_grad(); });
    for (const auto& [name, parameter] : trained) {
      on_device.gradients += plan.gradients * parameter->value().bytes();
      parameter->bind_gradient(nn::Tensor::view_of(nn::meta_address(), parameter->value().shape()));
    }
    hook = memory_of_hook(config, trained, plan.ranks);
    on_device.gradients += hook.held;
    optimizer = make_optimizer(config, trained);
    whole_moments = asked(*meta) - state;
    moments = on_device.moments = (whole_moments + plan.updates - 1) / plan.updates;
    if (config.local_sgd > 0) on_device.gradients += parallel::ModelAverager::arena_bytes(state + whole_moments);
    if (config.ema)
      for (const auto& [name, parameter] : trained) average += parameter->value().bytes();
  }
  on_device.moments += average;
  const auto devices = static_cast<std::int64_t>(plan.devices);
  const std::int64_t samples = (plan.samples + devices - 1) / devices;
  const SampleFormat format = format_of(dataset);
  on_device.parameters = state + bytes_of_copies(config, *meta, *model, format, samples, plan.train);
  on_device.activations = plan.passes * bytes_of_pass(config, *meta, *model, format, samples, plan.train);

  session::MemoryNeed on_host;
  on_host.batches = data::Loader::bytes_of(dataset, static_cast<std::uint64_t>(plan.batch), {.workers = plan.workers});
  if (plan.checkpoints) on_host.checkpoint = state + hook.saved + (average > 0 ? state : 0);
  if (plan.checkpoints || plan.checkpoint_part) on_host.checkpoint += plan.checkpoint_part ? moments : whole_moments;
  if (backend.device().kind != DeviceKind::kCpu) return {.host = on_host, .device = on_device};
  // The copies have parameters and gradients of their own, and the first device what is remembered of them.
  for (std::int64_t d = 0; d < devices; ++d) {
    on_host += on_device;
    on_device.moments = 0;
  }
  return {.host = on_host, .device = {}};
}

}  // namespace lockstep::trainer
