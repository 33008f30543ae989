#include "nn/models/bert.h"

#include <span>
#include <string>

#include "base/error.h"
#include "base/json.h"
#include "lockstep/nn/autograd/functions.h"
#include "lockstep/nn/models/models.h"

namespace lockstep::nn {

const ModelFamily& bert_family();

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
  // Without types all are the first one.
  const Var types = whole
                        ? types_(tape, inputs[1])
                        : broadcast_to(tape, slice(tape, variable(tape, types_.weight()), 0, 0, 1), positioned.shape());
  const Tensor lengths = whole ? inputs[2].value() : Tensor();
  Var x = drop_(tape, norm_.forward_added(tape, positioned, types).norm);
  for (Block* const block : blocks_) {
    if (block->recomputed())
      x = recompute(
          tape, x, [block, lengths](Tape& on, const Vars& again) -> Vars { return block->encode(on, again, lengths); });
    else
      x = block->encode(tape, x, lengths);
  }
  return x;
}

std::vector<Module*> Bert::blocks() { return {blocks_.begin(), blocks_.end()}; }

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

namespace {

BertSpec bert_spec(const ModelSpec& spec) {
  return {.layers = spec.settings.integer("layers"),
          .heads = spec.settings.integer("heads"),
          .width = spec.settings.integer("width"),
          .inner = spec.settings.integer("inner"),
          .context = spec.settings.integer("context"),
          .vocabulary = spec.vocabulary > 0 ? spec.vocabulary : spec.classes,
          .token_types = spec.settings.integer("token-types"),
          .dropout = spec.settings.number("dropout")};
}

bool predicts_tokens(const ModelSpec& spec) { return spec.vocabulary == 0; }

// Nothing reads the data but embeddings, which are no products. Samples are taken to have no padding.
std::vector<MatrixProduct> bert_products(const ModelSpec& spec) {
  const BertSpec bert = bert_spec(spec);
  const std::int64_t tokens = spec.sample_shape[0], width = bert.width, inner = inner_width(bert);
  const MatrixProduct attention = {.rows = bert.heads * tokens * tokens, .in = width / bert.heads, .out = 1};
  std::vector<MatrixProduct> all;
  for (std::int64_t layer = 0; layer < bert.layers; ++layer) {
    for (int i = 0; i < 4; ++i) all.push_back({.rows = tokens, .in = width, .out = width});
    all.push_back(attention);
    all.push_back(attention);
    all.push_back({.rows = tokens, .in = width, .out = inner});
    all.push_back({.rows = tokens, .in = inner, .out = width});
  }
  const std::int64_t predicted = predicts_tokens(spec) ? spec.predictions : 1;
  all.push_back({.rows = predicted, .in = width, .out = width});
  all.push_back({.rows = predicted, .in = width, .out = spec.classes});
  return all;
}

constexpr const char* kClassifier = "classifier.weight";
constexpr std::int64_t kUsualLength = 128;  // of samples, in tokens

void read_bert_tensors(const TensorsByName& tensors, ModelSpec& spec) {
  const auto* const table = tensors.shape("bert.embeddings.word_embeddings.weight", 2);
  if (table == nullptr) return;
  const std::int64_t width = (*table)[1];
  if (const auto* classifier = tensors.shape(kClassifier, 2)) {
    spec.classes = (*classifier)[0];
    spec.vocabulary = (*table)[0];
  } else {
    spec.classes = (*table)[0];
  }
  // Heads leave no trace in shapes: BERT's have 64 features each, and those of a model of the usual width are known.
  constexpr std::int64_t kHeadWidth = 64;
  const auto usual = find_setting(bert_family().settings_of(spec.name), "width")->fallback;
  if (spec.name != "bert" && width % kHeadWidth == 0)
    spec.settings.set("heads", width / kHeadWidth);
  else if (!spec.settings.has("heads") && SettingValue(width) != usual)
    throw UsageError("the weights do not say how many attention heads their model has",
                     "give --heads, or put the model's config.json beside them");
  spec.settings.set("width", width);
  if (const auto* positions = tensors.shape("bert.embeddings.position_embeddings.weight", 2))
    spec.settings.set("context", (*positions)[0]);
  // Samples are no longer than the model takes.
  if (spec.settings.has("context") && spec.settings.integer("context") < kUsualLength)
    spec.settings.set("max-length", spec.settings.integer("context"));
  if (const auto* types = tensors.shape("bert.embeddings.token_type_embeddings.weight", 2))
    spec.settings.set("token-types", (*types)[0]);
  if (const auto* inner = tensors.shape("bert.encoder.layer.0.intermediate.dense.weight", 2))
    spec.settings.set("inner", (*inner)[0] == 4 * width ? 0 : (*inner)[0]);
  std::int64_t layers = 0;
  while (tensors.shape(fmt::format("bert.encoder.layer.{}.output.dense.weight", layers), 2) != nullptr) ++layers;
  if (layers > 0) spec.settings.set("layers", layers);
}

std::string bert_config(const ModelSpec& spec, const std::vector<std::string>& class_names) {
  const BertSpec bert = bert_spec(complete(spec));
  const bool tokens = predicts_tokens(spec);
  JsonObject json = {
      {"model_type", "bert"},
      {"architectures", std::vector<std::string>{tokens ? "BertForMaskedLM" : "BertForSequenceClassification"}},
      {"vocab_size", bert.vocabulary},
      {"hidden_size", bert.width},
      {"num_hidden_layers", bert.layers},
      {"num_attention_heads", bert.heads},
      {"intermediate_size", inner_width(bert)},
      {"hidden_act", "gelu"},
      {"max_position_embeddings", bert.context},
      {"type_vocab_size", bert.token_types},
      {"layer_norm_eps", kBertEps},
      {"hidden_dropout_prob", bert.dropout},
      {"attention_probs_dropout_prob", bert.dropout}};
  if (tokens) return json.text();
  JsonObject names, numbers;
  for (std::int64_t i = 0; i < spec.classes; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const std::string name = at < class_names.size() ? class_names[at] : fmt::format("LABEL_{}", i);
    names.add(std::to_string(i), name);
    numbers.add(name, i);
  }
  return json.add("id2label", names).add("label2id", numbers).text();
}

std::unique_ptr<Module> build_bert(Context& context, const ModelSpec& spec) {
  const BertSpec bert = bert_spec(spec);
  if (!spec.sample_shape.empty() && spec.sample_shape[0] > bert.context)
    throw UsageError(
        fmt::format("samples of {} tokens for a {} of {} positions", spec.sample_shape[0], spec.name, bert.context),
        fmt::format("give --max-length {}, or less", bert.context));
  if (predicts_tokens(spec)) return std::make_unique<BertForMaskedLM>(context, bert);
  return std::make_unique<BertForSequenceClassification>(context, bert, spec.classes);
}

}  // namespace

