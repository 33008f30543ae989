#include "nn/models/lstm.h"

#include "base/error.h"
#include "lockstep/nn/models/models.h"

namespace lockstep::nn {
namespace {

const LstmSpec& checked(const LstmSpec& spec) {
  if (spec.layers < 1 || spec.width < 1)
    throw UsageError(fmt::format("lstm with {} layers of {} features", spec.layers, spec.width),
                     "--layers and --width are at least 1");
  return spec;
}

// One for what the rnn reads or leaves; those between its layers are numbered after it.
constexpr std::int64_t kDropIn = 0, kDropOut = 1, kDropBetween = 2;

void check_sequences(const Tensor& tokens) {
  if (tokens.dtype() != DType::kI32 || tokens.shape().size() != 2)
    throw UsageError(fmt::format("lstm was given {} of {}", to_string(tokens.shape()), name_of(tokens.dtype())),
                     "it takes tokens (--data text:FILE) or images");
}

}  // namespace

LstmLanguageModel::LstmLanguageModel(Context& context, const LstmSpec& spec, std::int64_t vocabulary)
    : vocabulary_(vocabulary),
      drop_(register_module("drop", std::make_unique<Dropout>(checked(spec).dropout, kDropIn))),
      encoder_(register_module("encoder", std::make_unique<Embedding>(context, vocabulary, spec.width))),
      rnn_(register_module(
          "rnn", std::make_unique<Lstm>(context, spec.width, spec.width, spec.layers, spec.dropout, kDropBetween))),
      drop_out_(register_module("drop_out", std::make_unique<Dropout>(spec.dropout, kDropOut))),
      decoder_(register_module("decoder", std::make_unique<Linear>(context, spec.width, vocabulary))) {}

Var LstmLanguageModel::forward(Tape& tape, Var tokens) {
  check_sequences(tokens.value());
  const Var x = rnn_.forward(tape, drop_.forward(tape, encoder_.forward(tape, tokens)));
  return decoder_.logits(tape, drop_out_.forward(tape, x));
}

class LstmLanguageModel::States final : public Memory {
 public:
  States(std::int64_t batch, std::int64_t most, std::int64_t layers)
      : batch_(batch), most_(most), layers_(static_cast<std::size_t>(layers)) {}

  void check_room(const Tensor& tokens) const {
    if (tokens.size(0) != batch_ || tokens.size(1) < 1 || tokens.size(1) > most_ - seen())
      throw UsageError(fmt::format("tokens {} after {} of {} texts with memory for {}", to_string(tokens.shape()),
                                   seen(), batch_, most_),
                       "begin with memory for more");
  }
  std::span<LstmState> layers() { return layers_; }
  void move_on(std::int64_t tokens) { seen_ += tokens; }

 private:
  std::int64_t batch_, most_;
  std::vector<LstmState> layers_;
};

std::unique_ptr<LanguageModel::Memory> LstmLanguageModel::begin(Tape&, std::int64_t batch, std::int64_t most) const {
  if (batch < 1 || most < 1) throw UsageError(fmt::format("{} texts of {} tokens", batch, most), "both are at least 1");
  return std::make_unique<States>(batch, most, rnn_.num_layers());
}

Var LstmLanguageModel::next(Tape& tape, const Tensor& tokens, Memory& memory) const {
  auto* const states = dynamic_cast<States*>(&memory);
  LOCKSTEP_ASSERT(states != nullptr && !tape.recording() && !training(), "lstm generates in evaluation mode");
  check_sequences(tokens);
  states->check_room(tokens);
  rnn_.forward(tape, embedding(tape, tokens, encoder_.weight()), states->layers());
  states->move_on(tokens.size(1));
  // What the last layer hands on is what it hands out.
  return decoder_.forward(tape, tape.input(states->layers().back().h));
}

LstmClassifier::LstmClassifier(Context& context, const LstmSpec& spec, std::int64_t features, std::int64_t classes)
    : rnn_(register_module("rnn", std::make_unique<Lstm>(context, features, checked(spec).width, spec.layers,
                                                         spec.dropout, kDropBetween))),
      drop_(register_module("drop", std::make_unique<Dropout>(spec.dropout, kDropOut))),
      decoder_(register_module("decoder", std::make_unique<Linear>(context, spec.width, classes))) {}

Var LstmClassifier::forward(Tape& tape, Var images) {
  const Var all = rnn_.forward(tape, images);
  return decoder_.forward(tape, drop_.forward(tape, take_position(tape, all, all.shape()[1] - 1)));
}

namespace {

LstmSpec lstm_spec(const ModelSpec& spec) {
  return {.layers = spec.settings.integer("layers"),
          .width = spec.settings.integer("width"),
          .dropout = spec.settings.number("dropout")};
}

bool reads_images(const ModelSpec& spec) { return spec.sample_shape.size() == 3; }

// Over images the first layer reads the data, and only the last step is decoded.
std::vector<MatrixProduct> lstm_products(const ModelSpec& spec) {
  const LstmSpec lstm = lstm_spec(spec);
  const bool images = reads_images(spec);
  const std::int64_t steps = spec.sample_shape[0];
  std::vector<MatrixProduct> all;
  for (std::int64_t layer = 0; layer < lstm.layers; ++layer) {
    const bool reads_data = images && layer == 0;
    const std::int64_t in = reads_data ? spec.sample_shape[1] * spec.sample_shape[2] : lstm.width;
    all.push_back({.rows = steps, .in = in, .out = 4 * lstm.width, .reads_data = reads_data});
    all.push_back({.rows = steps, .in = lstm.width, .out = 4 * lstm.width});
  }
  all.push_back({.rows = images ? 1 : steps, .in = lstm.width, .out = spec.classes});
  return all;
}

// An encoder is there where it reads tokens; rows of images are taken to be those of squares.
void read_lstm_tensors(const TensorsByName& tensors, ModelSpec& spec) {
  const auto* const first = tensors.shape("rnn.weight_ih_l0", 2);
  if (const auto* state = tensors.shape("rnn.weight_hh_l0", 2)) spec.settings.set("width", (*state)[1]);
  if (const auto* decoder = tensors.shape("decoder.weight", 2)) spec.classes = (*decoder)[0];
  if (first == nullptr) return;
  std::int64_t layers = 1;
  while (tensors.shape(fmt::format("rnn.weight_ih_l{}", layers), 2) != nullptr) ++layers;
  spec.settings.set("layers", layers);
  if (tensors.shape("encoder.weight", 2) == nullptr) spec.sample_shape = {(*first)[1], (*first)[1], 1};
}

}  // namespace

const ModelFamily& lstm_family() {
  static const ModelFamily family = {
      .variants = {{.name = "lstm"}},
      .settings = {size_setting("layers", LstmSpec().layers, "layers"),
                   size_setting("width", LstmSpec().width, "features of the embedding and of each layer"),
                   size_setting("context", 256, "tokens of a sample", SettingSpec::Role::kTokens), dropout_setting()},
      .takes_images = true,
      .takes_tokens = true,
      .tokens_setting = "context",
      .token_table = "encoder.weight",
      .build = [](Context& context, const ModelSpec& spec) -> std::unique_ptr<Module> {
        if (!reads_images(spec)) return std::make_unique<LstmLanguageModel>(context, lstm_spec(spec), spec.classes);
        return std::make_unique<LstmClassifier>(context, lstm_spec(spec), spec.sample_shape[1] * spec.sample_shape[2],
                                                spec.classes);
      },
      .products = lstm_products,
      .read_tensors = read_lstm_tensors,
  };
  return family;
}

}  // namespace lockstep::nn
