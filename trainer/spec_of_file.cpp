#include "trainer/spec_of_file.h"

#include <cmath>
#include <map>

#include "base/error.h"
#include "data/image_views.h"
#include "nn/io/state.h"

namespace lockstep::trainer {
namespace {

constexpr std::int64_t kImageNetClasses = 1000;
constexpr int kSmallImage = 32;          // CIFAR-10's
constexpr std::int64_t kHeadWidth = 64;  // of every GPT-2
constexpr std::int64_t kCnnChannels =
    64;  // that its last pooling hands on, at a quarter of the image's height and width

/// Tensors of a state dict by name, without what stands before all names.
class Tensors {
 public:
  explicit Tensors(const std::vector<nn::HostTensor>& tensors) {
    const auto names = nn::plain_names(tensors);
    for (std::size_t i = 0; i < names.size(); ++i) by_name_.emplace(names[i], &tensors[i]);
  }

  /// nullptr: there is none of so many dimensions.
  const nn::HostTensor* tensor(const std::string& name, std::size_t dims) const {
    const auto found = by_name_.find(name);
    return found != by_name_.end() && found->second->shape.size() == dims ? found->second : nullptr;
  }
  const std::vector<std::int64_t>* find(const std::string& name, std::size_t dims) const {
    const auto* const found = tensor(name, dims);
    return found != nullptr ? &found->shape : nullptr;
  }

 private:
  std::map<std::string, const nn::HostTensor*> by_name_;
};

void read_gpt(const ModelConfig& given, const Tensors& tensors, nn::ModelSpec& spec) {
  nn::GptSpec& gpt = spec.gpt;
  gpt = nn::default_gpt(given.name);
  spec.classes = gpt.vocabulary;
  const auto* const tokens = tensors.tensor("wte.weight", 2);
  const auto* const head = tensors.tensor("lm_head.weight", 2);
  gpt.tied = tokens == nullptr || head == nullptr || nn::same_content(*tokens, *head);
  // A file that has each tensor once may have kept the head's name of the two.
  if (const auto* tensor = tokens != nullptr ? tokens : head) {
    const auto* const table = &tensor->shape;
    spec.classes = (*table)[0];
    gpt.width = (*table)[1];
    gpt.layers = 0;
    while (tensors.find(fmt::format("h.{}.ln_1.weight", gpt.layers), 1) != nullptr) ++gpt.layers;
    const bool known = given.heads.has_value() || gpt.width == nn::default_gpt(given.name).width;
    if (given.name == "gpt2" && gpt.width % kHeadWidth == 0)
      gpt.heads = gpt.width / kHeadWidth;
    else if (!known)
      throw UsageError("the weights do not say how many attention heads their model has", "give --heads");
  }
  if (const auto* positions = tensors.find("wpe.weight", 2)) gpt.context = (*positions)[0];
  gpt.layers = given.layers.value_or(static_cast<int>(gpt.layers));
  gpt.heads = given.heads.value_or(static_cast<int>(gpt.heads));
  gpt.width = given.width.value_or(static_cast<int>(gpt.width));
  gpt.context = given.context.value_or(static_cast<int>(gpt.context));
  spec.sample_shape = {gpt.context};
}

// An encoder is there where it reads tokens; rows of images are taken to be those of squares.
void read_lstm(const ModelConfig& given, const Tensors& tensors, nn::ModelSpec& spec) {
  const auto* const first = tensors.find("rnn.weight_ih_l0", 2);
  const auto* const encoder = tensors.find("encoder.weight", 2);
  if (const auto* state = tensors.find("rnn.weight_hh_l0", 2)) spec.lstm.width = (*state)[1];
  if (const auto* decoder = tensors.find("decoder.weight", 2)) spec.classes = (*decoder)[0];
  if (first != nullptr) {
    spec.lstm.layers = 1;
    while (tensors.find(fmt::format("rnn.weight_ih_l{}", spec.lstm.layers), 2) != nullptr) ++spec.lstm.layers;
  }
  spec.lstm.layers = given.layers.value_or(static_cast<int>(spec.lstm.layers));
  spec.lstm.width = given.width.value_or(static_cast<int>(spec.lstm.width));
  spec.sample_shape = {given.context.value_or(static_cast<int>(spec.gpt.context))};
  if (first != nullptr && encoder == nullptr) spec.sample_shape = {(*first)[1], (*first)[1], 1};
}

void read_mlp(const ModelConfig& given, const Tensors& tensors, nn::ModelSpec& spec) {
  if (const auto* first = tensors.find("fc1.weight", 2)) spec.sample_shape = {(*first)[1]};
  std::vector<std::int64_t> widths;
  while (const auto* layer = tensors.find(fmt::format("fc{}.weight", widths.size() + 1), 2))
    widths.push_back((*layer)[0]);
  if (!widths.empty()) {
    spec.classes = widths.back();
    widths.pop_back();
    spec.hidden = widths;
  }
  if (!given.hidden.empty()) spec.hidden.assign(given.hidden.begin(), given.hidden.end());
}

void read_image_model(const ModelConfig& given, const Tensors& tensors, nn::ModelSpec& spec) {
  const bool cnn = given.name == "cnn";
  std::int64_t side = default_image_size(given.name), channels = 3;
  if (!cnn && given.name != "resnet18-cifar") spec.classes = kImageNetClasses;
  if (const auto* head = tensors.find(cnn ? "fc2.weight" : "fc.weight", 2)) spec.classes = (*head)[0];
  if (const auto* stem = tensors.find("conv1.weight", 4)) channels = (*stem)[1];
  if (const auto* first = tensors.find("fc1.weight", 2); cnn && first != nullptr)
    // NOLINTNEXTLINE(bugprone-integer-division): whole images have a whole number of channels
    side = 4 * std::llround(std::sqrt(static_cast<double>((*first)[1] / kCnnChannels)));
  spec.sample_shape = {side, side, channels};
}

}  // namespace

int default_image_size(const std::string& model) {
  return model == "resnet18-cifar" ? kSmallImage : data::kDefaultImageSize;
}

nn::ModelSpec spec_of(const ModelConfig& given, const std::vector<nn::HostTensor>& all) {
  const Tensors tensors(all);
  nn::ModelSpec spec{.name = given.name, .sample_shape = {}};
  if (nn::is_gpt(given.name)) {
    read_gpt(given, tensors, spec);
  } else if (nn::is_resnet(given.name) || given.name == "cnn") {
    read_image_model(given, tensors, spec);
  } else if (given.name == "lstm") {
    read_lstm(given, tensors, spec);
  } else if (given.name == "mlp") {
    read_mlp(given, tensors, spec);
  } else if (const auto* layer = tensors.find("fc.weight", 2)) {
    spec.classes = (*layer)[0];
    spec.sample_shape = {(*layer)[1]};
  }
  return spec;
}

}  // namespace lockstep::trainer
