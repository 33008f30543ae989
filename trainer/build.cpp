#include "trainer/build.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "base/cpu.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "base/version.h"
#include "checkpoint/model_metadata.h"
#include "checkpoint/model_options.h"
#include "data/table_schema.h"
#include "lockstep/base/env.h"
#include "lockstep/data/families.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/optim/optimizers.h"
#include "session/opening.h"
#include "trainer/options.h"

namespace lockstep::trainer {

session::SessionOptions session_options_of(const TrainConfig& config) {
  session::SessionOptions options = config;
  options.all_devices = config.parallel == Parallel::kDp;
  options.autotune = config.autotune.value_or(true);
  return options;
}

session::Session open_session(const TrainConfig& config, const std::optional<UsageError>& refusal) {
  const session::SessionChecks checks = {
      .before =
          [&] {
            if (refusal) throw *refusal;
            validate(config);
            check_alone(config);
            if (comm::discover_world(env).rank == 0) check_output_files(config);
          },
      .device = [&](DeviceKind kind, const std::string& why) { check_gpu_options(config, kind, why); }};
  const session::SessionOptions options = session_options_of(config);
  session::Session session = session::open_session(options, checks);
  if (session.group->rank() == 0) session::warn_of_unused(options, session);
  return session;
}

std::optional<std::int64_t> classes_setting(const ModelConfig& model) {
  for (const auto& setting : nn::model_family(model.name).settings)
    if (setting.role == SettingSpec::Role::kClasses)
      if (const SettingValue* const given = model.settings.find(setting.name))
        return std::get<std::int64_t>(given->any());
  return std::nullopt;
}

int usual_image_size(const std::string& model) {
  const nn::ModelFamily& family = nn::model_family(model);
  return family.any_image_size ? static_cast<int>(family.variant(model).sample_shape[0]) : data::kDefaultImageSize;
}

std::unique_ptr<nn::Optimizer> make_optimizer(const TrainConfig& config,
                                              const std::vector<nn::NamedParameter>& parameters,
                                              nn::OptimizerShare share) {
  std::vector<nn::ParameterGroup> groups;
  if (!config.no_decay.empty()) groups.push_back({.patterns = split(config.no_decay, ','), .weight_decay = 0.0});
  return nn::make_optimizer(optimizer_of(config), parameters, config.optimizer_settings, weight_decay_of(config),
                            groups, std::move(share));
}

namespace {

/// Of --vocab, of the weights that are started from, or, where neither says any, to be learned.
data::WordPieceOptions word_piece_options(const TrainConfig& config,
                                          const std::optional<checkpoint::ModelMetadata>& metadata) {
  data::WordPieceOptions options;
  const data::DatasetFamily* const data = data::find_dataset_family(config.data);
  if (config.vocabulary_size) options.vocabulary_size = *config.vocabulary_size;
  options.cased = config.cased.value_or(false);
  options.pieces = checkpoint::open_word_pieces(config.vocabulary, config.cased, metadata, config.weights);
  if (!config.vocabulary.empty())
    log_info("{}: {} word pieces, texts are read {}", config.vocabulary, options.pieces->size(),
             options.pieces->reads());
  if (options.pieces == nullptr && !config.weights.empty() && data != nullptr && !data->synthetic)
    throw UsageError(fmt::format("{} does not say which word pieces its tokens are", config.weights),
                     "give the vocabulary that it was trained with: --vocab vocab.txt");
  return options;
}

std::shared_ptr<const data::Vocabulary> open_byte_pairs(const TrainConfig& config,
                                                        const std::optional<checkpoint::ModelMetadata>& metadata) {
  if (metadata && metadata->characters != nullptr)
    throw UsageError(
        fmt::format("--vocab for {}, which was trained on characters ({})", config.weights, metadata->data),
        "leave --vocab out");
  auto pairs = std::make_shared<const data::BytePairs>(config.vocabulary, config.merges);
  log_info("{}: {} byte pairs", config.vocabulary, pairs->size());
  return pairs;
}

[[noreturn]] void refuse_kind_of_tokens(const TrainConfig& config, const checkpoint::ModelMetadata& metadata,
                                        const std::string& data) {
  constexpr const char *kCharacters = "characters", *kOther = "tokens of another kind";
  const bool trained = metadata.characters != nullptr;  // on characters
  throw UsageError(fmt::format("{} was trained on {} ({}), and {} has {}", config.weights,
                               trained ? kCharacters : kOther, metadata.data, data, trained ? kOther : kCharacters),
                   trained ? "use text:FILE" : "give --vocab for text:FILE, or tokens:FILE, made with that vocabulary");
}

}  // namespace

namespace {

/// The columns that the weights know; those of another target where the last layer is new.
std::shared_ptr<const data::TableSchema> table_of(const checkpoint::ModelMetadata& metadata, bool other_target) {
  if (metadata.table == nullptr || !other_target) return metadata.table;
  data::TableSchema schema = *metadata.table;
  schema.target = {};
  return std::make_shared<const data::TableSchema>(std::move(schema));
}

}  // namespace

data::DataSplits open_splits(const TrainConfig& config, const std::optional<checkpoint::ModelMetadata>& metadata,
                             const data::Parts& parts) {
  const nn::ModelFamily& model = nn::model_family(config.model.name);
  data::OpenOptions options{.classes = config.classes.value_or(0),
                            .seed = config.seed,
                            .settings = config.data_settings,
                            .usual_image_size = usual_image_size(config.model.name),
                            .characters = metadata ? metadata->characters : nullptr,
                            .table = metadata ? table_of(*metadata, config.reset_head) : nullptr,
                            .parts = parts,
                            .ignored_label = ignored_label_of(config)};
  if (!model.tokens_setting.empty()) options.context = tokens_of(config.model);
  if (model.word_pieces) options.word_pieces = word_piece_options(config, metadata);
  if (!model.word_pieces && !config.vocabulary.empty()) options.vocabulary = open_byte_pairs(config, metadata);
  const data::DatasetFamily* const family = data::find_dataset_family(config.data);
  // A model of characters has fewer of them than there are tokens: say why before one is out of range.
  if (metadata && metadata->characters != nullptr && !config.reset_head && family != nullptr && family->has_tokens &&
      family->any_classes)
    refuse_kind_of_tokens(config, *metadata, config.data);
  if (options.classes == 0) options.classes = static_cast<int>(classes_setting(config.model).value_or(0));
  // Synthetic data has as many classes as the model is known for.
  if (options.classes == 0 && family != nullptr && family->synthetic &&
      model.takes_tokens == data::may_have_tokens(config.data))
    options.classes = static_cast<int>(model.variant(config.model.name).classes_of_random_data.value_or(0));
  data::DataSplits splits = data::open_data(config.data, options);
  if (splits.train != nullptr && splits.validation != nullptr &&
      format_of(*splits.validation) != format_of(*splits.train))
    throw UsageError(
        fmt::format("{} has samples {}, and {} has {}", splits.train->name(), format_of(*splits.train).describe(),
                    splits.validation->name(), format_of(*splits.validation).describe()),
        "evaluate on samples of the same kind, with the same inputs in the same order");
  return splits;
}

void apply_targets(TrainConfig& config, const data::Dataset& dataset) {
  if (!config.loss.empty() || !dataset.has_numeric_targets()) return;
  const auto found = std::ranges::find_if(nn::loss_families(), [](const auto* loss) { return loss->takes_numbers; });
  const nn::LossFamily& loss = **found;
  for (const auto& [name, value] : config.loss_settings) {
    const SettingSpec* const usual = find_setting(nn::usual_loss().settings, name);
    if (find_setting(loss.settings, name) == nullptr && (usual == nullptr || !asks_for_nothing(*usual, value)))
      throw UsageError(
          fmt::format("--{} with {}, whose targets are numbers: the loss is {}", name, dataset.name(), loss.name),
          fmt::format("leave --{} out", name));
  }
  config.loss = loss.name;
  config.loss_settings = {};
}

bool measures_outputs(const TrainConfig& config) {
  return !nn::model_family(config.model.name).any_samples && config.parallel == Parallel::kDdp;
}

std::int64_t tokens_of(const ModelConfig& model) {
  const nn::ModelFamily& family = nn::model_family(model.name);
  return resolve(family.settings_of(model.name), model.settings, "model " + model.name).integer(family.tokens_setting);
}

nn::ModelSpec model_spec(const ModelConfig& model, const data::Dataset& dataset) {
  return nn::complete({.name = model.name,
                       .sample_shape = dataset.sample_dims(),
                       .classes = dataset.has_numeric_targets()
                                      ? static_cast<std::int64_t>(dataset.targets_per_sample())
                                      : dataset.classes(),
                       .settings = model.settings,
                       .vocabulary = dataset.vocabulary(),
                       .predictions = static_cast<std::int64_t>(dataset.targets_per_sample()),
                       .categories = dataset.info().categories});
}

namespace {

// What a model takes, and what the data has. Sizes of images are the model's own matter.
void check_fit(const std::string& model, const data::Dataset& dataset) {
  const nn::ModelFamily& family = nn::model_family(model);
  const auto dims = dataset.sample_dims().size();
  const bool tokens = dataset.has_tokens(), images = !tokens && dims == 3, vectors = !tokens && dims == 1;
  if (tokens && !family.takes_tokens)
    throw UsageError(fmt::format("{} takes numbers, and the samples of {} are tokens", model, dataset.name()),
                     fmt::format("use {} for these data, or give other data",
                                 nn::models_that([](const auto& other) { return other.takes_tokens; }, "or")));
  if (!family.takes_tokens || tokens || (images && family.takes_images) || (vectors && family.takes_vectors)) return;
  throw UsageError(fmt::format("{} takes tokens{}, and the samples of {} are {}", model,
                               family.takes_images ? " or images" : "", dataset.name(), images ? "images" : "vectors"),
                   "give --data text:FILE, tokens:FILE or random:tokens,LEN, or use another model for these data");
}

// What the names of the last layer's parameters begin with; nothing where that is the embedding.
std::optional<std::string> head_of(const TrainConfig& config, const nn::Module& model) {
  const auto& head = nn::model_family(config.model.name).head;
  const auto parameters = model.named_parameters();
  const bool has_one = head && (head->own.empty() || std::ranges::any_of(parameters, [&](const auto& named) {
                                  return named.name.starts_with(head->own);
                                }));
  if (!has_one || parameters.empty()) return std::nullopt;
  const std::string& last = parameters.back().name;
  return head->own.empty() ? last.substr(0, last.rfind('.') + 1) : head->own;
}

// Optimizers of matrices move it as all others do.
void mark_head(const TrainConfig& config, nn::Module& model) {
  const auto head = head_of(config, model);
  if (!head) return;
  for (const auto& [name, parameter] : model.named_parameters())
    if (name.starts_with(*head)) parameter->set_elementwise();
}

// With --reset-head: the last layer is not loaded, nor are those that the family has for other tasks.
void leave_head_out(const TrainConfig& config, const nn::Module& model, nn::LoadOptions& options) {
  const auto own = head_of(config, model);
  if (!own)
    throw UsageError(fmt::format("--reset-head with {}, whose last layer is its embedding", config.model.name),
                     "leave --reset-head out");
  const auto& head = nn::model_family(config.model.name).head;
  options.without = {*own};
  options.without.insert(options.without.end(), head->others.begin(), head->others.end());
  options.may_lack = head->new_too;
}

// Of models whose layers depend on the number of a sample's elements: one line, where the shape of a layer would be all
// that is said. Other models find out by themselves what they take.
void check_sample_size(const TrainConfig& config, const data::Dataset& dataset,
                       const checkpoint::ModelMetadata& metadata) {
  const nn::ModelFamily& family = nn::model_family(config.model.name);
  if (family.takes_tokens || family.any_image_size || family.any_samples) return;
  const auto &there = metadata.spec.sample_shape, &here = dataset.sample_dims();
  if (nn::features_of(metadata.spec) == static_cast<std::int64_t>(dataset.sample_elements())) return;
  throw UsageError(fmt::format("{} holds a model for samples of {}, and those of {} are {}", config.weights,
                               fmt::join(there, "x"), dataset.name(), fmt::join(here, "x")),
                   "use data with samples of the same size");
}

// Whether what the file's numbers mean is what the data's mean.
void check_meaning(const TrainConfig& config, const data::Dataset& dataset, const checkpoint::ModelMetadata& metadata) {
  check_sample_size(config, dataset, metadata);
  if (config.reset_head) return;
  if (dataset.has_tokens() && (metadata.characters == nullptr) != (dataset.characters() == nullptr))
    refuse_kind_of_tokens(config, metadata, dataset.name());
  const auto& names = dataset.class_names();
  if (names.empty() || metadata.class_names.empty()) return;
  for (std::size_t i = 0; i < std::max(names.size(), metadata.class_names.size()); ++i) {
    const auto name = [i](const std::vector<std::string>& from) { return i < from.size() ? from[i] : "none"; };
    if (name(names) != name(metadata.class_names))
      throw UsageError(fmt::format("{} knows class {} as '{}', and {} as '{}'", config.weights, i,
                                   name(metadata.class_names), dataset.name(), name(names)),
                       "use the same classes; lockstep train --reset-head is for other ones");
  }
}

// Of a language model that has another vocabulary than the data: one line, where names and shapes would be many.
void check_vocabulary(const TrainConfig& config, const std::vector<nn::HostTensor>& tensors,
                      const data::Dataset& dataset) {
  const std::string& table = nn::model_family(config.model.name).token_table;
  if (!dataset.has_tokens() || table.empty()) return;
  const int tokens = dataset.vocabulary() > 0 ? dataset.vocabulary() : dataset.classes();
  for (const auto& tensor : tensors)
    if (tensor.name.ends_with(table) && tensor.shape.size() == 2 && tensor.shape[0] != tokens)
      throw UsageError(
          fmt::format("{} has {} tokens, and {} has {}", config.weights, tensor.shape[0], dataset.name(), tokens),
          dataset.word_pieces() != nullptr
              ? "give the vocabulary that it was trained with: --vocab vocab.txt"
              : "use data with the vocabulary that it was trained on: --vocab vocab.json for text:FILE, --classes for "
                "tokens:FILE");
}

// Of a model with another last layer than the file's: one line, where names would be many.
void check_task(const TrainConfig& config, const nn::Module& model, const std::vector<nn::HostTensor>& tensors,
                const data::Dataset& dataset) {
  const auto& head = nn::model_family(config.model.name).head;
  if (config.reset_head || config.non_strict || !head || head->own.empty()) return;
  const auto is_own = [&](const std::string& name) { return name.starts_with(head->own); };
  const bool wanted = std::ranges::any_of(model.named_parameters(), is_own, &nn::NamedParameter::name);
  const bool there = nn::TensorsByName(tensors).has_one_in(head->own);
  if (wanted && !there)
    throw UsageError(fmt::format("{} holds no layer for the classes of {}", config.weights, dataset.name()),
                     "train that layer: lockstep train --reset-head reinitializes it");
  if (!wanted && there)
    throw UsageError(
        fmt::format("{} holds a model for classes of texts, and {} has none", config.weights, dataset.name()),
        "use csv:FILE or texts:DIR, or --non-strict, which initializes missing layers");
}

void load_weights(const TrainConfig& config, nn::Module& model, const std::vector<nn::HostTensor>& tensors) {
  nn::LoadOptions options = checkpoint::load_options_of(config);
  if (config.reset_head) leave_head_out(config, model, options);
  checkpoint::log_report(nn::load_state(model, tensors, config.weights, options), config.weights, "are initialized");
}

void freeze(nn::Module& model, const std::string& patterns) {
  const auto parameters = model.named_parameters();
  for (const std::string& pattern : split(patterns, ',')) {
    for (const std::size_t i : nn::find_parameters(parameters, pattern, "--freeze " + pattern))
      parameters[i].parameter->set_requires_grad(false);
  }
  check_usage(std::ranges::any_of(parameters, [](const auto& named) { return named.parameter->requires_grad(); }),
              "--freeze leaves no parameter to train", "freeze fewer");
}

}  // namespace

namespace {

// A label that no sample can have would be ignored for nothing.
void check_ignored(std::int32_t label, const data::Dataset& dataset) {
  if (dataset.info().mixing.any())
    throw UsageError(fmt::format("--ignore-index {} with mixed samples, whose targets are probabilities", label),
                     "leave it out, or do not mix samples");
  if (dataset.has_numeric_targets() || (label >= 0 && label < dataset.classes()) ||
      dataset.info().ignored_label == label)
    return;
  throw UsageError(
      fmt::format("--ignore-index {} for {}, whose labels are 0 to {}", label, dataset.name(), dataset.classes() - 1),
      "leave it out, or give a label that is among them");
}

// Whether the loss can compare the model's outputs with what the data have for them.
void check_targets(const TrainConfig& config, const data::Dataset& dataset) {
  const nn::LossFamily& loss = nn::loss_family(loss_of(config));
  const bool numbers = dataset.has_numeric_targets();
  const auto& range = dataset.info().target_range;
  if (numbers && range && (double{range->first} < loss.least_target || double{range->second} > loss.most_target))
    throw UsageError(
        fmt::format("targets of {} are numbers from {:.4g} to {:.4g}{}, and those of the loss {} lie from {} to {}",
                    dataset.name(), range->first, range->second,
                    dataset.info().table != nullptr ? ", standardised" : "", loss.name, loss.least_target,
                    loss.most_target),
        dataset.info().table != nullptr ? "use another loss; columns with 0 and 1 alone are classes by themselves"
                                        : "use another loss, or other targets");
  if (dataset.info().mixing.any() && loss.takes_labels && !loss.takes_probabilities)
    throw UsageError(
        fmt::format("mixed samples have probabilities of classes, and the loss {} takes labels alone", loss.name),
        "leave --mixup and --cutmix out, or use another loss");
  if (const auto ignored = ignored_label_of(config)) check_ignored(*ignored, dataset);
  if (numbers ? loss.takes_numbers : loss.takes_labels) return;
  std::vector<std::string> others;
  for (const auto* other : nn::loss_families())
    if (numbers ? other->takes_numbers : other->takes_labels) others.push_back("--loss " + other->name);
  throw UsageError(fmt::format("the targets of {} are {}, and the loss {} takes {}", dataset.name(),
                               numbers ? "numbers" : "labels", loss.name, numbers ? "labels" : "numbers"),
                   fmt::format("use {}", listed(others, "or")));
}

void check_sizes(const TrainConfig& config, const data::Dataset& dataset) {
  check_targets(config, dataset);
  if (nn::model_family(config.model.name).any_samples) return;
  const nn::ModelFamily& family = nn::model_family(config.model.name);
  if (!dataset.info().categories.empty() && !family.takes_categories)
    throw UsageError(fmt::format("{} takes numbers alone, and {} has categories in {} of its columns",
                                 config.model.name, dataset.name(), dataset.info().categories.size()),
                     fmt::format("use {}, or leave these columns out with --ignore",
                                 nn::models_that([](const auto& other) { return other.takes_categories; }, "or")));
  if (!dataset.further_inputs().empty() && dataset.info().categories.empty() && !family.word_pieces)
    throw UsageError(fmt::format("{} takes one input, and the samples of {} have {}", config.model.name, dataset.name(),
                                 dataset.further_inputs().size() + 1),
                     "train a model of your own, which overrides nn::Module::forward_all()");
  check_fit(config.model.name, dataset);
  for (const auto& setting : nn::model_family(config.model.name).settings) {
    const SettingValue* const given = config.model.settings.find(setting.name);
    if (given == nullptr) continue;
    const auto refuse = [&](std::uint64_t there, const char* what, const char* remedy) {
      throw UsageError(
          fmt::format("--{} {} where {} {} {}", setting.name, to_string(*given), dataset.name(), what, there),
          fmt::format("leave --{} out: it follows {}", setting.name, remedy));
    };
    if (setting.role == SettingSpec::Role::kSampleElements &&
        std::get<std::int64_t>(given->any()) != static_cast<std::int64_t>(dataset.sample_elements()))
      refuse(dataset.sample_elements(), "has numbers in a sample:", "the data");
    if (setting.role == SettingSpec::Role::kClasses && std::get<std::int64_t>(given->any()) != dataset.classes())
      refuse(static_cast<std::uint64_t>(dataset.classes()), "has classes:", "the data and --classes");
  }
}

}  // namespace

namespace {

void set_recomputed(const TrainConfig& config, nn::Module& model) {
  if (config.recompute.empty()) return;
  const auto blocks = model.blocks();
  const auto wanted = config.recompute == kAllBlocks ? static_cast<std::int64_t>(blocks.size())
                                                     : parse_int(config.recompute).value_or(0);
  if (blocks.empty())
    throw UsageError(fmt::format("--recompute {}: {} has no blocks", config.recompute, config.model.name),
                     "leave it out, or return the model's parts from Module::blocks()");
  if (wanted > static_cast<std::int64_t>(blocks.size()))
    throw UsageError(
        fmt::format("--recompute {}: {} has {} blocks", config.recompute, config.model.name, blocks.size()),
        "give as many or fewer, or the word blocks for all");
  for (std::int64_t i = 0; i < wanted; ++i) blocks[static_cast<std::size_t>(i)]->set_recomputed(true);
}

}  // namespace

std::unique_ptr<nn::Module> build_shapes(const TrainConfig& config, nn::Backend& meta, const data::Dataset& dataset) {
  check_sizes(config, dataset);
  nn::Generator generator = nn::Generator::none();
  nn::Context context{meta, generator};
  auto model = nn::make_model(context, model_spec(config.model, dataset));
  if (!config.freeze.empty()) freeze(*model, config.freeze);
  mark_head(config, *model);
  set_recomputed(config, *model);
  return model;
}

std::unique_ptr<nn::Module> build_model(const TrainConfig& config, nn::Backend& backend, const data::Dataset& dataset,
                                        const RunWeights& weights, bool draws) {
  check_sizes(config, dataset);
  const bool all_are_loaded = !config.weights.empty() && !config.non_strict && !config.reset_head;
  nn::Generator generator = draws && !all_are_loaded ? nn::Generator(config.seed) : nn::Generator::zeros();
  nn::Context context{backend, generator};
  const nn::ModelSpec spec = model_spec(config.model, dataset);
  std::unique_ptr<nn::Module> model;
  if (config.weights.empty()) {
    model = nn::make_model(context, spec);
  } else {
    if (weights.metadata) check_meaning(config, dataset, *weights.metadata);
    check_vocabulary(config, weights.tensors, dataset);
    model =
        checkpoint::make_model_of_file(context, spec, weights.tensors, config.weights,
                                       {.metadata = weights.metadata.has_value(), .all_are_loaded = all_are_loaded});
    check_task(config, *model, weights.tensors, dataset);
    load_weights(config, *model, weights.tensors);
  }
  if (!config.freeze.empty()) freeze(*model, config.freeze);
  mark_head(config, *model);
  set_recomputed(config, *model);
  return model;
}

std::vector<nn::Tensor> averaged_tensors(const parallel::DistributedDataParallel& ddp, const nn::Optimizer& optimizer) {
  std::vector<nn::Tensor> tensors;
  for (const auto& [name, parameter] : ddp.parameters()) tensors.push_back(parameter->value());
  for (const auto& moment : optimizer.moments()) tensors.push_back(moment.value);
  return tensors;
}

comm::Manifest manifest_of(const TrainConfig& config, const nn::Module& model, const data::Dataset& dataset,
                           int threads) {
  comm::Manifest manifest = {
      {"lockstep", fmt::format("{} {} {}", version(), git_revision(), build_type())},
      {"instruction set",
       fmt::format("{}, oneDNN {} {}", cpu_instruction_set(), nn::onednn_version(), nn::cpu_kernel_isa())},
      {"data set", fmt::format("{} of {} samples", dataset.name(), dataset.size())},
      {"samples", format_of(dataset).describe()},
  };
  if (dataset.word_pieces() != nullptr) manifest.emplace_back("word pieces", dataset.word_pieces()->sha256());
  if (!dataset.info().vocabulary_sha256.empty()) manifest.emplace_back("vocabulary", dataset.info().vocabulary_sha256);
  if (dataset.info().table != nullptr) manifest.emplace_back("columns", dataset.info().table->sha256());
  // Products of matrices have the bits of their number of threads: every rank's update is to have the same.
  if (nn::optimizer_family(optimizer_of(config)).whole_matrices)
    manifest.emplace_back("threads", fmt::to_string(threads));
  for (const auto& more : {parallel::manifest_of(model), describe(config)})
    manifest.insert(manifest.end(), more.begin(), more.end());
  return manifest;
}

sampler::DistributedSampler make_sampler(const TrainConfig& config, std::uint64_t length, int rank, int world_size,
                                         std::vector<std::uint32_t> shares) {
  const auto global_batch = static_cast<std::uint64_t>(global_batch_of(config, world_size));
  // Before anything counts in f32.
  const auto largest = std::min(global_batch, length);
  if (largest > static_cast<std::uint64_t>(kMostSamples))
    throw UsageError(fmt::format("a step of {} samples", largest),
                     fmt::format("give a global batch of at most {}", kMostSamples));
  const bool drops = config.tail == sampler::Tail::kDrop;
  if (config.stateful && (drops ? length / 2 < global_batch : length <= global_batch))
    throw UsageError(
        fmt::format("--stateful with {} rows in batches of {}: none is followed by another", length, global_batch),
        "use a smaller --global-batch or --context, or leave --stateful out");
  return {{.length = length,
           .seed = config.seed,
           .global_batch = global_batch,
           .tail = config.tail,
           .order = config.stateful ? sampler::Order::kColumns : sampler::Order::kShuffled,
           .shards = static_cast<std::uint64_t>(config.shards),
           .shares = std::move(shares)},
          rank,
          world_size};
}

std::int64_t total_steps(const TrainConfig& config, std::int64_t steps_per_epoch) {
  if (config.steps) return *config.steps;
  std::int64_t total = 0;
  if (__builtin_mul_overflow(config.epochs, steps_per_epoch, &total))
    throw UsageError(fmt::format("{} epochs of {} steps are too many to count", config.epochs, steps_per_epoch),
                     "give fewer --epochs");
  return total;
}

nn::LossFunction training_loss(const TrainConfig& config) {
  return nn::make_loss(nn::loss_family(loss_of(config)), config.loss_settings);
}

nn::LossFunction evaluation_loss(const TrainConfig& config) {
  const nn::LossFamily& family = nn::loss_family(loss_of(config));
  Settings settings;
  for (const auto& [name, value] : config.loss_settings)
    if (const auto* spec = find_setting(family.settings, name);
        spec == nullptr || spec->role != SettingSpec::Role::kTraining)
      settings.set(name, value);
  return nn::make_loss(family, settings);
}

std::optional<std::int32_t> ignored_label_of(const TrainConfig& config) {
  const auto& families = nn::loss_families();
  const auto found = std::ranges::find(families, loss_of(config), [](const auto* family) { return family->name; });
  if (found == families.end() || (*found)->ignored == nullptr) return std::nullopt;  // others complain of unknown ones
  return (*found)->ignored(own_settings((*found)->settings, config.loss_settings, "loss " + (*found)->name));
}

TrainingStep::Options step_options(const TrainConfig& config) {
  return {.loss = training_loss(config),
          .clip_norm = config.clip_norm,
          .clip_value = config.clip_value,
          .activations = dtype_of(config.precision),
          .dropout = is_random(config.model),
          .seed = config.seed,
          .ignored = ignored_label_of(config),
          .accumulate = config.accumulate,
          .in_step = config.sync_batchnorm};
}

bool wants_graphs(const TrainConfig& config) {
  return config.graphs.value_or(true) && !config.find_unused_parameters && config.shards == 0 &&
         config.parallel != Parallel::kDp && !ignored_label_of(config);
}

void register_hook(const TrainConfig& config, parallel::DistributedDataParallel& ddp) {
  auto hook = ddp::make_comm_hook(config.comm_hook);
  if (hook == nullptr) return;
  ddp.register_comm_hook(std::move(hook));
  const auto bytes = ddp.reducer().bytes_sent();
  if (bytes && bytes->sent >= bytes->without_hook && bytes->sent > 0 && ddp.group().rank() == 0)
    log_warn("--comm-hook {} saves nothing here: for {} on {} ranks it sends {} per step instead of {}",
             config.comm_hook, config.model.name, ddp.group().size(), human_bytes(bytes->sent),
             human_bytes(bytes->without_hook));
}

std::optional<HookReport> hook_report_of(const ddp::Reducer& reducer) {
  const ddp::CommHook* const hook = reducer.comm_hook();
  const auto bytes = reducer.bytes_sent();
  if (hook == nullptr || !bytes || bytes->without_hook <= 0) return std::nullopt;
  return HookReport{.name = hook->name(),
                    .bytes_sent = bytes->sent,
                    .bytes_without_hook = bytes->without_hook,
                    .fallbacks = hook->fallbacks()};
}

parallel::DistributedDataParallel::Options ddp_options(const TrainConfig& config) {
  parallel::DistributedDataParallel::Options options = config;
  options.defer_unused_check = true;
  return options;
}

}  // namespace lockstep::trainer