const ModelFamily& bert_family() {
  constexpr BertSpec kUsual;
  SettingSpec inner =
      size_setting("inner", 0, "features between the two layers of a block's second half; 0: 4 * width");
  inner.low = 0;
  SettingSpec types = size_setting("token-types", kUsual.token_types, "kinds of tokens");
  types.is_flag = false;
  static const ModelFamily family = {
      .title = "BERTs",
      .variants = {{.name = "bert", .classes_of_weights = kUsual.vocabulary},
                   {.name = "bert-base",
                    .defaults = {{"layers", 12}, {"heads", 12}, {"width", 768}},
                    .classes_of_random_data = kUsual.vocabulary,
                    .classes_of_weights = kUsual.vocabulary},
                   {.name = "bert-large",
                    .defaults = {{"layers", 24}, {"heads", 16}, {"width", 1024}},
                    .classes_of_random_data = kUsual.vocabulary,
                    .classes_of_weights = kUsual.vocabulary}},
      .settings = {size_setting("layers", kUsual.layers, "blocks"),
                   size_setting("heads", kUsual.heads, "attention heads"),
                   size_setting("width", kUsual.width, "features"), inner,
                   size_setting("context", kUsual.context, "the most tokens that it takes"), types,
                   size_setting("max-length", kUsualLength, "tokens of a sample; longer texts are cut",
                                SettingSpec::Role::kTokens),
                   dropout_setting()},
      .takes_tokens = true,
      .tokens_setting = "max-length",
      .token_table = "bert.embeddings.word_embeddings.weight",
      .blocks = true,
      .attention = true,
      .word_pieces = true,
      .head = SeparateHead{.own = "classifier.", .others = {"cls."}, .new_too = {"bert.pooler."}},
      .training = {.lr = 1e-4},
      .file_names = {.known_by = "bert.embeddings.word_embeddings.weight",
                     .lacked = "bert.",
                     .inner_parts = {"embeddings.", "encoder.", "pooler."},
                     .endings = {{".LayerNorm.gamma", ".LayerNorm.weight"}, {".LayerNorm.beta", ".LayerNorm.bias"}},
                     .copies = {{"cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"},
                                {"cls.predictions.decoder.bias", "cls.predictions.bias"}},
                     // Numbers of positions, and layers that only training on pairs of sentences uses.
                     .unused = {"bert.embeddings.position_ids", "bert.pooler.*", "cls.seq_relationship.*"}},
      .config = {.settings = {{"num_attention_heads", "heads"}},
                 .wanted = {{"model_type", {"\"bert\""}},
                            {"hidden_act", {"\"gelu\""}},
                            {"layer_norm_eps", {"1e-12"}},
                            {"position_embedding_type", {"\"absolute\""}}},
                 .text = bert_config},
      .build = build_bert,
      .products = bert_products,
      .read_tensors = read_bert_tensors,
  };
  return family;
}

}  // namespace lockstep::nn
