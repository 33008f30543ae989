#include "lockstep/nn/models/models.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "base/error.h"
#include "lockstep/nn/io/state.h"

namespace lockstep::nn {

const ModelFamily& linear_family();
const ModelFamily& mlp_family();
const ModelFamily& tabular_family();
const ModelFamily& cnn_family();
const ModelFamily& resnet_family();
const ModelFamily& vgg_family();
const ModelFamily& mobilenet_family();
const ModelFamily& vit_family();
const ModelFamily& gpt_family();
const ModelFamily& llama_family();
const ModelFamily& bert_family();
const ModelFamily& rnn_family();
const ModelFamily& lstm_family();
const ModelFamily& gru_family();

namespace {

Registry<ModelFamily>& model_registry() {
  static Registry<ModelFamily> models(
      "model", {&linear_family(), &mlp_family(), &tabular_family(), &cnn_family(), &resnet_family(), &vgg_family(),
                &mobilenet_family(), &vit_family(), &gpt_family(), &llama_family(), &bert_family(), &rnn_family(),
                &lstm_family(), &gru_family()});
  return models;
}

}  // namespace

const std::vector<const ModelFamily*>& model_families() { return model_registry().all(); }
const ModelFamily* find_model_family(const std::string& name) { return model_registry().find(name); }
const ModelFamily& model_family(const std::string& name) { return model_registry().named(name); }
std::vector<std::string> model_names() { return model_registry().names(); }

void register_model(ModelFamily family) {
  check_usage(family.build != nullptr, "a model without a way to build it", "give ModelFamily::build");
  check_usage(!family.variants.empty(), "a model without a name", "give ModelFamily::variants at least one");
  model_registry().add(std::move(family));
}

TensorsByName::TensorsByName(const std::vector<HostTensor>& tensors) : tensors_(tensors) {
  const auto add = [&](const std::vector<std::string>& names) {
    for (std::size_t i = 0; i < names.size(); ++i) by_name_.emplace(names[i], &tensors[i]);
  };
  for (const auto& possible : possible_names(tensors)) add(possible.names);  // which hide none of those before
}

bool TensorsByName::has_one_in(const std::string& part) const {
  const auto first = by_name_.lower_bound(part);
  return first != by_name_.end() && first->first.starts_with(part);
}

std::vector<const HostTensor*> TensorsByName::with_dims(std::size_t dims) const {
  std::vector<const HostTensor*> found;
  for (const HostTensor& tensor : tensors_)
    if (tensor.shape.size() == dims) found.push_back(&tensor);
  return found;
}

const HostTensor* TensorsByName::find(const std::string& name, std::size_t dims) const {
  const auto found = by_name_.find(name);
  return found != by_name_.end() && found->second->shape.size() == dims ? found->second : nullptr;
}

const std::vector<std::int64_t>* TensorsByName::shape(const std::string& name, std::size_t dims) const {
  const auto* const found = find(name, dims);
  return found != nullptr ? &found->shape : nullptr;
}

std::unique_ptr<Module> make_model(Context& context, const ModelSpec& spec) {
  const ModelFamily& family = model_family(spec.name);
  if (!family.any_samples && (spec.classes < 1 || !std::ranges::all_of(spec.sample_shape, [&](std::int64_t d) {
                                return d >= (spec.categories.empty() ? 1 : 0);
                              })))
    throw UsageError(
        fmt::format("a model with {} classes and inputs of [{}]", spec.classes, fmt::join(spec.sample_shape, ", ")),
        "all sizes are at least 1");
  return build_from(context, [&family, whole = complete(spec)](Context& other) { return family.build(other, whole); });
}

ModelSpec spec_of_tensors(const std::string& name, const Settings& given, const std::vector<HostTensor>& tensors) {
  const ModelFamily& family = model_family(name);
  const ModelVariant& variant = family.variant(name);
  ModelSpec spec{.name = name, .sample_shape = variant.sample_shape, .settings = given};
  spec.classes = variant.classes_of_weights.value_or(spec.classes);
  if (family.read_tensors) family.read_tensors(TensorsByName(tensors), spec);
  for (const auto& [setting, value] : given) spec.settings.set(setting, value);
  spec = complete(spec);
  if (!family.tokens_setting.empty() && spec.sample_shape.empty())
    spec.sample_shape = {spec.settings.integer(family.tokens_setting)};
  return spec;
}

std::vector<MatrixProduct> products_of(const ModelSpec& spec) {
  const ModelFamily& family = model_family(spec.name);
  if (!family.products) return {};
  const std::size_t dims = spec.sample_shape.size();
  LOCKSTEP_ASSERT((dims == 3 && family.takes_images) || (dims == 1 && (family.takes_tokens || family.takes_vectors)),
                  "{} over samples of {} dimensions", spec.name, dims);
  return family.products(complete(spec));
}

void check_images(const ModelSpec& spec, std::int64_t least) {
  if (spec.sample_shape.size() == 3 && spec.sample_shape[0] >= least && spec.sample_shape[1] >= least) return;
  throw UsageError(fmt::format("{} takes images of at least {}x{} pixels", spec.name, least, least),
                   "use such data, or another model");
}

}  // namespace lockstep::nn
