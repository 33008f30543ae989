// Llama: a decoder with root mean square norms, rotary positions, gated feed-forward layers and grouped queries.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/json.h"
#include "lockstep/nn/autograd/functions.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/models/models.h"
#include "nn/models/decoder.h"

namespace lockstep::nn {
namespace {

constexpr Linear::Normal kLlamaProduct = {.deviation = 0.02, .bias = false};

struct LlamaSpec {
  std::int64_t layers = 4, heads = 4, kv_heads = 4, width = 256;
  std::int64_t inner = 0;      // features of a feed-forward layer; 0: 8/3 of the width, rounded up to a multiple of 32
  std::int64_t context = 256;  // the most tokens
  std::int64_t vocabulary = 32000;
  bool tied = false;  // the last layer is the table of tokens again
  double rope_base = 10000.0, norm_eps = 1e-5;

  std::int64_t head_width() const { return width / heads; }
  std::int64_t kv_width() const { return kv_heads * head_width(); }
  std::int64_t inner_width() const { return inner > 0 ? inner : (8 * width / 3 + 31) / 32 * 32; }
};

// Keys or values of each group, for all heads of it: (N, T, kv_width) → (N, T, width).
Var for_each_head(Tape& tape, Var x, const LlamaSpec& spec) {
  if (spec.kv_heads == spec.heads) return x;
  const std::int64_t n = x.shape()[0], t = x.shape()[1], head = spec.head_width();
  const Var apart = reshape(tape, x, {n, t, spec.kv_heads, 1, head});
  return reshape(tape, broadcast_to(tape, apart, {n, t, spec.kv_heads, spec.heads / spec.kv_heads, head}),
                 {n, t, spec.width});
}

class LlamaAttention final : public Module {
 public:
  LlamaAttention(Context& context, const LlamaSpec& spec, const RotaryAngles& angles)
      : spec_(spec),
        angles_(angles),
        q_(register_module<Linear>("q_proj", context, spec.width, spec.width, kLlamaProduct)),
        k_(register_module<Linear>("k_proj", context, spec.width, spec.kv_width(), kLlamaProduct)),
        v_(register_module<Linear>("v_proj", context, spec.width, spec.kv_width(), kLlamaProduct)),
        o_(register_module<Linear>("o_proj", context, spec.width, spec.width, kLlamaProduct)) {}

  Var forward(Tape& tape, Var x) override {
    const Var q = rotary(tape, q_(tape, x), angles_), k = rotary(tape, k_(tape, x), angles_);
    const Var keys = for_each_head(tape, k, spec_), values = for_each_head(tape, v_(tape, x), spec_);
    return o_(tape, attention(tape, q, keys, values, spec_.heads));
  }

  Var next(Tape& tape, Var x, std::int64_t past, const Tensor& cache) {
    const Var q = rotary(tape, q_(tape, x), angles_, past), k = rotary(tape, k_(tape, x), angles_, past);
    const Var keys = for_each_head(tape, k, spec_), values = for_each_head(tape, v_(tape, x), spec_);
    return o_(tape, extend_attention(tape, concat(tape, {q, keys, values}, -1), spec_.heads, past, cache));
  }

  std::string type_name() const override { return "LlamaAttention"; }

 private:
  const LlamaSpec& spec_;
  const RotaryAngles& angles_;
  Linear &q_, &k_, &v_, &o_;
};

class LlamaFeedForward final : public Module {
 public:
  LlamaFeedForward(Context& context, const LlamaSpec& spec)
      : gate_(register_module<Linear>("gate_proj", context, spec.width, spec.inner_width(), kLlamaProduct)),
        up_(register_module<Linear>("up_proj", context, spec.width, spec.inner_width(), kLlamaProduct)),
        down_(register_module<Linear>("down_proj", context, spec.inner_width(), spec.width, kLlamaProduct)) {}
  Var forward(Tape& tape, Var x) override { return down_(tape, mul(tape, silu(tape, gate_(tape, x)), up_(tape, x))); }
  std::string type_name() const override { return "LlamaFeedForward"; }

