#include "trainer/infer/model.h"

#include <array>
#include <cmath>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "data/image_views.h"
#include "nn/io/state.h"
#include "nn/io/weights.h"
#include "trainer/adopt_card.h"
#include "trainer/model_of_file.h"

namespace lockstep::trainer {
namespace {

constexpr std::int64_t kImageNetClasses = 1000;
constexpr std::int64_t kSmallImage = 32;  // CIFAR-10's
constexpr std::int64_t kHeadWidth = 64;   // of every GPT-2
constexpr std::int64_t kCnnChannels =
    64;  // that its last pooling hands on, at a quarter of the image's height and width

bool is_resnet(const std::string& name) { return name.starts_with("resnet"); }
bool is_gpt(const std::string& name) { return name.starts_with("gpt"); }

/// Shapes of a state dict by name, whatever stands in front of all names.
class Shapes {
 public:
  explicit Shapes(const std::vector<nn::HostTensor>& tensors) : tensors_(tensors) {}

  /// nullptr: there is none of so many dimensions.
  const std::vector<std::int64_t>* find(const std::string& name, std::size_t dims) const {
    constexpr std::array<const char*, 4> kPrefixes = {"", "module.", "transformer.", "module.transformer."};
    for (const auto& tensor : tensors_)
      for (const char* prefix : kPrefixes)
        if (tensor.name == prefix + name && tensor.shape.size() == dims) return &tensor.shape;
    return nullptr;
  }

