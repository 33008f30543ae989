#include "nn/models/rnn.h"

#include "base/error.h"
#include "lockstep/nn/models/models.h"

namespace lockstep::nn {
namespace {

// The name of its family.
const char* family_of(RnnCell cell) { return cell == RnnCell::kLstm ? "lstm" : cell == RnnCell::kGru ? "gru" : "rnn"; }

const RnnSpec& checked(const RnnSpec& spec) {
  if (spec.layers < 1 || spec.width < 1)
    throw UsageError(fmt::format("{} with {} layers of {} features", family_of(spec.cell), spec.layers, spec.width),
                     "--layers and --width are at least 1");
  return spec;
}

const RnnSpec& checked_for_text(const RnnSpec& spec) {
  check_usage(!spec.bidirectional, "--bidirectional of a model of text, which would see the tokens that it predicts",
              "leave it out; it applies to the rows of images");
  return checked(spec);
}

// One for what the rnn reads or leaves; those between its layers are numbered after it.
constexpr std::int64_t kDropIn = 0, kDropOut = 1, kDropBetween = 2;

std::unique_ptr<Recurrent> make_layers(Context& context, const RnnSpec& spec, std::int64_t inputs) {
  const RecurrentOptions options = {.num_layers = spec.layers,
                                    .dropout = spec.dropout,
                                    .bidirectional = spec.bidirectional,
                                    .drop_layer = kDropBetween};
  if (spec.cell == RnnCell::kLstm) return std::make_unique<Lstm>(context, inputs, spec.width, options);
  if (spec.cell == RnnCell::kGru) return std::make_unique<Gru>(context, inputs, spec.width, options);
  return std::make_unique<Rnn>(context, inputs, spec.width, options,
                               spec.cell == RnnCell::kRelu ? Rnn::Nonlinearity::kRelu : Rnn::Nonlinearity::kTanh);
}

void check_sequences(const Tensor& tokens) {
  if (tokens.dtype() != DType::kI32 || tokens.shape().size() != 2)
    throw UsageError(
        fmt::format("a recurrent model was given {} of {}", to_string(tokens.shape()), name_of(tokens.dtype())),
        "it takes tokens (--data text:FILE) or images");
}

}  // namespace

RnnLanguageModel::RnnLanguageModel(Context& context, const RnnSpec& spec, std::int64_t vocabulary)
    : backend_(context.backend),
      spec_(spec),
      vocabulary_(vocabulary),
      drop_(register_module("drop", std::make_unique<Dropout>(checked_for_text(spec).dropout, kDropIn))),
      encoder_(register_module("encoder", std::make_unique<Embedding>(context, vocabulary, spec.width))),
      rnn_(register_module("rnn", make_layers(context, spec, spec.width))),
      drop_out_(register_module("drop_out", std::make_unique<Dropout>(spec.dropout, kDropOut))),
      decoder_(register_module("decoder", std::make_unique<Linear>(context, spec.width, vocabulary))) {}

Var RnnLanguageModel::forward(Tape& tape, Var tokens) {
  check_sequences(tokens.value());
  const Var x = drop_.forward(tape, encoder_.forward(tape, tokens));
  const bool carries = !carried_.empty() && training() && tape.recording();
  const Var y = carries ? carry_on(tape, x) : rnn_.forward(tape, x);
  return decoder_.logits(tape, drop_out_.forward(tape, y));
}

// Backward reads the state at the beginning of the pass, so the pass uses a copy. Its final state goes back to the same
// memory: the next pass may be the same kernels again, at the same addresses (Note [Step graphs]).
Var RnnLanguageModel::carry_on(Tape& tape, Var x) {
  const std::int64_t rows = x.shape()[0], most = carried_.front().h.size(0);
  if (rows > most || &tape.backend() != &backend_)
    throw UsageError(fmt::format("{} rows on {}, where a state of {} is carried on {}", rows,
                                 to_string(tape.backend().device()), most, to_string(backend_.device())),
                     "carry the state of as many rows as a batch has, on the module's own device");
  const auto each = [&](const auto& visit) {
    for (std::size_t l = 0; l < carried_.size(); ++l) {
      visit(carried_[l].h, passing_[l].h);
      if (carried_[l].c.defined()) visit(carried_[l].c, passing_[l].c);
    }
  };
  each([&](const Tensor& carried, Tensor& begins) {
    begins = backend_.empty({rows, spec_.width}, carried.dtype());
    backend_.pointwise().copy(carried.slice(0, rows), begins);
  });
  const Var y = rnn_.forward(tape, x, passing_);
  each([&](const Tensor& carried, Tensor& left) {
    backend_.pointwise().copy(left, carried.slice(0, rows));
    left = Tensor();
  });
  return y;
}

void RnnLanguageModel::carry_state(std::int64_t rows, DType activations) {
  if (rows < 1) throw UsageError(fmt::format("a state of {} rows", rows), "give at least one");
  carried_.assign(static_cast<std::size_t>(spec_.layers), {});
  passing_.assign(carried_.size(), {});
  for (RnnState& state : carried_) {
    state.h = backend_.empty({rows, spec_.width}, activations);
    if (spec_.cell == RnnCell::kLstm) state.c = backend_.empty({rows, spec_.width}, activations);
  }
  for (const NamedBuffer& part : carried_state()) backend_.pointwise().fill(*part.tensor, 0.0f);
}

std::vector<NamedBuffer> RnnLanguageModel::carried_state() {
  std::vector<NamedBuffer> all;
  for (std::size_t l = 0; l < carried_.size(); ++l) {
    all.push_back({fmt::format("rnn.h_l{}", l), &carried_[l].h, &backend_});
    if (carried_[l].c.defined()) all.push_back({fmt::format("rnn.c_l{}", l), &carried_[l].c, &backend_});
  }
  return all;
}

class RnnLanguageModel::States final : public Memory {
 public:
  States(std::int64_t batch, std::int64_t most, std::int64_t layers)
      : batch_(batch), most_(most), layers_(static_cast<std::size_t>(layers)) {}

