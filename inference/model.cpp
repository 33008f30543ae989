#include "inference/model.h"

#include <fmt/format.h>

#include "base/error.h"
#include "base/text.h"
#include "checkpoint/model_metadata.h"
#include "checkpoint/model_options.h"
#include "lockstep/base/env.h"
#include "lockstep/comm/world.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/io/weights.h"
#include "nn/ops/meta_backend.h"
#include "session/device_choice.h"
#include "session/opening.h"

namespace lockstep::inference {
namespace {

nn::LoadReport load(const InferConfig& config, nn::Module& module, const std::vector<nn::HostTensor>& tensors) {
  return nn::load_state(module, tensors, config.weights, checkpoint::load_options_of(config));
}

std::unique_ptr<nn::Module> open_module(const InferConfig& config, nn::Backend& backend, const InferModel& model,
                                        const std::vector<nn::HostTensor>& tensors, bool fused, bool log) {
  // Values that are loaded next need not be drawn.
  const bool all_are_loaded = !config.weights.empty() && !config.non_strict;
  nn::Generator generator = all_are_loaded ? nn::Generator::zeros() : nn::Generator(config.seed.value_or(kDefaultSeed));
  nn::Context context{backend, generator};
  std::unique_ptr<nn::Module> module;
  if (config.weights.empty()) {
    module = nn::make_model(context, model.spec);
  } else {
    module = checkpoint::make_model_of_file(context, model.spec, tensors, config.weights,
                                            {.metadata = model.metadata.has_value(), .all_are_loaded = all_are_loaded});
    const nn::LoadReport report = load(config, *module, tensors);
    if (log) checkpoint::log_report(report, config.weights, "have new values");
  }
  if (fused)
    module->fuse();
  else
    module->train(false);
  if (config.precision == InferPrecision::kBF16)
    for (const auto& named : module->named_parameters()) named.parameter->as(DType::kBF16);
  if (config.precision == InferPrecision::kInt8W)
    for (const auto& named : module->named_parameters())
      if (named.parameter->value().shape().size() == 2) named.parameter->quantize_rows();
  return module;
}

// Models of text that have attention are fully connected layers throughout: those have Int8Rows.
void check_int8(const InferConfig& config, const nn::ModelSpec& spec, std::span<nn::Backend* const> devices) {
  if (config.precision != InferPrecision::kInt8W) return;
  const auto fits = [](const nn::ModelFamily& family) { return family.takes_tokens && family.attention; };
  if (!fits(nn::model_family(spec.name)))
    throw UsageError(
        fmt::format("--precision int8w for {}: weights of int8 are for {}", spec.name, nn::models_that(fits)),
        "use --precision f32 or bf16");
  for (nn::Backend* const device : devices)
    if (!device->linear().multiplies_int8_rows())
      throw UsageError(
          fmt::format("--precision int8w on {}: weights of int8 are for the CPU", to_string(device->device())),
          "use --precision bf16, or --device cpu");
}

}  // namespace

InferModel open_model(const InferConfig& config, std::span<nn::Backend* const> devices,
                      const std::optional<std::vector<std::int64_t>>& sample_shape,
                      const std::function<void(const nn::ModelSpec&)>& check, bool fused) {
  InferModel model;
  nn::ModelConfig given = config.model;
  std::vector<nn::HostTensor> tensors;
  if (!config.weights.empty()) {
    model.metadata = checkpoint::read_model_metadata(config.weights);
    if (model.metadata) checkpoint::apply_metadata(given, *model.metadata, config.weights);
    tensors = nn::read_weights(config.weights, {.key = config.weights_key});
    checkpoint::check_not_empty(tensors, config.weights);
  }
  model.spec = model.metadata ? model.metadata->spec : checkpoint::spec_of_file(given, tensors, config.weights);
  nn::ModelSpec& spec = model.spec;
  if (config.image_size && spec.sample_shape.size() == 3) {
    if (model.metadata && !nn::model_family(spec.name).any_image_size)
      throw UsageError(fmt::format("--image-size {}, but {} was trained on {}x{}", *config.image_size, config.weights,
                                   spec.sample_shape[0], spec.sample_shape[1]),
                       "leave --image-size out");
    spec.sample_shape[0] = spec.sample_shape[1] = *config.image_size;
  }
  if (sample_shape) spec.sample_shape = *sample_shape;
  check(spec);
  check_int8(config, spec, devices);
  for (nn::Backend* const device : devices)
    model.modules.push_back(open_module(config, *device, model, tensors, fused, /*log=*/device == devices.front()));
  return model;
}

session::MemoryNeeds estimate_memory(const nn::ModelSpec& spec, nn::Backend& backend, std::int64_t batch,
                                     DType activations, int streams, std::size_t devices) {
  const auto meta = nn::make_meta_backend(backend);
  nn::Generator generator = nn::Generator::none();
  nn::Context context{*meta, generator};
  const auto model = nn::make_model(context, spec);
  model->train(false);
  if (activations != DType::kF32)
    for (const auto& named : model->named_parameters()) named.parameter->as(activations);
  session::MemoryNeed need{.parameters = meta->allocator().stats().bytes_asked};
  std::vector<std::int64_t> dims = {batch};
  dims.insert(dims.end(), spec.sample_shape.begin(), spec.sample_shape.end());
  const nn::Shape shape{std::span<const std::int64_t>(dims)};
  const bool tokens = nn::model_family(spec.name).takes_tokens && spec.sample_shape.size() == 1;
  // Inputs that are used as they lie in the host's memory cost nothing.
  const nn::Tensor x = tokens || activations == DType::kF32
                           ? meta->stage(nn::meta_address(), shape, tokens ? DType::kI32 : DType::kF32, 0)
                           : meta->empty(shape, activations);
  nn::Tape tape(*meta);
  tape.set_recording(false);
  tape.set_activations(activations);
  model->forward(tape, tape.input(x));
  const auto all = static_cast<std::uint64_t>(streams);
  const std::uint64_t of_stream = meta->allocator().stats().peak_bytes_asked - need.parameters;
  if (backend.device().kind == DeviceKind::kCpu) {  // devices there share the host's memory
    need.activations = all * of_stream;
    need.parameters *= devices;
    return {.host = need, .device = {}};
  }
  need.activations = (all + devices - 1) / devices * of_stream;
  return {.host = {}, .device = need};
}

InferDevices::InferDevices(const InferConfig& config, session::Session& session) {
  const bool is_cpu = session.device.kind == DeviceKind::kCpu;
  const bool numbered = !is_cpu || !session::parse_device(config.device).indices.empty();
  for (const int id : session.devices) {
    nn::Backend* backend = session.backend.get();
    if (!backends_.empty()) {
      constexpr int kThreads = 1;  // streams have their own
      own_.push_back(is_cpu ? nn::make_cpu_backend(kThreads)
                            : nn::make_cuda_backend(session::cuda_options(session_options(config), id)));
      backend = own_.back().get();
    }
    backends_.push_back(backend);
    names_.push_back(numbered ? fmt::format("{}:{}", is_cpu ? "cpu" : "cuda", id) : "cpu");
  }
}

std::string InferDevices::describe() const {
  std::vector<std::string> rest(names_.begin() + 1, names_.end());
  for (std::string& name : rest) name.erase(0, name.find(':') + 1);
  rest.insert(rest.begin(), names_.front());
  return join(rest, ",");
}

session::SessionOptions session_options(const InferConfig& config) {
  session::SessionOptions options;
  static_cast<session::DeviceOptions&>(options) = config;
  options.all_devices = !session::parse_device(config.device).indices.empty();
  options.precision = activations_of(config.precision);
  options.threads = 1;  // streams have their own
  return options;
}

session::Session open_alone(const InferConfig& config, const char* subcommand, const char* remedy) {
  session::SessionChecks checks;
  checks.before = [=] {
    const auto world = comm::discover_world(env);
    if (world.size > 1)
      throw UsageError(fmt::format("lockstep {} as one of {} ranks: each would do all of it", subcommand, world.size),
                       remedy);
  };
  return session::open_session(session_options(config), checks);
}

}  // namespace lockstep::inference