 private:
  const std::vector<nn::HostTensor>& tensors_;
};

void read_gpt(const ModelConfig& given, const Shapes& shapes, nn::ModelSpec& spec) {
  nn::GptSpec& gpt = spec.gpt;
  gpt = nn::default_gpt(given.name);
  spec.classes = gpt.vocabulary;
  if (const auto* table = shapes.find("wte.weight", 2)) {
    spec.classes = (*table)[0];
    gpt.width = (*table)[1];
    gpt.layers = 0;
    while (shapes.find(fmt::format("h.{}.ln_1.weight", gpt.layers), 1) != nullptr) ++gpt.layers;
    const bool known = given.heads.has_value() || gpt.width == nn::default_gpt(given.name).width;
    if (given.name == "gpt2" && gpt.width % kHeadWidth == 0)
      gpt.heads = gpt.width / kHeadWidth;
    else if (!known)
      throw UsageError("the weights do not say how many attention heads their model has", "give --heads");
  }
  if (const auto* positions = shapes.find("wpe.weight", 2)) gpt.context = (*positions)[0];
  gpt.layers = given.layers.value_or(static_cast<int>(gpt.layers));
  gpt.heads = given.heads.value_or(static_cast<int>(gpt.heads));
  gpt.width = given.width.value_or(static_cast<int>(gpt.width));
  gpt.context = given.context.value_or(static_cast<int>(gpt.context));
  spec.sample_shape = {gpt.context};
}

// An encoder is there where it reads tokens; rows of images are taken to be those of squares.
void read_lstm(const ModelConfig& given, const Shapes& shapes, nn::ModelSpec& spec) {
  const auto* const first = shapes.find("rnn.weight_ih_l0", 2);
  const auto* const encoder = shapes.find("encoder.weight", 2);
  if (const auto* state = shapes.find("rnn.weight_hh_l0", 2)) spec.lstm.width = (*state)[1];
  if (const auto* decoder = shapes.find("decoder.weight", 2)) spec.classes = (*decoder)[0];
  if (first != nullptr) {
    spec.lstm.layers = 1;
    while (shapes.find(fmt::format("rnn.weight_ih_l{}", spec.lstm.layers), 2) != nullptr) ++spec.lstm.layers;
  }
  spec.lstm.layers = given.layers.value_or(static_cast<int>(spec.lstm.layers));
  spec.lstm.width = given.width.value_or(static_cast<int>(spec.lstm.width));
  spec.sample_shape = {given.context.value_or(static_cast<int>(spec.gpt.context))};
  if (first != nullptr && encoder == nullptr) spec.sample_shape = {(*first)[1], (*first)[1], 1};
}

void read_mlp(const ModelConfig& given, const Shapes& shapes, nn::ModelSpec& spec) {
  if (const auto* first = shapes.find("fc1.weight", 2)) spec.sample_shape = {(*first)[1]};
  std::vector<std::int64_t> widths;
  while (const auto* layer = shapes.find(fmt::format("fc{}.weight", widths.size() + 1), 2))
    widths.push_back((*layer)[0]);
  if (!widths.empty()) {
    spec.classes = widths.back();
    widths.pop_back();
    spec.hidden = widths;
  }
  if (!given.hidden.empty()) spec.hidden.assign(given.hidden.begin(), given.hidden.end());
}

void read_image_model(const ModelConfig& given, const Shapes& shapes, nn::ModelSpec& spec) {
  const bool cnn = given.name == "cnn";
  std::int64_t side = given.name == "resnet18-cifar" ? kSmallImage : data::kDefaultImageSize, channels = 3;
  if (!cnn && given.name != "resnet18-cifar") spec.classes = kImageNetClasses;
  if (const auto* head = shapes.find(cnn ? "fc2.weight" : "fc.weight", 2)) spec.classes = (*head)[0];
  if (const auto* stem = shapes.find("conv1.weight", 4)) channels = (*stem)[1];
  if (const auto* first = shapes.find("fc1.weight", 2); cnn && first != nullptr)
    side = 4 * std::llround(std::sqrt(static_cast<double>((*first)[1] / kCnnChannels)));
  spec.sample_shape = {side, side, channels};
}

nn::LoadReport load(const InferConfig& config, nn::Module& module, const std::vector<nn::HostTensor>& tensors) {
  return nn::load_state(module, tensors, config.weights,
                        {.strict = !config.non_strict, .keep_prefix = config.keep_prefix, .without = {}});
}

}  // namespace

nn::ModelSpec spec_of(const ModelConfig& given, const std::vector<nn::HostTensor>& tensors) {
  const Shapes shapes(tensors);
  nn::ModelSpec spec{.name = given.name, .sample_shape = {}};
  if (is_gpt(given.name)) {
    read_gpt(given, shapes, spec);
  } else if (is_resnet(given.name) || given.name == "cnn") {
    read_image_model(given, shapes, spec);
  } else if (given.name == "lstm") {
    read_lstm(given, shapes, spec);
  } else if (given.name == "mlp") {
    read_mlp(given, shapes, spec);
  } else if (const auto* layer = shapes.find("fc.weight", 2)) {
    spec.classes = (*layer)[0];
    spec.sample_shape = {(*layer)[1]};
  }
  return spec;
}

InferModel open_model(const InferConfig& config, nn::Backend& backend,
                      const std::optional<std::vector<std::int64_t>>& sample_shape) {
  InferModel model;
  ModelConfig given = config.model;
  std::vector<nn::HostTensor> tensors;
  if (!config.weights.empty()) {
    model.card = read_card(config.weights);
    if (model.card) adopt(given, *model.card, config.weights);
    tensors = nn::read_weights(config.weights);
    for (const auto& tensor : tensors)
      if (tensor.bytes.empty())
        throw IoError(fmt::format("{}: tensor '{}' is empty", config.weights, tensor.name), "check where it came from");
  }
  model.spec = model.card ? model.card->spec : spec_of(given, tensors);
  nn::ModelSpec& spec = model.spec;
  if (config.image_size && spec.sample_shape.size() == 3) {
    if (model.card && !is_resnet(spec.name))
      throw UsageError(fmt::format("--image-size {}, but {} was trained on {}x{}", *config.image_size, config.weights,
                                   spec.sample_shape[0], spec.sample_shape[1]),
                       "leave --image-size out");
    spec.sample_shape[0] = spec.sample_shape[1] = *config.image_size;
  }
  if (sample_shape) spec.sample_shape = *sample_shape;
  // Values that are loaded next need not be drawn.
  const bool all_are_loaded = !config.weights.empty() && !config.non_strict;
  nn::Generator generator = all_are_loaded ? nn::Generator::zeros() : nn::Generator(config.seed.value_or(kDefaultSeed));
  nn::Context context{backend, generator};
  if (config.weights.empty()) {
    model.module = nn::make_model(context, spec);
  } else {
    // Without a card the file may be of another model, whose names are then compared.
    model.module = make_model_of_file(context, spec, tensors, config.weights, all_are_loaded && model.card);
    const nn::LoadReport report = load(config, *model.module, tensors);
    if (!report.missing.empty())
      log_info("{} lacks {}: they have new values", config.weights, join(report.missing, ", "));
    if (!report.unexpected.empty())
      log_info("{} also has {}: they are not used", config.weights, join(report.unexpected, ", "));
  }
  model.module->fuse();
  if (config.precision == Precision::kBF16)
    for (const auto& named : model.module->named_parameters()) named.parameter->as(DType::kBF16);
  return model;
}

}  // namespace lockstep::trainer
