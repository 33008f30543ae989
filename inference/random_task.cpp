
#include "base/error.h"
#include "base/json.h"
#include "base/splitmix.h"
#include "base/text.h"
#include "data/random.h"
#include "inference/workers.h"
#include "lockstep/base/deadline.h"

namespace lockstep::inference {
namespace {

constexpr const char* kHelp =
    "write random:NxCxHxW for images (random:1x3x224x224), random:NxF or, for tokens, random:NxT; after a comma how "
    "many";
constexpr std::int64_t kMostElements = std::int64_t{1} << 30;
constexpr std::int64_t kMostInputs = std::int64_t{1} << 30;

nn::Shape batched(const RandomInput& input) {
  std::vector<std::int64_t> dims = {input.batch};
  dims.insert(dims.end(), input.sample.begin(), input.sample.end());
  return nn::Shape(dims);
}

class RandomWorker final : public InferWorker {
 public:
  RandomWorker(const InferConfig& config, const InferModel& model, const RandomInput& input, nn::Backend& backend)
      : config_(config),
        model_(model),
        input_(input),
        backend_(backend),
        tape_(backend),
        bf16_(config.precision == Precision::kBF16) {
    tape_.set_recording(false);
    if (bf16_) tape_.set_activations(DType::kBF16);
    if (model.language() == nullptr)
      numbers_ = data::make_random(input.sample, static_cast<std::uint64_t>(input.batch) * input.count,
                                   data::kRandomClasses, config.seed.value_or(kDefaultSeed))
                     .train;
  }

  void run(std::uint64_t job, const Put& put, Tally& tally) override {
    const auto start = Clock::now();
    const nn::Tensor y = model_.module->forward(tape_, tape_.input(make(job))).value();
    // Whoever measures wants it to be there.
    result_.resize(y.bytes());
    backend_.download(y, result_);
    tape_.reset();
    const double ms = 1e3 * seconds_between(start, Clock::now());
    tally.result_ms.push_back(ms);
    ++tally.results;
    put(text_of(y.shape(), ms));
  }

 private:
  std::string text_of(const nn::Shape& shape, double ms) const {
    const std::string device = to_string(backend_.device());
    if (!config_.json) return fmt::format("{}, {}\n", to_string(shape), device);
    const std::vector<std::int64_t> dims(shape.dims().begin(), shape.dims().end());
    return JsonObject{{"event", "tensor"}, {"shape", dims}, {"device", device}, {"latency_ms", ms}}.text() + "\n";
  }

  nn::Tensor make(std::uint64_t job) {
    const nn::Shape shape = batched(input_);
    if (model_.language() != nullptr || model_.reads_texts()) return make_tokens(job, shape);
    values_.resize(static_cast<std::size_t>(shape.count()));
    const std::size_t sample = numbers_->sample_elements();
    std::int32_t label = 0;
    for (std::int64_t n = 0; n < input_.batch; ++n)
      numbers_->read(job * static_cast<std::uint64_t>(input_.batch) + static_cast<std::uint64_t>(n),
                     std::span(values_).subspan(static_cast<std::size_t>(n) * sample, sample), label);
    nn::Tensor x = backend_.empty(shape);
    backend_.upload(std::as_bytes(std::span(values_)), x);
    if (!bf16_) return x;
    nn::Tensor rounded = backend_.empty(shape, DType::kBF16);
    backend_.pointwise().cast(x, rounded);
    return rounded;
  }

  nn::Tensor make_tokens(std::uint64_t job, const nn::Shape& shape) {
    SplitMix64 random(mix64(config_.seed.value_or(kDefaultSeed), job));
    tokens_.resize(static_cast<std::size_t>(shape.count()));
    const std::int64_t vocabulary = model_.spec.vocabulary > 0 ? model_.spec.vocabulary : model_.spec.classes;
    for (auto& token : tokens_) token = static_cast<std::int32_t>(random.below(static_cast<std::uint32_t>(vocabulary)));
    nn::Tensor x = backend_.empty(shape, DType::kI32);
    backend_.upload(std::as_bytes(std::span(tokens_)), x);
    return x;
  }

  const InferConfig& config_;
  const InferModel& model_;
  const RandomInput input_;
  nn::Backend& backend_;
  nn::Tape tape_;
  bool bf16_;
  std::shared_ptr<const data::Dataset> numbers_;
  std::vector<float> values_;
  std::vector<std::int32_t> tokens_;
  std::vector<std::byte> result_;
};

}  // namespace

RandomInput parse_random_input(const std::string& text) {
  const auto refuse = [&](const std::string& why) {
    throw UsageError(fmt::format("--input {}: {}", text, why), kHelp);
  };
  LOCKSTEP_ASSERT(text.starts_with(kRandomInput));
  const auto pieces = split(std::string_view(text).substr(kRandomInput.size()), ',');
  std::vector<std::int64_t> dims;
  std::int64_t elements = 1;
  for (const auto& piece : split(pieces[0], 'x')) {
    const auto dim = parse_int(piece);
    if (!dim || *dim < 1) refuse(fmt::format("'{}' is no shape", pieces[0]));
    if (*dim > kMostElements / elements) refuse("an input of more than 2^30 numbers");
    elements *= *dim;
    dims.push_back(*dim);
  }
  RandomInput input;
  if (dims.size() == 4)
    input.sample = {dims[2], dims[3], dims[1]};
  else if (dims.size() == 2)
    input.sample = {dims[1]};
  else
    refuse(fmt::format("'{}' has {} dimension{}, not 2 or 4", pieces[0], dims.size(), dims.size() == 1 ? "" : "s"));
  input.batch = dims[0];
  if (pieces.size() > 2) refuse("it has more than one comma");
  if (pieces.size() == 2) {
    const auto count = parse_int(pieces[1]);
    if (!count || *count < 1 || *count > kMostInputs) refuse(fmt::format("'{}' is no number of inputs", pieces[1]));
    input.count = static_cast<std::uint64_t>(*count);
  }
  return input;
}

InferTask random_task(const InferConfig& config, const InferModel& model, const RandomInput& input) {
  const bool language = model.language() != nullptr || model.reads_texts();
  if (language && input.sample.size() != 1)
    throw UsageError(fmt::format("--input {} for {}, which takes tokens", config.input, model.spec.name), kHelp);
  if (language)
    if (const auto positions = nn::most_tokens(model.spec); positions && input.sample[0] > *positions)
      throw UsageError(fmt::format("--input {} for a model of {} positions", config.input, *positions),
                       "give fewer tokens");
  return {.kind = InferReport::Kind::kTensors,
          .jobs = input.count,
          .doing = "computing",
          .make_worker = [&config, &model, input](nn::Backend& backend) {
            return std::make_unique<RandomWorker>(config, model, input, backend);
          }};
}

}  // namespace lockstep::inference