  void check_room(const Tensor& tokens) const {
    if (tokens.size(0) != batch_ || tokens.size(1) < 1 || tokens.size(1) > most_ - seen())
      throw UsageError(fmt::format("tokens {} after {} of {} texts with memory for {}", to_string(tokens.shape()),
                                   seen(), batch_, most_),
                       "begin with memory for more");
  }
  std::span<RnnState> layers() { return layers_; }
  void move_on(std::int64_t tokens) { seen_ += tokens; }

 private:
  std::int64_t batch_, most_;
  std::vector<RnnState> layers_;
};

std::unique_ptr<LanguageModel::Memory> RnnLanguageModel::begin(Tape&, std::int64_t batch, std::int64_t most) const {
  if (batch < 1 || most < 1) throw UsageError(fmt::format("{} texts of {} tokens", batch, most), "both are at least 1");
  return std::make_unique<States>(batch, most, rnn_.num_layers());
}

Var RnnLanguageModel::next(Tape& tape, const Tensor& tokens, Memory& memory) const {
  auto* const states = dynamic_cast<States*>(&memory);
  LOCKSTEP_ASSERT(states != nullptr && !tape.recording() && !training(),
                  "a recurrent model generates in evaluation mode");
  check_sequences(tokens);
  states->check_room(tokens);
  rnn_.forward(tape, embedding(tape, tokens, encoder_.weight()), states->layers());
  states->move_on(tokens.size(1));
  // What the last layer hands on is what it hands out.
  return decoder_.forward(tape, tape.input(states->layers().back().h));
}

RnnClassifier::RnnClassifier(Context& context, const RnnSpec& spec, std::int64_t features, std::int64_t classes)
    : rnn_(register_module("rnn", make_layers(context, checked(spec), features))),
      drop_(register_module("drop", std::make_unique<Dropout>(spec.dropout, kDropOut))),
      decoder_(
          register_module("decoder", std::make_unique<Linear>(context, rnn_.num_directions() * spec.width, classes))) {}

Var RnnClassifier::forward(Tape& tape, Var images) {
  return decoder_.forward(tape, drop_.forward(tape, rnn_.forward_last(tape, images)));
}

namespace {

RnnCell cell_of(const ModelSpec& spec) {
  if (spec.name != family_of(RnnCell::kTanh)) return spec.name == "gru" ? RnnCell::kGru : RnnCell::kLstm;
  return spec.settings.word("nonlinearity") == "relu" ? RnnCell::kRelu : RnnCell::kTanh;
}

RnnSpec rnn_spec(const ModelSpec& spec) {
  return {.cell = cell_of(spec),
          .layers = spec.settings.integer("layers"),
          .width = spec.settings.integer("width"),
          .dropout = spec.settings.number("dropout"),
          .bidirectional = spec.settings.flag("bidirectional")};
}

bool reads_images(const ModelSpec& spec) { return spec.sample_shape.size() == 3; }

// Over images the first layer reads the data, and only the last step is decoded.
std::vector<MatrixProduct> rnn_products(const ModelSpec& spec) {
  const RnnSpec rnn = rnn_spec(spec);
  const bool images = reads_images(spec);
  const std::int64_t steps = spec.sample_shape[0], directions = rnn.bidirectional ? 2 : 1;
  const std::int64_t gates = gates_of(rnn.cell) * rnn.width;
  std::vector<MatrixProduct> all;
  for (std::int64_t layer = 0; layer < rnn.layers; ++layer) {
    const bool reads_data = images && layer == 0;
    const std::int64_t in = reads_data   ? spec.sample_shape[1] * spec.sample_shape[2]
                            : layer == 0 ? rnn.width
                                         : directions * rnn.width;
    for (std::int64_t d = 0; d < directions; ++d) {
      all.push_back({.rows = steps, .in = in, .out = gates, .reads_data = reads_data});
      all.push_back({.rows = steps, .in = rnn.width, .out = gates});
    }
  }
  all.push_back({.rows = images ? 1 : steps, .in = directions * rnn.width, .out = spec.classes});
  return all;
}

// An encoder is there where it reads tokens; rows of images are taken to be those of squares.
void read_rnn_tensors(const TensorsByName& tensors, ModelSpec& spec) {
  const auto* const first = tensors.shape("rnn.weight_ih_l0", 2);
  if (const auto* state = tensors.shape("rnn.weight_hh_l0", 2)) spec.settings.set("width", (*state)[1]);
  if (const auto* decoder = tensors.shape("decoder.weight", 2)) spec.classes = (*decoder)[0];
  if (first == nullptr) return;
  std::int64_t layers = 1;
  while (tensors.shape(fmt::format("rnn.weight_ih_l{}", layers), 2) != nullptr) ++layers;
  spec.settings.set("layers", layers);
  spec.settings.set("bidirectional", tensors.shape("rnn.weight_ih_l0_reverse", 2) != nullptr);
  if (tensors.shape("encoder.weight", 2) == nullptr) spec.sample_shape = {(*first)[1], (*first)[1], 1};
}

ModelFamily make_family(RnnCell cell) {
  return {
      .variants = {{.name = family_of(cell)}},
      .settings = {size_setting("layers", RnnSpec().layers, "layers"),
                   size_setting("width", RnnSpec().width, "features of the embedding and of each layer"),
                   {.name = "bidirectional", .fallback = false, .help = "layers also read the rows of images upwards"},
                   size_setting("context", 256, "tokens of a sample", SettingSpec::Role::kTokens),
                   dropout_setting()},
      .takes_images = true,
      .takes_tokens = true,
      .tokens_setting = "context",
      .token_table = "encoder.weight",
      .carries_state = true,
      .build = [](Context& context, const ModelSpec& spec) -> std::unique_ptr<Module> {
        if (!reads_images(spec)) return std::make_unique<RnnLanguageModel>(context, rnn_spec(spec), spec.classes);
        return std::make_unique<RnnClassifier>(context, rnn_spec(spec), spec.sample_shape[1] * spec.sample_shape[2],
                                               spec.classes);
      },
      .products = rnn_products,
      .read_tensors = read_rnn_tensors,
  };
}

}  // namespace

const ModelFamily& rnn_family() {
  static const ModelFamily family = [] {
    ModelFamily made = make_family(RnnCell::kTanh);
    made.settings.push_back({.name = "nonlinearity",
                             .fallback = "tanh",
                             .help = "of each layer",
                             .placeholder = "tanh|relu",
                             .choices = {"tanh", "relu"}});
    return made;
  }();
  return family;
}

const ModelFamily& lstm_family() {
  static const ModelFamily family = make_family(RnnCell::kLstm);
  return family;
}

const ModelFamily& gru_family() {
  static const ModelFamily family = make_family(RnnCell::kGru);
  return family;
}

}  // namespace lockstep::nn
