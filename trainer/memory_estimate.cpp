#include "trainer/memory_estimate.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/data/loader.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/parallel/bound_gradients.h"
#include "lockstep/parallel/model_averaging.h"
#include "lockstep/trainer/forward.h"
#include "nn/ops/meta_backend.h"
#include "parallel/pass.h"
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
  if (train && is_random(config.model)) tape.set_dropout_state(backend.empty({3}, DType::kI64));
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

/// The samples of each pass of the step that begins at `cursor`, on all ranks.
std::vector<std::uint64_t> passes_of_step(const TrainConfig& config, const sampler::SamplerConfig& order,
                                          std::uint64_t cursor, int ranks) {
  std::vector<std::uint64_t> passes;
  const auto most = static_cast<std::uint64_t>(config.accumulate);
  if (config.sync_batchnorm) passes.resize(most);
  for (int rank = 0; rank < ranks; ++rank) {
    const sampler::StepPlan plan = sampler::plan_step(order, {.epoch = 0, .cursor = cursor}, rank, ranks);
    if (order.shards > 0) {
      for (std::uint64_t s = 0; s < order.shards; ++s)
        passes.push_back(sampler::shard_of(order, plan.global_count, s).count);
      break;
    }
    const std::uint64_t parts = config.sync_batchnorm ? most : std::min(most, plan.local_count);
    for (std::uint64_t p = 0; p < parts; ++p) {
      const std::uint64_t count = sampler::slice_of(plan.local_count, p, parts).count;
      if (config.sync_batchnorm)
        passes[p] += count;
      else
        passes.push_back(count);
    }
  }
  return passes;
}

/// A batch normalisation cannot train on one value per channel, which one sample may leave it.
void walk_smallest(const TrainConfig& config, nn::Backend& backend, const data::Dataset& dataset,
                   const SmallestPass& smallest) {
  const auto meta = nn::make_meta_backend(backend);
  const auto model = build_shapes(config, *meta, dataset);
  try {
    bytes_of_pass(config, *meta, *model, training_format_of(dataset), smallest.samples, true);
  } catch (const UsageError& error) {
    const std::string count = fmt::format("{} sample{}", smallest.samples, smallest.samples == 1 ? "" : "s");
    if (smallest.last_of_epoch)
      throw UsageError(fmt::format("the last step of an epoch leaves {} for a pass, and {}", count, error.what()),
                       "use --tail drop, or another --batch-size");
    throw UsageError(fmt::format("steps have passes of {}, and {}", count, error.what()),
                     config.shards > 0       ? "use fewer --shards, or a larger --global-batch"
                     : config.accumulate > 1 ? "use a smaller --accumulate, or a larger --batch-size"
                                             : "use a larger --batch-size");
  }
}

}  // namespace

SmallestPass smallest_pass(const TrainConfig& config, const sampler::DistributedSampler& sampler, std::size_t devices) {
  SmallestPass smallest;
  const auto steps = static_cast<std::int64_t>(sampler.steps_per_epoch());
  const bool reaches_last = config.steps.value_or(steps) >= steps;
  for (const std::int64_t step : {std::int64_t{0}, reaches_last ? steps - 1 : std::int64_t{0}})
    for (const std::uint64_t count :
         passes_of_step(config, sampler.config(), static_cast<std::uint64_t>(step) * sampler.config().global_batch,
                        sampler.world_size())) {
      if (count == 0) continue;
      const std::int64_t least =
          parallel::chunks_of(static_cast<std::int64_t>(count), static_cast<std::int64_t>(devices)).back().count;
      if (smallest.samples == 0 || least < smallest.samples) smallest = {.samples = least, .last_of_epoch = step > 0};
    }
  return smallest;
}

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
  const SampleFormat format = plan.train ? training_format_of(dataset) : format_of(dataset);
  on_device.parameters = state + bytes_of_copies(config, *meta, *model, format, samples, plan.train);
  on_device.activations = plan.passes * bytes_of_pass(config, *meta, *model, format, samples, plan.train);
  // After the largest one, whose errors have nothing to do with how many samples it has.
  if (plan.smallest.samples > 0) walk_smallest(config, backend, dataset, plan.smallest);

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
