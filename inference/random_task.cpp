#include <algorithm>

#include "base/error.h"
#include "base/json.h"
#include "base/splitmix.h"
#include "base/text.h"
#include "data/built_in.h"
#include "inference/workers.h"
#include "lockstep/base/deadline.h"
#include "lockstep/nn/ops/transfer.h"

namespace lockstep::inference {
namespace {

constexpr const char* kHelp =
    "write random:NxCxHxW for images (random:1x3x224x224), random:NxF or, for tokens, random:NxT; after a comma how "
    "many";
constexpr std::int64_t kMostElements = std::int64_t{1} << 30;
constexpr std::int64_t kMostInputs = std::int64_t{1} << 30;

class RandomWorker final : public InferWorker {
 public:
  /// `batch`: inputs of a job. `device`: what results call it.
  RandomWorker(const InferConfig& config, nn::Module& module, const nn::ModelSpec& spec, const RandomInput& input,
               std::uint64_t batch, std::string device, nn::Backend& backend)
      : config_(config),
        module_(module),
        spec_(spec),
        input_(input),
        batch_(batch),
        device_(std::move(device)),
        backend_(backend),
        tape_(backend),
        takes_tokens_(dynamic_cast<const nn::LanguageModel*>(&module) != nullptr ||
                      nn::model_family(spec.name).word_pieces),
        bf16_(config.precision == InferPrecision::kBF16) {
    tape_.set_recording(false);
    if (bf16_) tape_.set_activations(DType::kBF16);
    if (!takes_tokens_)
      numbers_ = data::make_random(input.sample, static_cast<std::uint64_t>(input.batch) * input.count,
                                   data::kRandomClasses, config.seed.value_or(kDefaultSeed))
                     .train;
  }

  void run(std::uint64_t job, const Put& put, Tally& tally) override {
    const auto start = Clock::now();
    const std::uint64_t first = job * batch_, count = std::min(batch_, input_.count - first);
    const nn::Tensor y = module_.forward(tape_, tape_.input(make(first, count))).value();
    // Whoever measures wants it to be there.
    result_ = nn::values_of(backend_, y);
    std::vector<std::int64_t> dims(y.shape().dims().begin(), y.shape().dims().end());
    tape_.reset();
    const double ms = 1e3 * seconds_between(start, Clock::now());
    check_finite(result_);
    dims[0] = input_.batch;  // of each input
    for (std::uint64_t i = 0; i < count; ++i) {
      tally.result_ms.push_back(ms);
      ++tally.results;
      if (!put(text_of(dims, ms))) return;
    }
  }

 private:
  std::string text_of(const std::vector<std::int64_t>& dims, double ms) const {
    if (!config_.json) return fmt::format("{}, {}\n", to_string(nn::Shape(dims)), device_);
    return JsonObject{{"event", "tensor"}, {"shape", dims}, {"device", device_}, {"latency_ms", ms}}.text() + "\n";
  }

  // Inputs first, first + 1, …, as one.
  nn::Tensor make(std::uint64_t first, std::uint64_t count) {
    std::vector<std::int64_t> dims = {input_.batch * static_cast<std::int64_t>(count)};
    dims.insert(dims.end(), input_.sample.begin(), input_.sample.end());
    const nn::Shape shape(dims);
    if (takes_tokens_) return make_tokens(first, count, shape);
    values_.resize(static_cast<std::size_t>(shape.count()));
    const std::size_t sample = numbers_->sample_elements();
    std::int32_t label = 0;
    for (std::int64_t n = 0; n < dims[0]; ++n)
      numbers_->read(first * static_cast<std::uint64_t>(input_.batch) + static_cast<std::uint64_t>(n),
                     std::span(values_).subspan(static_cast<std::size_t>(n) * sample, sample), label);
    nn::Tensor x = backend_.empty(shape);
    backend_.upload(std::as_bytes(std::span(values_)), x);
    if (!bf16_) return x;
    nn::Tensor rounded = backend_.empty(shape, DType::kBF16);
    backend_.pointwise().cast(x, rounded);
    return rounded;
  }

  nn::Tensor make_tokens(std::uint64_t first, std::uint64_t count, const nn::Shape& shape) {
    const std::int64_t vocabulary = spec_.vocabulary > 0 ? spec_.vocabulary : spec_.classes;
    tokens_.clear();
    for (std::uint64_t i = first; i < first + count; ++i) {
      SplitMix64 random(mix64(config_.seed.value_or(kDefaultSeed), i));
      for (std::int64_t n = 0; n < input_.batch * input_.sample[0]; ++n)
        tokens_.push_back(static_cast<std::int32_t>(random.below(static_cast<std::uint32_t>(vocabulary))));
    }
    nn::Tensor x = backend_.empty(shape, DType::kI32);
    backend_.upload(std::as_bytes(std::span(tokens_)), x);
    return x;
  }

  const InferConfig& config_;
  nn::Module& module_;
  const nn::ModelSpec& spec_;
  const RandomInput input_;
  const std::uint64_t batch_;
  const std::string device_;
  nn::Backend& backend_;
  nn::Tape tape_;
  bool takes_tokens_, bf16_;
  std::shared_ptr<const data::Dataset> numbers_;
  std::vector<float> values_;
  std::vector<std::int32_t> tokens_;
  std::vector<float> result_;
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

std::uint64_t inputs_together(const InferConfig& config, const RandomInput& input) {
  const std::uint64_t batch = std::min(static_cast<std::uint64_t>(config.batch.value_or(1)), input.count);
  std::int64_t elements = input.batch * static_cast<std::int64_t>(batch);  // both are at most 2^30
  for (const std::int64_t dim : input.sample)
    if (__builtin_mul_overflow(elements, dim, &elements) || elements > kMostElements)
      throw UsageError(fmt::format("--input {} with --batch {}: more than 2^30 numbers together", config.input, batch),
                       "give a smaller --batch");
  return batch;
}

InferTask random_task(const InferConfig& config, const InferModel& model, const InferDevices& devices,
                      const RandomInput& input) {
  const bool language = model.language() != nullptr || model.reads_texts();
  if (language && input.sample.size() != 1)
    throw UsageError(fmt::format("--input {} for {}, which takes tokens", config.input, model.spec.name), kHelp);
  const std::uint64_t batch = inputs_together(config, input);
  return {.kind = InferReport::Kind::kTensors,
          .jobs = (input.count + batch - 1) / batch,
          .doing = "computing",
          .batch = static_cast<std::int64_t>(batch),
          .make_worker = [&config, &model, &devices, input, batch](nn::Backend& stream, std::size_t device) {
            return std::make_unique<RandomWorker>(config, *model.modules[device], model.spec, input, batch,
                                                  devices.name(device), stream);
          }};
}

}  // namespace lockstep::inference