 private:
  Linear &gate_, &up_, &down_;
};

class LlamaBlock final : public Module {
 public:
  LlamaBlock(Context& context, const LlamaSpec& spec, const RotaryAngles& angles)
      : attention_(register_module<LlamaAttention>("self_attn", context, spec, angles)),
        mlp_(register_module<LlamaFeedForward>("mlp", context, spec)),
        norm1_(register_module<RMSNorm>("input_layernorm", context, spec.width, spec.norm_eps)),
        norm2_(register_module<RMSNorm>("post_attention_layernorm", context, spec.width, spec.norm_eps)) {}

  Var forward(Tape& tape, Var x) override {
    if (!recomputed()) return compute(tape, x);
    return recompute(tape, {x}, [this](Tape& on, const Vars& again) { return compute(on, again); });
  }
  Var next(Tape& tape, Var x, std::int64_t past, const Tensor& cache) {
    x = add(tape, x, attention_.next(tape, norm1_(tape, x), past, cache));
    return add(tape, x, mlp_(tape, norm2_(tape, x)));
  }
  std::string type_name() const override { return "LlamaBlock"; }

 private:
  Var compute(Tape& tape, Var x) {
    x = add(tape, x, attention_(tape, norm1_(tape, x)));
    return add(tape, x, mlp_(tape, norm2_(tape, x)));
  }

  LlamaAttention& attention_;
  LlamaFeedForward& mlp_;
  RMSNorm &norm1_, &norm2_;
};

/// Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023), with the names of Hugging Face's
/// LlamaForCausalLM. Tokens (N, T) i32, T ≤ context → logits (N, T, vocabulary).
class Llama final : public LanguageModel {
 public:
  Llama(Context& context, const LlamaSpec& spec)
      : spec_(spec),
        angles_(context.backend, spec.context, spec.head_width(), spec.rope_base),
        tokens_(register_module<Embedding>("model.embed_tokens", context, spec.vocabulary, spec.width,
                                           kLlamaProduct.deviation)) {
    for (std::int64_t i = 0; i < spec.layers; ++i)
      blocks_.push_back(&register_module<LlamaBlock>(fmt::format("model.layers.{}", i), context, spec_, angles_));
    norm_ = &register_module<RMSNorm>("model.norm", context, spec.width, spec.norm_eps);
    if (!spec.tied)
      head_ = &register_module<Embedding>("lm_head", context, spec.vocabulary, spec.width, kLlamaProduct.deviation);
  }

  Var forward(Tape& tape, Var tokens) override {
    check_tokens("llama", tokens.value());
    Var x = tokens_(tape, tokens);
    for (LlamaBlock* const block : blocks_) x = (*block)(tape, x);
    return logits(tape, (*norm_)(tape, x), head(), nullptr);
  }
  std::vector<Module*> blocks() override { return {blocks_.begin(), blocks_.end()}; }
  std::string type_name() const override { return "Llama"; }

  std::int64_t vocabulary() const override { return spec_.vocabulary; }
  std::optional<std::int64_t> positions() const override { return spec_.context; }
  std::unique_ptr<Memory> begin(Tape& tape, std::int64_t batch, std::int64_t most) const override {
    return std::make_unique<KeyValueCache>("llama", tape, spec_.layers, spec_.width, batch, most, spec_.context);
  }
  Var next(Tape& tape, const Tensor& tokens, Memory& memory) const override {
    LOCKSTEP_ASSERT(!tape.recording() && !training(), "llama generates in evaluation mode");
    check_tokens("llama", tokens);
    KeyValueCache& cache = KeyValueCache::of(memory, tokens);
    Var x = embedding(tape, tokens, tokens_.weight());
    for (std::size_t i = 0; i < blocks_.size(); ++i) x = blocks_[i]->next(tape, x, cache.seen(), cache.layer(i));
    cache.move_on(tokens.size(1));
    return linear(tape, (*norm_)(tape, last_rows(tape, x)), head(), nullptr);
  }

 private:
  Parameter& head() const { return head_ != nullptr ? head_->weight() : tokens_.weight(); }

