#include "trainer/build.h"

#include <fnmatch.h>

#include <algorithm>

#include "base/cpu.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "base/version.h"
#include "data/open.h"
#include "data/tokens.h"
#include "nn/io/state.h"
#include "trainer/adopt_card.h"
#include "trainer/model_of_file.h"
#include "trainer/module_manifest.h"
#include "trainer/replica.h"
#include "trainer/spec_of_file.h"

namespace lockstep::trainer {

namespace {

// Tokens of a sample, and the most that the model takes.
std::int64_t context_of(const ModelConfig& model) {
  return model.context ? *model.context : nn::default_gpt(model.name).context;
}

// What only data sets of images take.
std::optional<int> image_size_of(const TrainConfig& config) {
  if (config.image_size || !config.data.starts_with("images:")) return config.image_size;
  return default_image_size(config.model.name);
}

}  // namespace

std::unique_ptr<nn::Optimizer> make_optimizer(const TrainConfig& config,
                                              const std::vector<nn::NamedParameter>& parameters) {
  const double decay = weight_decay_of(config);
  if (optimizer_of(config) == Optimizer::kSgd)
    return nn::make_sgd(parameters,
                        {.momentum = momentum_of(config), .nesterov = config.nesterov, .weight_decay = decay});
  const auto [beta1, beta2] = config.betas.value_or(kDefaultBetas);
  return nn::make_adamw(parameters, {.beta1 = beta1, .beta2 = beta2, .weight_decay = decay});
}

data::DataSplits open_splits(const TrainConfig& config, const std::optional<ModelCard>& card) {
  data::OpenOptions options{.classes = config.classes.value_or(0),
                            .seed = config.seed,
                            .context = context_of(config.model),
                            .augment = config.augment,
                            .image_size = image_size_of(config),
                            .most_damaged = {},
                            .characters = card ? card->characters : nullptr};
  if (config.most_damaged) options.most_damaged = static_cast<std::uint64_t>(*config.most_damaged);
  if (config.model.name == "linear" && options.classes == 0) {
    // Made-up data has as many classes as the model is asked for: 2, as in the 5 → 2 layer of the tutorials.
    if (config.model.out)
      options.classes = *config.model.out;
    else if (config.data.starts_with("random:"))
      options.classes = 2;
  }
  if (config.model.name == "gpt2" && options.classes == 0 && config.data.starts_with("random:tokens"))
    options.classes = data::kGpt2Tokens;
  return data::open_data(config.data, options);
}

nn::ModelSpec model_spec(const ModelConfig& model, const data::Dataset& dataset) {
  nn::ModelSpec spec{.name = model.name, .sample_shape = dataset.sample_dims(), .classes = dataset.classes()};
  if (!model.hidden.empty()) spec.hidden.assign(model.hidden.begin(), model.hidden.end());
  spec.gpt = nn::default_gpt(model.name);
  spec.gpt.layers = model.layers.value_or(spec.gpt.layers);
  spec.gpt.heads = model.heads.value_or(spec.gpt.heads);
  spec.gpt.width = model.width.value_or(spec.gpt.width);
  spec.gpt.context = context_of(model);
  spec.gpt.tied = model.tied_head;
  spec.gpt.dropout = model.dropout;
  spec.lstm = {.layers = model.layers.value_or(spec.lstm.layers),
               .width = model.width.value_or(spec.lstm.width),
               .dropout = model.dropout};
  spec.zero_init_residual = model.zero_init_residual;
  return spec;
}

namespace {

// What a model takes, and what the data has. Sizes of images are the model's own matter.
void check_fit(const std::string& model, const data::Dataset& dataset) {
  const bool tokens = dataset.has_tokens(), language = model.starts_with("gpt") || model == "lstm";
  if (tokens && !language)
    throw UsageError(fmt::format("{} takes numbers, and the samples of {} are tokens", model, dataset.name()),
                     "use gpt, gpt2 or lstm for these data, or give other data");
  const auto dims = dataset.sample_dims().size();
  if (tokens || !language || (model == "lstm" && dims == 3)) return;
  throw UsageError(fmt::format("{} takes tokens{}, and the samples of {} are {}", model,
                               model == "lstm" ? " or images" : "", dataset.name(), dims == 3 ? "images" : "vectors"),
                   "give --data text:FILE, tokens:FILE or random:tokens,LEN, or use another model for these data");
}

// What the last layer's parameters are called up to their last dot.
std::string head_of(const TrainConfig& config, const nn::Module& model) {
  check_usage(!config.model.name.starts_with("gpt"), "--reset-head with gpt, whose last layer is its embedding",
              "leave --reset-head out");
  const std::string last = model.named_parameters().back().name;
  return last.substr(0, last.rfind('.') + 1);
}

// Whether what the file's numbers mean is what the data's mean.
void check_meaning(const TrainConfig& config, const data::Dataset& dataset, const ModelCard& card) {
  if (config.reset_head) return;
  if (dataset.has_tokens() && (card.characters == nullptr) != (dataset.characters() == nullptr))
    throw UsageError(
        fmt::format("{} was trained on {} ({}), and {} has {}", config.weights,
                    card.characters != nullptr ? "characters" : "tokens of another kind", card.data, dataset.name(),
                    dataset.characters() != nullptr ? "characters" : "tokens of another kind"),
        card.characters != nullptr ? "use text:FILE" : "use tokens:FILE, made with that vocabulary");
  const auto& names = dataset.class_names();
  if (names.empty() || card.class_names.empty()) return;
  for (std::size_t i = 0; i < std::max(names.size(), card.class_names.size()); ++i) {
    const auto name = [i](const std::vector<std::string>& from) { return i < from.size() ? from[i] : "none"; };
    if (name(names) != name(card.class_names))
      throw UsageError(fmt::format("{} knows class {} as '{}', and {} as '{}'", config.weights, i,
                                   name(card.class_names), dataset.name(), name(names)),
                       "use the same classes, or train with --reset-head");
  }
}

// Of a language model that has another vocabulary than the data: one line, where names and shapes would be many.
void check_vocabulary(const TrainConfig& config, const std::vector<nn::HostTensor>& tensors,
                      const data::Dataset& dataset) {
  if (!dataset.has_tokens()) return;
  for (const auto& tensor : tensors)
    if (tensor.name.ends_with("wte.weight") && tensor.shape.size() == 2 && tensor.shape[0] != dataset.classes())
      throw UsageError(fmt::format("{} has {} tokens, and {} has {}", config.weights, tensor.shape[0], dataset.name(),
                                   dataset.classes()),
                       "use data with the vocabulary that it was trained on, or give --classes for tokens:FILE");
}

void load_weights(const TrainConfig& config, nn::Module& model, const std::vector<nn::HostTensor>& tensors) {
  nn::LoadOptions options = {.strict = !config.non_strict, .keep_prefix = config.keep_prefix};
  if (config.reset_head) options.without = head_of(config, model);
  const nn::LoadReport report = nn::load_state(model, tensors, config.weights, options);
  if (!report.missing.empty()) log_info("{} lacks {}: they start anew", config.weights, nn::few_of(report.missing));
  if (!report.unexpected.empty())
    log_info("{} also has {}: they are not used", config.weights, nn::few_of(report.unexpected));
}

void freeze(nn::Module& model, const std::string& patterns) {
  const auto parameters = model.named_parameters();
  for (const std::string& pattern : split(patterns, ',')) {
    bool any = false;
    for (const auto& [name, parameter] : parameters)
      if (::fnmatch(pattern.c_str(), name.c_str(), 0) == 0) {
        parameter->set_requires_grad(false);
        any = true;
      }
    if (any) continue;
    std::vector<std::string> names;
    for (const auto& parameter : parameters) names.push_back(parameter.name);
    const auto near = nearest(pattern, names);
    throw UsageError(fmt::format("--freeze {}: no parameter has such a name", pattern),
                     near ? fmt::format("did you mean '{}'? * stands for any characters", *near)
                          : fmt::format("names are such as {}; * stands for any characters", names.front()));
  }
  check_usage(std::ranges::any_of(parameters, [](const auto& named) { return named.parameter->requires_grad(); }),
              "--freeze leaves no parameter to train", "freeze fewer");
}

}  // namespace

namespace {

void check_sizes(const TrainConfig& config, const data::Dataset& dataset) {
  check_fit(config.model.name, dataset);
  if (config.model.in && static_cast<std::size_t>(*config.model.in) != dataset.sample_elements())
    throw UsageError(fmt::format("--in {} where the samples of {} have {} numbers", *config.model.in, dataset.name(),
                                 dataset.sample_elements()),
                     "leave --in out: it follows the data");
  if (config.model.out && *config.model.out != dataset.classes())
    throw UsageError(
        fmt::format("--out {} where {} has {} classes", *config.model.out, dataset.name(), dataset.classes()),
        "leave --out out: it follows the data and --classes");
}

}  // namespace

std::unique_ptr<nn::Module> build_shapes(const TrainConfig& config, nn::Backend& meta, const data::Dataset& dataset) {
  check_sizes(config, dataset);
  nn::Generator generator = nn::Generator::none();
  nn::Context context{meta, generator};
  auto model = nn::make_model(context, model_spec(config.model, dataset));
  if (!config.freeze.empty()) freeze(*model, config.freeze);
  return model;
}

std::unique_ptr<nn::Module> build_model(const TrainConfig& config, nn::Backend& backend, const data::Dataset& dataset,
                                        const RunWeights& weights) {
  check_sizes(config, dataset);
  nn::Generator generator(config.seed);
  nn::Context context{backend, generator};
  const nn::ModelSpec spec = model_spec(config.model, dataset);
  std::unique_ptr<nn::Module> model;
  if (config.weights.empty()) {
    model = nn::make_model(context, spec);
  } else {
    if (weights.card) check_meaning(config, dataset, *weights.card);
    check_vocabulary(config, weights.tensors, dataset);
    const bool all_are_loaded = !config.non_strict && !config.reset_head;
    model = make_model_of_file(context, spec, weights.tensors, config.weights,
                               {.card = weights.card.has_value(), .all_are_loaded = all_are_loaded});
    load_weights(config, *model, weights.tensors);
  }
  if (!config.freeze.empty()) freeze(*model, config.freeze);
  return model;
}

comm::Manifest manifest_of(const TrainConfig& config, const nn::Module& model, const data::Dataset& dataset) {
  comm::Manifest manifest = {
      {"lockstep", fmt::format("{} {} {}", version(), git_revision(), build_type())},
      {"instruction set",
       fmt::format("{}, oneDNN {} {}", cpu_instruction_set(), nn::onednn_version(), nn::cpu_kernel_isa())},
      {"data set", fmt::format("{} of {} samples", dataset.name(), dataset.size())},
  };
  for (const auto& more : {manifest_of(model), describe(config)})
    manifest.insert(manifest.end(), more.begin(), more.end());
  return manifest;
}

DType activations_of(const TrainConfig& config) {
  return config.precision == Precision::kBF16 ? DType::kBF16 : DType::kF32;
}

sampler::DistributedSampler make_sampler(const TrainConfig& config, std::uint64_t length, int rank, int world_size) {
  const auto global_batch = static_cast<std::uint64_t>(global_batch_of(config, world_size));
  // Before anything counts in f32.
  const auto largest = std::min(global_batch, length);
  if (largest > static_cast<std::uint64_t>(Replica::kMostSamples))
    throw UsageError(fmt::format("a step of {} samples", largest),
                     fmt::format("give a global batch of at most {}", Replica::kMostSamples));
  return {{.length = length, .seed = config.seed, .global_batch = global_batch, .tail = config.tail}, rank, world_size};
}

TrainingStep::Options step_options(const TrainConfig& config) {
  return {.clip_norm = config.clip_norm,
          .activations = activations_of(config),
          .record = config.graphs.value_or(true) && !config.find_unused && config.parallel != Parallel::kDp,
          .dropout = config.model.dropout > 0,
          .seed = config.seed,
          .accumulate = config.accumulate,
          .in_step = config.sync_batchnorm};
}

ddp::BucketLimits bucket_limits(const TrainConfig& config, const comm::ProcessGroup& group) {
  constexpr double kMib = 1048576.0;
  return {.first_bytes = static_cast<std::size_t>(config.first_bucket_mb * kMib),
          .bytes = config.bucket_mb ? static_cast<std::size_t>(*config.bucket_mb * kMib) : group.long_enough_bytes()};
}

}  // namespace lockstep::trainer
