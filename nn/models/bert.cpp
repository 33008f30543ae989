#include "nn/models/bert.h"

#include <algorithm>
#include <span>
#include <string>

#include "base/error.h"

namespace lockstep::nn {
namespace {

constexpr double kBertDeviation = 0.02;
constexpr double kBertEps = 1e-12;
constexpr Linear::Normal kBertNormal = {kBertDeviation};

const BertSpec& checked_bert(const BertSpec& spec) {
  if (spec.layers < 1 || spec.heads < 1 || spec.width < 1 || spec.inner < 0 || spec.context < 1 ||
      spec.vocabulary < 1 || spec.token_types < 1 || spec.width % spec.heads != 0)
    throw UsageError(
        fmt::format("bert with {} layers, {} heads, width {}, {} inner features, context {}, {} tokens and "
                    "{} token types",
                    spec.layers, spec.heads, spec.width, spec.inner, spec.context, spec.vocabulary, spec.token_types),
        "all are at least 1, and --width is a multiple of --heads");
  return spec;
}

std::int64_t inner_width(const BertSpec& spec) { return spec.inner > 0 ? spec.inner : 4 * spec.width; }

// Dropouts of a model are numbered: that of embeddings, two of each block, and the classifier's. Those of attention's
// weights come after them (dropout_bits has 2¹⁶).
constexpr std::int64_t kDropEmbeddings = 0, kFirstAttention = 1 << 15, kDropClassifier = kFirstAttention - 1;

}  // namespace

class Bert::Block final : public Module {
 public:
  Block(Context& context, const BertSpec& spec, std::int64_t index)
      : heads_(spec.heads),
        dropout_(spec.dropout),
        drop_layer_(kFirstAttention + index),
        query_(register_module<Linear>("attention.self.query", context, spec.width, spec.width, kBertNormal)),
        key_(register_module<Linear>("attention.self.key", context, spec.width, spec.width, kBertNormal)),
        value_(register_module<Linear>("attention.self.value", context, spec.width, spec.width, kBertNormal)),
        projection_(register_module<Linear>("attention.output.dense", context, spec.width, spec.width, kBertNormal)),
        attention_norm_(register_module<LayerNorm>("attention.output.LayerNorm", context, spec.width, kBertEps)),
        attention_drop_(
            register_module("attention.output.dropout", std::make_unique<Dropout>(spec.dropout, 2 * index + 1))),
        inner_(register_module<Linear>("intermediate.dense", context, spec.width, inner_width(spec), kBertNormal)),
        outer_(register_module<Linear>("output.dense", context, inner_width(spec), spec.width, kBertNormal)),
        norm_(register_module<LayerNorm>("output.LayerNorm", context, spec.width, kBertEps)),
        drop_(register_module("output.dropout", std::make_unique<Dropout>(spec.dropout, 2 * index + 2))) {}

  Var encode(Tape& tape, Var x, const Tensor& lengths) {
    const Var seen =
        attention(tape, query_(tape, x), key_(tape, x), value_(tape, x), heads_,
                  {.causal = false, .lengths = lengths, .dropout = training() ? dropout_ : 0.0, .layer = drop_layer_});
    const Var y = attention_norm_.forward_added(tape, x, attention_drop_(tape, projection_(tape, seen))).norm;
    const Var z = outer_(tape, gelu(tape, inner_(tape, y)));  // GELU as it is; GPT-2's is the one that is fused
    return norm_.forward_added(tape, y, drop_(tape, z)).norm;
  }

  std::string type_name() const override { return "Block"; }