  LlamaSpec spec_;
  RotaryAngles angles_;
  Embedding& tokens_;
  std::vector<LlamaBlock*> blocks_;
  RMSNorm* norm_ = nullptr;
  Embedding* head_ = nullptr;  // nullptr: tied
};

LlamaSpec llama_spec(const ModelSpec& spec) {
  LlamaSpec llama = {.layers = spec.settings.integer("layers"),
                     .heads = spec.settings.integer("heads"),
                     .kv_heads = spec.settings.integer("kv-heads"),
                     .width = spec.settings.integer("width"),
                     .inner = spec.settings.integer("inner"),
                     .context = spec.settings.integer("context"),
                     .vocabulary = spec.classes,
                     .tied = spec.settings.flag("tied"),
                     .rope_base = spec.settings.number("rope-base"),
                     .norm_eps = spec.settings.number("norm-eps")};
  if (llama.kv_heads == 0) llama.kv_heads = llama.heads;
  if (llama.width % llama.heads != 0 || llama.head_width() % 2 != 0 || llama.heads % llama.kv_heads != 0)
    throw UsageError(fmt::format("llama with width {}, {} heads and {} heads of keys and values", llama.width,
                                 llama.heads, llama.kv_heads),
                     "--width is an even multiple of --heads, and --heads a multiple of --kv-heads");
  return llama;
}

// Nothing reads the data but the embedding, which is no product.
std::vector<MatrixProduct> llama_products(const ModelSpec& spec) {
  const LlamaSpec llama = llama_spec(spec);
  const std::int64_t tokens = spec.sample_shape[0], width = llama.width, inner = llama.inner_width();
  const MatrixProduct attention = {.rows = llama.heads * tokens * (tokens + 1) / 2, .in = llama.head_width(), .out = 1};
  std::vector<MatrixProduct> all;
  for (std::int64_t layer = 0; layer < llama.layers; ++layer) {
    all.push_back({.rows = tokens, .in = width, .out = width + 2 * llama.kv_width()});
    all.push_back(attention);
    all.push_back(attention);
    all.push_back({.rows = tokens, .in = width, .out = width});
    all.push_back({.rows = tokens, .in = width, .out = 2 * inner});
    all.push_back({.rows = tokens, .in = inner, .out = width});
  }
  all.push_back({.rows = tokens, .in = width, .out = spec.classes});
  return all;
}

void read_llama_tensors(const TensorsByName& tensors, ModelSpec& spec) {
  const auto* const tokens = tensors.find("model.embed_tokens.weight", 2);
  const auto* const head = tensors.find("lm_head.weight", 2);
  if (const HostTensor* const table = tokens != nullptr ? tokens : head) {
    spec.classes = table->shape[0];
    spec.settings.set("width", table->shape[1]);
  }
  spec.settings.set("tied", tokens == nullptr || head == nullptr || same_content(*tokens, *head));
  if (const auto* gate = tensors.shape("model.layers.0.mlp.gate_proj.weight", 2))
    spec.settings.set("inner", (*gate)[0]);
  std::int64_t layers = 0;
  while (tensors.shape(fmt::format("model.layers.{}.input_layernorm.weight", layers), 1) != nullptr) ++layers;
  if (layers > 0) spec.settings.set("layers", layers);
  const auto* const keys = tensors.shape("model.layers.0.self_attn.k_proj.weight", 2);
  if (keys == nullptr) return;
  if (!spec.settings.has("heads"))
    throw UsageError("the weights do not say how many attention heads their model has",
                     "put the model's config.json beside them, or give --heads, --context and --rope-base");
  const std::int64_t heads = spec.settings.integer("heads"), width = (*keys)[1];
  if (heads > 0 && width % heads == 0 && (*keys)[0] % (width / heads) == 0)
    spec.settings.set("kv-heads", (*keys)[0] / (width / heads));
}

std::string llama_config(const ModelSpec& spec, const std::vector<std::string>&) {
  const LlamaSpec llama = llama_spec(complete(spec));
  const JsonObject json = {{"model_type", "llama"},
                           {"architectures", std::vector<std::string>{"LlamaForCausalLM"}},
                           {"vocab_size", llama.vocabulary},
                           {"hidden_size", llama.width},
                           {"intermediate_size", llama.inner_width()},
                           {"num_hidden_layers", llama.layers},
                           {"num_attention_heads", llama.heads},
                           {"num_key_value_heads", llama.kv_heads},
                           {"max_position_embeddings", llama.context},
                           {"hidden_act", "silu"},
                           {"rms_norm_eps", llama.norm_eps},
                           {"rope_theta", llama.rope_base},
                           {"rope_parameters", JsonObject{{"rope_theta", llama.rope_base}, {"rope_type", "default"}}},
                           {"attention_bias", false},
                           {"mlp_bias", false},
                           {"tie_word_embeddings", llama.tied},
                           {"bos_token_id", nullptr},
                           {"eos_token_id", nullptr}};
  return json.text();
}

}  // namespace

const ModelFamily& llama_family() {
  constexpr LlamaSpec kUsual;
  constexpr double kMost = 1e12;
  static const ModelFamily family = {
      .variants = {{.name = "llama",
                    .classes_of_random_data = kUsual.vocabulary,
                    .classes_of_weights = kUsual.vocabulary}},
      .settings = {size_setting("layers", kUsual.layers, "blocks"),
                   size_setting("heads", kUsual.heads, "attention heads"),
                   {.name = "kv-heads",
                    .fallback = 0,
                    .help = "heads of keys and values, which groups of heads share; 0: as many as --heads",
                    .high = 1 << 24,
                    .placeholder = "N"},
                   size_setting("width", kUsual.width, "features"),
                   {.name = "inner",
                    .fallback = kUsual.inner,
                    .help = "features inside of a feed-forward layer; 0: 8/3 of the width",
                    .low = 0,
                    .high = 1 << 24,
                    .placeholder = "N"},
                   size_setting("context", kUsual.context, "tokens of a sample, and the most that it takes"),
                   {.name = "rope-base",
                    .fallback = kUsual.rope_base,
                    .help = "base of the rotary positions' angles",
                    .low = 1,
                    .high = kMost,
                    .placeholder = "X"},
                   {.name = "norm-eps",
                    .fallback = kUsual.norm_eps,
                    .help = "added to mean squares in norms",
                    .high = 1,
                    .placeholder = "X"},
                   {.name = "tied", .fallback = kUsual.tied, .help = "a head of its own", .is_flag = false}},
      .takes_tokens = true,
      .tokens_setting = "context",
      .token_table = "model.embed_tokens.weight",
      .blocks = true,
      .attention = true,
      .head = std::nullopt,
      .file_names = {.known_by = "model.embed_tokens.weight",
                     .copies = {{"lm_head.weight", "model.embed_tokens.weight"}},
                     .unused = {"model.layers.*.self_attn.rotary_emb.inv_freq"}},
      .config = {.settings = {{"num_attention_heads", "heads"},
                              {"max_position_embeddings", "context"},
                              {"rope_parameters.rope_theta", "rope-base"},
                              {"rope_theta", "rope-base"},
                              {"rms_norm_eps", "norm-eps"}},
                 .wanted = {{"model_type", {"\"llama\""}},
                            {"hidden_act", {"\"silu\""}},
                            {"attention_bias", {"false"}},
                            {"mlp_bias", {"false"}},
                            {"rope_scaling", {"null"}},
                            {"rope_parameters.rope_type", {"\"default\""}}},
                 .text = llama_config},
      .build = [](Context& context, const ModelSpec& spec) -> std::unique_ptr<Module> {
        return std::make_unique<Llama>(context, llama_spec(spec));
      },
      .products = llama_products,
      .constant_bytes =
          [](const ModelSpec& spec) {
            const LlamaSpec llama = llama_spec(spec);
            return RotaryAngles::bytes(llama.context, llama.head_width());
          },
      .read_tensors = read_llama_tensors,
  };
  return family;
}

}  // namespace lockstep::nn
