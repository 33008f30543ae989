#include "trainer/memory_estimate.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/memory.h"
#include "base/text.h"
#include "comm/agree.h"
#include "data/loader.h"
#include "nn/ops/meta_backend.h"
#include "nn/optim/optimizers.h"
#include "trainer/build.h"
#include "trainer/forward.h"

namespace lockstep::trainer {
namespace {

std::string human(std::uint64_t bytes) { return human_bytes(static_cast<double>(bytes)); }

// The bytes of tensors that the allocator has been asked for in its life.
std::uint64_t asked(nn::Backend& backend) { return backend.allocator().stats().bytes_asked; }

// An address for what lies in others' memory: nothing is read or written there.
void* nowhere() { return reinterpret_cast<void*>(std::uintptr_t{4096}); }

nn::Tensor on_host(nn::Backend& backend, const nn::Shape& shape, DType dtype) {
  return backend.from_host(nowhere(), shape, dtype);
}

Inputs inputs_of_shapes(nn::Backend& backend, const SampleFormat& format, std::int64_t samples) {
  std::vector<std::int64_t> dims = {samples};
  dims.insert(dims.end(), format.dims.begin(), format.dims.end());
  const nn::Shape shape{std::span<const std::int64_t>(dims)};
  return {.x = on_host(backend, shape, format.tokens ? DType::kI32 : DType::kF32),
          .labels = on_host(backend, format.tokens ? shape : nn::Shape{samples}, DType::kI32)};
}

/// The largest pass of one device. Gradients lie in the reducer's arena, not among what is asked for here.
std::uint64_t bytes_of_pass(const TrainConfig& config, nn::Backend& backend, nn::Module& module,
                            const SampleFormat& format, std::int64_t samples, bool train) {
  const std::uint64_t before = asked(backend);
  nn::Tape tape(backend);
  tape.set_recording(train);
  tape.set_activations(activations_of(config));
  if (dropout_of(config.model) > 0) tape.set_dropout_state(backend.empty({3}, DType::kI64));
  module.train(train);
  const Inputs inputs = with_activations(backend, inputs_of_shapes(backend, format, samples), activations_of(config));
  const nn::Loss loss = forward(tape, module, inputs, 1.0f);
  if (train) tape.backward(loss.value);
  return backend.allocator().stats().peak_bytes_asked - before;
}

}  // namespace

MemoryNeed& MemoryNeed::operator+=(const MemoryNeed& other) {
  parameters += other.parameters;
  gradients += other.gradients;
  moments += other.moments;
  activations += other.activations;
  batches += other.batches;
  checkpoint += other.checkpoint;
  return *this;
}

std::string text_of(const MemoryNeed& need) {
  std::vector<std::string> parts;
  const std::pair<const char*, std::uint64_t> all[] = {
      {"parameters", need.parameters},   {"gradients", need.gradients}, {"moments", need.moments},
      {"activations", need.activations}, {"batches", need.batches},     {"checkpoint", need.checkpoint}};
  for (const auto& [what, bytes] : all)
    if (bytes > 0) parts.push_back(fmt::format("{} {}", what, human(bytes)));
  return join(parts, ", ");
}

MemoryNeeds estimate_inference(const nn::ModelSpec& spec, nn::Backend& backend, std::int64_t batch, DType activations,
                               int streams) {
  const auto meta = nn::make_meta_backend(backend);
  nn::Generator generator = nn::Generator::none();
  nn::Context context{*meta, generator};
  const auto model = nn::make_model(context, spec);
  model->train(false);
  const bool tokens = nn::model_family(spec.name).takes_tokens && spec.sample_shape.size() == 1;
  const SampleFormat format = {.dims = spec.sample_shape, .tokens = tokens};
  if (activations != DType::kF32)
    for (const auto& named : model->named_parameters()) named.parameter->as(activations);
  MemoryNeed need{.parameters = asked(*meta)};
  nn::Tape tape(*meta);
  tape.set_recording(false);
  tape.set_activations(activations);
  model->forward(tape, tape.input(with_activations(*meta, inputs_of_shapes(*meta, format, batch), activations).x));
  need.activations =
      static_cast<std::uint64_t>(streams) * (meta->allocator().stats().peak_bytes_asked - need.parameters);
  if (backend.device().kind == DeviceKind::kCpu) return {.host = need, .device = {}};
  return {.host = {}, .device = need};
}

MemoryNeeds estimate_memory(const TrainConfig& config, nn::Backend& backend, const data::Dataset& dataset,
                            const MemoryPlan& plan) {
  const auto meta = nn::make_meta_backend(backend);
  MemoryNeed on_device;
  const auto model = build_shapes(config, *meta, dataset);
  on_device.parameters = asked(*meta);
  std::unique_ptr<nn::Optimizer> optimizer;
  if (plan.train) {
    auto trained = model->named_parameters();
    std::erase_if(trained, [](const auto& named) { return !named.parameter->requires_grad(); });
    for (const auto& [name, parameter] : trained) {
      on_device.gradients += parameter->value().bytes();
      parameter->bind_gradient(nn::Tensor::view_of(nowhere(), parameter->value().shape()));
    }
    optimizer = make_optimizer(config, trained);
    on_device.moments = asked(*meta) - on_device.parameters;
  }
  const auto devices = static_cast<std::int64_t>(plan.devices);
  const std::int64_t samples = (plan.samples + devices - 1) / devices;
  on_device.activations = bytes_of_pass(config, *meta, *model, format_of(dataset), samples, plan.train);

  MemoryNeed on_host;
  on_host.batches = data::Loader::bytes_of(dataset, static_cast<std::uint64_t>(plan.batch), {.workers = plan.workers});
  if (plan.checkpoints) on_host.checkpoint = on_device.parameters + on_device.moments;
  if (backend.device().kind != DeviceKind::kCpu) return {.host = on_host, .device = on_device};
  // The copies have parameters and gradients of their own, and the first device what is remembered of them.
  for (std::int64_t d = 0; d < devices; ++d) {
    on_host += on_device;
    on_device.moments = 0;
  }
  return {.host = on_host, .device = {}};
}

namespace {

/// What several ranks share.
struct Shared {
  std::string name;
  std::uint64_t free_bytes = 0, needed = 0;
  std::vector<std::size_t> ranks;
};

std::string remedy_of(const MemoryNeed& need, std::size_t ranks) {
  std::vector<std::string> ways = {"use a smaller model"};
  if (need.activations + need.batches > need.parameters) ways.emplace_back("a smaller batch");
  if (need.moments > need.gradients / 2)
    for (const auto* family : nn::optimizer_families())
      if (!family->leanest.empty())
        ways.push_back(
            fmt::format("an optimizer that remembers less (--optimizer {} {})", family->name, family->leanest));
  if (ranks > 1) ways.emplace_back("fewer ranks here");
  return join(ways, ", ") + ", or more memory";
}

void check_host(comm::ProcessGroup& group, const MemoryNeed& mine) {
  // One line for what is needed, then one for each bound.
  std::string text = fmt::format("{}\n", mine.total());
  for (const MemoryBound& bound : memory_bounds())
    text += fmt::format("{}\t{}\t{}\n", bound.id, bound.free_bytes, bound.name);
  const auto texts = group.all_gather_text(text);
  std::map<std::string, Shared> all;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    const auto lines = split(texts[rank], '\n');
    const std::uint64_t needed = std::stoull(lines.front());
    for (const std::string& line : std::span(lines).subspan(1)) {
      const auto fields = split(line, '\t');
      if (fields.size() != 3) continue;  // after the last line's end
      const std::uint64_t free_bytes = std::stoull(fields[1]);
      Shared& shared =
          all.try_emplace(fields[0], Shared{.name = fields[2], .free_bytes = free_bytes, .ranks = {}}).first->second;
      shared.free_bytes = std::min(shared.free_bytes, free_bytes);
      shared.needed += needed;
      shared.ranks.push_back(rank);
    }
  }
  const Shared* tightest = nullptr;
  for (const auto& [id, shared] : all)
    if (shared.needed > shared.free_bytes && static_cast<int>(shared.ranks.front()) == group.rank() &&
        (tightest == nullptr || shared.free_bytes < tightest->free_bytes))
      tightest = &shared;
  comm::run_collectively(group, [&] {
    if (tightest == nullptr) return;
    const std::size_t ranks = tightest->ranks.size();
    throw OutOfMemoryError(fmt::format("this run needs at least {}{}: {}{}; {} has {} free", human(tightest->needed),
                                       ranks > 1 ? fmt::format(" for {} ranks", ranks) : "", text_of(mine),
                                       ranks > 1 ? " a rank" : "", tightest->name, human(tightest->free_bytes)),
                           remedy_of(mine, ranks));
  });
}

}  // namespace

void check_memory(comm::ProcessGroup& group, nn::Backend& backend, const MemoryNeeds& mine) {
  log_debug("memory: at least {} ({})", human(mine.host.total()), text_of(mine.host));
  check_host(group, mine.host);
  if (backend.device().kind == DeviceKind::kCpu) return;
  log_debug("memory of {}: at least {} ({})", to_string(backend.device()), human(mine.device.total()),
            text_of(mine.device));
  comm::run_collectively(group, [&] {
    const auto free_bytes = backend.free_bytes();
    if (!free_bytes || mine.device.total() <= *free_bytes) return;
    throw OutOfMemoryError(fmt::format("this run needs at least {} of {}: {}; {} are free", human(mine.device.total()),
                                       to_string(backend.device()), text_of(mine.device), human(*free_bytes)),
                           remedy_of(mine.device, 1));
  });
}

}  // namespace lockstep::trainer
