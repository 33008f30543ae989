#include "nn/models/gpt.h"

#include <cmath>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/json.h"
#include "lockstep/nn/autograd/functions.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/models/models.h"
#include "nn/models/decoder.h"

namespace lockstep::nn {
namespace {

constexpr double kDeviation = 0.02;

const GptSpec& checked(const GptSpec& spec) {
  if (spec.layers < 1 || spec.heads < 1 || spec.width < 1 || spec.context < 1 || spec.vocabulary < 1 ||
      spec.width % spec.heads != 0)
    throw UsageError(fmt::format("gpt with {} layers, {} heads, width {}, context {} and {} tokens", spec.layers,
                                 spec.heads, spec.width, spec.context, spec.vocabulary),
                     "all are at least 1, and --width is a multiple of --heads");
  return spec;
}

// As in the paper: what each block adds is made smaller, so that the sum of all blocks is not larger for more of them.
Linear::Gpt2 residual(const GptSpec& spec) {
  return {.deviation = kDeviation / std::sqrt(2.0 * static_cast<double>(spec.layers))};
}

class Attention final : public Module {
 public:
  Attention(Context& context, const GptSpec& spec, std::int64_t index)
      : heads_(spec.heads),
        dropout_(spec.dropout),
        drop_layer_(kFirstOfAttention + index),
        c_attn_(register_module(
            "c_attn", std::make_unique<Linear>(context, spec.width, 3 * spec.width, Linear::Gpt2{kDeviation}))),
        c_proj_(register_module("c_proj", std::make_unique<Linear>(context, spec.width, spec.width, residual(spec)))) {}

  Var forward(Tape& tape, Var x) override {
    return c_proj_.forward(
        tape, causal_attention(tape, c_attn_.forward(tape, x), heads_, training() ? dropout_ : 0.0, drop_layer_));
  }

  Var next(Tape& tape, Var x, std::int64_t past, const Tensor& cache) {
    return c_proj_.forward(tape, extend_attention(tape, c_attn_.forward(tape, x), heads_, past, cache));
  }

  std::string type_name() const override { return "Attention"; }

 private:
  // Beside the numbers of the other dropouts, of which a block has two (dropout_bits has 2¹⁶).
  static constexpr std::int64_t kFirstOfAttention = 1 << 15;

  std::int64_t heads_;
  double dropout_;
  std::int64_t drop_layer_;
  Linear& c_attn_;
  Linear& c_proj_;
};

class FeedForward final : public Module {
 public:
  FeedForward(Context& context, const GptSpec& spec)
      : c_fc_(register_module("c_fc",
                              std::make_unique<Linear>(context, spec.width, 4 * spec.width, Linear::Gpt2{kDeviation}))),
        c_proj_(
            register_module("c_proj", std::make_unique<Linear>(context, 4 * spec.width, spec.width, residual(spec)))) {}

  Var forward(Tape& tape, Var x) override { return c_proj_.forward(tape, c_fc_.forward(tape, x, Epilogue::kGelu)); }

  std::string type_name() const override { return "FeedForward"; }

 private:
  Linear& c_fc_;
  Linear& c_proj_;
};

// What goes past the blocks, and what is still to be added to it: a normalisation does both in one pass.
struct Stream {
  Var sum;
  std::optional<Var> branch = std::nullopt;

  Var whole(Tape& tape) const { return branch ? add(tape, sum, *branch) : sum; }
  Var normalised(Tape& tape, LayerNorm& norm) {
    if (!branch) return norm.forward(tape, sum);
    const SumAndNorm made = norm.forward_added(tape, sum, *branch);
    *this = {made.sum};
    return made.norm;
  }
};

}  // namespace

class Gpt::Block final : public Module {
 public:
  Block(Context& context, const GptSpec& spec, std::int64_t index)
      : ln_1_(register_module("ln_1", std::make_unique<LayerNorm>(context, spec.width))),
        attn_(register_module("attn", std::make_unique<Attention>(context, spec, index))),
        attn_drop_(register_module("attn_dropout", std::make_unique<Dropout>(spec.dropout, 2 * index + 1))),
        ln_2_(register_module("ln_2", std::make_unique<LayerNorm>(context, spec.width))),
        mlp_(register_module("mlp", std::make_unique<FeedForward>(context, spec))),
        mlp_drop_(register_module("mlp_dropout", std::make_unique<Dropout>(spec.dropout, 2 * index + 2))) {}

  Var forward(Tape& tape, Var x) override {
    Stream stream = {x};
    forward(tape, stream);
    return stream.whole(tape);
  }
  void forward(Tape& tape, Stream& stream) {
    if (!recomputed()) return compute(tape, stream);
    const Vars values = stream.branch ? Vars{stream.sum, *stream.branch} : Vars{stream.sum};
    const Vars made = recompute(tape, values, [this](Tape& on, const Vars& again) {
      Stream inside = {again[0], again.size() > 1 ? std::optional(again[1]) : std::nullopt};
      compute(on, inside);
      return Vars{inside.sum, *inside.branch};
    });
    stream = {made[0], made[1]};
  }