 private:
  std::int64_t heads_;
  double dropout_;
  std::int64_t drop_layer_;
  Linear &query_, &key_, &value_, &projection_;
  LayerNorm& attention_norm_;
  Dropout& attention_drop_;
  Linear &inner_, &outer_;
  LayerNorm& norm_;
  Dropout& drop_;
};

Bert::Bert(Context& context, const BertSpec& spec, bool pools)
    : spec_(checked_bert(spec)),
      words_(register_module<Embedding>("embeddings.word_embeddings", context, spec.vocabulary, spec.width,
                                        kBertDeviation)),
      positions_(register_module<Embedding>("embeddings.position_embeddings", context, spec.context, spec.width,
                                            kBertDeviation)),
      types_(register_module<Embedding>("embeddings.token_type_embeddings", context, spec.token_types, spec.width,
                                        kBertDeviation)),
      norm_(register_module<LayerNorm>("embeddings.LayerNorm", context, spec.width, kBertEps)),
      drop_(register_module("embeddings.dropout", std::make_unique<Dropout>(spec.dropout, kDropEmbeddings))) {
  for (std::int64_t i = 0; i < spec.layers; ++i)
    blocks_.push_back(&register_module<Block>("encoder.layer." + std::to_string(i), context, spec, i));
  if (pools) pooler_ = &register_module<Linear>("pooler.dense", context, spec.width, spec.width, kBertNormal);
}

Vars Bert::forward_all(Tape& tape, const Vars& inputs) {
  check_usage(inputs.size() == 1 || inputs.size() == 3, "bert was given inputs that are not one or three",
              "give it tokens, or tokens, token types and lengths");
  const Tensor& tokens = inputs[0].value();
  if (tokens.dtype() != DType::kI32 || tokens.shape().size() != 2 || tokens.size(1) < 1)
    throw UsageError(fmt::format("bert was given {} of {}", to_string(tokens.shape()), name_of(tokens.dtype())),
                     "it takes tokens (N, T)");
  const bool whole = inputs.size() == 3;
  if (whole) {
    const Tensor& types = inputs[1].value();
    if (types.dtype() != DType::kI32 || types.shape() != tokens.shape())
      throw UsageError(fmt::format("bert was given tokens {} and token types {} of {}", to_string(tokens.shape()),
                                   to_string(types.shape()), name_of(types.dtype())),
                       "give each token one type, i32");
  }
  const Var positioned = add_positions(tape, words_(tape, inputs[0]), positions_.weight());
  const Var types = types_(tape, whole ? inputs[1] : tape.input(no_types(tape, tokens.shape())));
  const Tensor lengths = whole ? inputs[2].value() : Tensor();
  Var x = drop_(tape, norm_.forward_added(tape, positioned, types).norm);
  for (Block* const block : blocks_) x = block->encode(tape, x, lengths);
  return x;
}

Tensor Bert::no_types(Tape& tape, const Shape& shape) {
  const auto known = std::ranges::find(no_types_, shape, &Tensor::shape);
  if (known != no_types_.end()) return *known;
  const std::vector<std::int32_t> zeros(static_cast<std::size_t>(shape.count()));
  Tensor made = tape.backend().empty(shape, DType::kI32);
  tape.backend().upload(std::as_bytes(std::span(zeros)), made);
  return no_types_.emplace_back(std::move(made));
}

Var Bert::pool(Tape& tape, Var states) {
  check_usage(pooler_ != nullptr, "a bert without a pooler is to pool", "build it with one");
  const Var first = (*pooler_)(tape, take_position(tape, states, 0));
  return to_activations(tape, tanh(tape, to_f32(tape, first)));
}

BertForMaskedLM::BertForMaskedLM(Context& context, const BertSpec& spec)
    : bert_(register_module("bert", std::make_unique<Bert>(context, spec, /*pools=*/false))),
      dense_(register_module<Linear>("cls.predictions.transform.dense", context, spec.width, spec.width, kBertNormal)),
      norm_(register_module<LayerNorm>("cls.predictions.transform.LayerNorm", context, spec.width, kBertEps)),
      bias_(register_parameter("cls.predictions.bias",
                               std::make_unique<Parameter>(context.backend, Shape{spec.vocabulary}))) {
  context.backend.pointwise().fill(bias_.value(), 0.0f);
}

Vars BertForMaskedLM::forward_all(Tape& tape, const Vars& inputs) {
  const bool chosen = inputs.size() == 4;
  Var x = bert_(tape, chosen ? Vars{inputs[0], inputs[1], inputs[2]} : inputs);
  if (chosen) x = take_positions(tape, x, inputs[3].value());
  x = norm_(tape, gelu(tape, dense_(tape, x)));
  return logits(tape, x, bert_.words(), &bias_);
}

BertForSequenceClassification::BertForSequenceClassification(Context& context, const BertSpec& spec,
                                                             std::int64_t classes)
    : bert_(register_module("bert", std::make_unique<Bert>(context, spec, /*pools=*/true))),
      drop_(register_module("dropout", std::make_unique<Dropout>(spec.dropout, kDropClassifier))),
      classifier_(register_module<Linear>("classifier", context, spec.width, classes, kBertNormal)) {}

Vars BertForSequenceClassification::forward_all(Tape& tape, const Vars& inputs) {
  const Var states = bert_(tape, inputs);
  return classifier_.logits(tape, drop_(tape, bert_.pool(tape, states)));
}

}  // namespace lockstep::nn
