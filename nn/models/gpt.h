// GPT-2: a decoder of blocks with causal attention.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/models/language_model.h"

namespace lockstep::nn {

struct GptSpec {
  std::int64_t layers = 4, heads = 4, width = 256;
  std::int64_t context = 256;  // the most tokens
  std::int64_t vocabulary = 50257;
  bool tied = true;      // the last layer is the table of tokens again; otherwise lm_head, a table of its own
  double dropout = 0.0;  // of embeddings, of attention's weights, and of what a block adds (GPT-2's three, in one)
};

/// Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), with the names and layouts of Hugging
/// Face's weight files: wte, wpe, h.N.{ln_1, attn.c_attn, attn.c_proj, ln_2, mlp.c_fc, mlp.c_proj}, ln_f. The last
/// layer is wte again, or lm_head. Tokens (N, T) i32, T ≤ context → logits (N, T, vocabulary).
class Gpt final : public LanguageModel {
 public:
  /// Throws UsageError for sizes that do not go together.
  Gpt(Context& context, const GptSpec& spec);
  Var forward(Tape& tape, Var tokens) override;
  std::vector<Module*> blocks() override;
  std::string type_name() const override { return "Gpt"; }
  const GptSpec& spec() const { return spec_; }

  std::int64_t vocabulary() const override { return spec_.vocabulary; }
  std::optional<std::int64_t> positions() const override { return spec_.context; }
  /// Keys and values of all layers: 2 · layers · width numbers a token.
  std::unique_ptr<Memory> begin(Tape& tape, std::int64_t batch, std::int64_t most) const override;
  Var next(Tape& tape, const Tensor& tokens, Memory& memory) const override;

 private:
  class Block;

  GptSpec spec_;
  Embedding& wte_;
  Embedding& wpe_;
  Dropout& drop_;
  std::vector<Block*> blocks_;
  LayerNorm& ln_f_;
  Embedding* lm_head_;  // nullptr: tied

  Parameter& head() const { return lm_head_ != nullptr ? lm_head_->weight() : wte_.weight(); }
};

}  // namespace lockstep::nn