  /// Of tokens that follow `past` others, without dropout; `cache` as AttentionKernels::extend() has it.
  void next(Tape& tape, Stream& stream, std::int64_t past, const Tensor& cache) {
    stream.branch = attn_.next(tape, stream.normalised(tape, ln_1_), past, cache);
    stream.branch = mlp_.forward(tape, stream.normalised(tape, ln_2_));
  }

  std::string type_name() const override { return "Block"; }

 private:
  void compute(Tape& tape, Stream& stream) {
    stream.branch = attn_drop_.forward(tape, attn_.forward(tape, stream.normalised(tape, ln_1_)));
    stream.branch = mlp_drop_.forward(tape, mlp_.forward(tape, stream.normalised(tape, ln_2_)));
  }

  LayerNorm& ln_1_;
  Attention& attn_;
  Dropout& attn_drop_;
  LayerNorm& ln_2_;
  FeedForward& mlp_;
  Dropout& mlp_drop_;
};

Gpt::Gpt(Context& context, const GptSpec& spec)
    : spec_(checked(spec)),
      wte_(register_module("wte", std::make_unique<Embedding>(context, spec.vocabulary, spec.width, kDeviation))),
      wpe_(register_module("wpe", std::make_unique<Embedding>(context, spec.context, spec.width, kDeviation))),
      drop_(register_module("drop", std::make_unique<Dropout>(spec.dropout, 0))),
      ln_f_([&]() -> LayerNorm& {
        for (std::int64_t i = 0; i < spec.layers; ++i)
          blocks_.push_back(&register_module("h." + std::to_string(i), std::make_unique<Block>(context, spec, i)));
        return register_module("ln_f", std::make_unique<LayerNorm>(context, spec.width));
      }()),
      lm_head_(spec.tied ? nullptr
                         : &register_module("lm_head", std::make_unique<Embedding>(context, spec.vocabulary, spec.width,
                                                                                   kDeviation))) {}

std::unique_ptr<LanguageModel::Memory> Gpt::begin(Tape& tape, std::int64_t batch, std::int64_t most) const {
  return std::make_unique<KeyValueCache>("gpt", tape, spec_.layers, spec_.width, batch, most, spec_.context);
}

Var Gpt::next(Tape& tape, const Tensor& tokens, Memory& memory) const {
  LOCKSTEP_ASSERT(!tape.recording() && !training(), "gpt generates in evaluation mode");
  check_tokens("gpt", tokens);
  KeyValueCache& cache = KeyValueCache::of(memory, tokens);
  const std::int64_t past = cache.seen();
  Stream stream = {add_positions(tape, embedding(tape, tokens, wte_.weight()), wpe_.weight(), past)};
  for (std::size_t i = 0; i < blocks_.size(); ++i) blocks_[i]->next(tape, stream, past, cache.layer(i));
  cache.move_on(tokens.size(1));
  // All others' logits are known to the text already.
  return linear(tape, ln_f_.forward(tape, last_rows(tape, stream.whole(tape))), head(), nullptr);
}

Var Gpt::forward(Tape& tape, Var tokens) {
  check_tokens("gpt", tokens.value());
  Stream stream = {drop_.forward(tape, add_positions(tape, wte_.forward(tape, tokens), wpe_.weight()))};
  for (Block* block : blocks_) block->forward(tape, stream);
  return logits(tape, stream.normalised(tape, ln_f_), head(), nullptr);
}

std::vector<Module*> Gpt::blocks() { return {blocks_.begin(), blocks_.end()}; }

const ModelFamily& gpt_family();

namespace {

constexpr std::int64_t kHeadWidth = 64;  // of every GPT-2

GptSpec gpt_spec(const ModelSpec& spec) {
  return {.layers = spec.settings.integer("layers"),
          .heads = spec.settings.integer("heads"),
          .width = spec.settings.integer("width"),
          .context = spec.settings.integer("context"),
          .vocabulary = spec.classes,
          .tied = spec.settings.flag("tied"),
          .dropout = spec.settings.number("dropout")};
}

// Nothing reads the data but the embedding, which is no product.
std::vector<MatrixProduct> gpt_products(const ModelSpec& spec) {
  const GptSpec gpt = gpt_spec(spec);
  const std::int64_t tokens = spec.sample_shape[0], width = gpt.width;
  const MatrixProduct attention = {.rows = gpt.heads * tokens * (tokens + 1) / 2, .in = width / gpt.heads, .out = 1};
  std::vector<MatrixProduct> all;
  for (std::int64_t layer = 0; layer < gpt.layers; ++layer) {
    all.push_back({.rows = tokens, .in = width, .out = 3 * width});
    all.push_back(attention);
    all.push_back(attention);
    all.push_back({.rows = tokens, .in = width, .out = width});
    all.push_back({.rows = tokens, .in = width, .out = 4 * width});
    all.push_back({.rows = tokens, .in = 4 * width, .out = width});
  }
  all.push_back({.rows = tokens, .in = width, .out = spec.classes});
  return all;
}

void read_gpt_tensors(const TensorsByName& tensors, ModelSpec& spec) {
  const auto* const tokens = tensors.find("wte.weight", 2);
  const auto* const head = tensors.find("lm_head.weight", 2);
  spec.settings.set("tied", tokens == nullptr || head == nullptr || same_content(*tokens, *head));
  if (const auto* positions = tensors.shape("wpe.weight", 2)) spec.settings.set("context", (*positions)[0]);
  // A file that has each tensor once may have kept the head's name of the two.
  const HostTensor* const table = tokens != nullptr ? tokens : head;
  if (table == nullptr) return;
  const std::int64_t width = table->shape[1];
  spec.classes = table->shape[0];
  // Heads leave no trace in shapes: GPT-2's are known, and so are a model's of the usual width.
  const auto usual = find_setting(gpt_family().settings_of(spec.name), "width")->fallback;
  if (spec.name == "gpt2" && width % kHeadWidth == 0)
    spec.settings.set("heads", width / kHeadWidth);
  else if (!spec.settings.has("heads") && SettingValue(width) != usual)
    throw UsageError("the weights do not say how many attention heads their model has",
                     "give --heads, or put the model's config.json beside them");
  spec.settings.set("width", width);
  std::int64_t layers = 0;
  while (tensors.shape(fmt::format("h.{}.ln_1.weight", layers), 1) != nullptr) ++layers;
  if (layers > 0) spec.settings.set("layers", layers);
}

std::string gpt_config(const ModelSpec& spec, const std::vector<std::string>&) {
  constexpr std::int64_t kEndOfText = 50256;  // of GPT-2's vocabulary
  const GptSpec gpt = gpt_spec(complete(spec));
  JsonObject json = {{"model_type", "gpt2"},         {"architectures", std::vector<std::string>{"GPT2LMHeadModel"}},
                     {"vocab_size", gpt.vocabulary}, {"n_positions", gpt.context},
                     {"n_embd", gpt.width},          {"n_layer", gpt.layers},
                     {"n_head", gpt.heads},          {"activation_function", "gelu_new"},
                     {"layer_norm_epsilon", 1e-5},   {"tie_word_embeddings", gpt.tied}};
  for (const char* const name : {"resid_pdrop", "embd_pdrop", "attn_pdrop"}) json.add(name, gpt.dropout);
  const auto end = gpt.vocabulary > kEndOfText ? std::optional(kEndOfText) : std::nullopt;
  return json.add("bos_token_id", end).add("eos_token_id", end).text();
}

}  // namespace

const ModelFamily& gpt_family() {
  constexpr GptSpec kUsual;
  static const ModelFamily family = {
      .variants = {{.name = "gpt", .classes_of_weights = kUsual.vocabulary},
                   {.name = "gpt2",
                    .defaults = {{"layers", 12}, {"heads", 12}, {"width", 768}, {"context", 1024}},
                    .classes_of_random_data = kUsual.vocabulary,
                    .classes_of_weights = kUsual.vocabulary}},
      .settings = {size_setting("layers", kUsual.layers, "blocks"),
                   size_setting("heads", kUsual.heads, "attention heads"),
                   size_setting("width", kUsual.width, "features"),
                   size_setting("context", kUsual.context, "tokens of a sample, and the most that it takes"),
                   {.name = "tied", .fallback = kUsual.tied, .help = "a head of its own", .is_flag = false},
                   dropout_setting()},
      .takes_tokens = true,
      .tokens_setting = "context",
      .token_table = "wte.weight",
      .blocks = true,
      .attention = true,
      .head = std::nullopt,
      .file_names = {.known_by = "wte.weight",
                     // A GPT-2 with a head has its parts in `transformer`, and the head, its table of tokens again,
                     // beside that.
                     .wrapper = "transformer.",
                     .copies = {{"lm_head.weight", "wte.weight"}},
                     // What older files hold: the mask of its attention.
                     .unused = {"h.*.attn.bias", "h.*.attn.masked_bias"}},
      .config = {.settings = {{"n_head", "heads"}},
                 .wanted = {{"model_type", {"\"gpt2\""}},
                            {"activation_function", {"\"gelu_new\"", "\"gelu_pytorch_tanh\""}},
                            {"layer_norm_epsilon", {"1e-05"}},
                            {"scale_attn_weights", {"true"}},
                            {"scale_attn_by_inverse_layer_idx", {"false"}}},
                 .text = gpt_config},
      .build = [](Context& context, const ModelSpec& spec) -> std::unique_ptr<Module> {
        return std::make_unique<Gpt>(context, gpt_spec(spec));
      },
      .products = gpt_products,
      .read_tensors = read_gpt_tensors,
  };
  return family;
}

}  // namespace lockstep::nn
