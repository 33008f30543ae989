// BERT: an encoder of blocks with attention in both directions.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/nn/layers/layers.h"

namespace lockstep::nn {

struct BertSpec {
  std::int64_t layers = 4, heads = 4, width = 256;
  std::int64_t inner = 0;      // features between the two layers of a block's second half; 0: 4 · width
  std::int64_t context = 512;  // the most tokens
  std::int64_t vocabulary = 30522;
  std::int64_t token_types = 2;  // of which the second marks the second of two texts
  double dropout = 0.0;          // of embeddings, of attention's weights, of what a block adds, and before a classifier
};

/// The encoder of Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding"
/// (2019), with the names of Hugging Face's BertModel: embeddings.{word_embeddings, position_embeddings,
/// token_type_embeddings, LayerNorm}, encoder.layer.N.{attention.self.{query, key, value}, attention.output.{dense,
/// LayerNorm}, intermediate.dense, output.{dense, LayerNorm}}, pooler.dense.
///
/// Inputs: tokens (N, T) i32, T ≤ context; or these, token types (N, T) i32 and lengths (N) i32 — the tokens of each
/// sample, what follows them is padding. With tokens alone all types are 0 and no sample has padding.
class Bert final : public Module {
 public:
  /// Throws UsageError for sizes that do not go together. `pools`: with the pooler.
  Bert(Context& context, const BertSpec& spec, bool pools);
  /// The states of the last block, (N, T, width).
  Vars forward_all(Tape& tape, const Vars& inputs) override;
  std::vector<Module*> blocks() override;
  /// tanh of a layer over the first token's state: (N, width).
  Var pool(Tape& tape, Var states);
  std::string type_name() const override { return "Bert"; }
  const BertSpec& spec() const { return spec_; }
  /// The table of tokens.
  Parameter& words() { return words_.weight(); }

 private:
  class Block;

  BertSpec spec_;
  Embedding &words_, &positions_, &types_;
  LayerNorm& norm_;
  Dropout& drop_;
  std::vector<Block*> blocks_;
  Linear* pooler_ = nullptr;  // nullptr: there is none
};

/// Predicts masked tokens, with the names of Hugging Face's BertForMaskedLM: bert, cls.predictions.{transform.dense,
/// transform.LayerNorm, bias}; the weights of the last product are the table of tokens. Inputs: those of Bert, and
/// after all three of them possibly positions (N, K) i32 of those that are to be predicted → logits (N, K, vocabulary);
/// without positions of all tokens, (N, T, vocabulary).
class BertForMaskedLM final : public Module {
 public:
  BertForMaskedLM(Context& context, const BertSpec& spec);
  Vars forward_all(Tape& tape, const Vars& inputs) override;
  std::vector<Module*> blocks() override { return bert_.blocks(); }
  std::string type_name() const override { return "BertForMaskedLM"; }

 private:
  Bert& bert_;
  Linear& dense_;
  LayerNorm& norm_;
  Parameter& bias_;
};

/// Classes of whole samples, with the names of Hugging Face's BertForSequenceClassification: bert, classifier. Inputs:
/// those of Bert → logits (N, classes).
class BertForSequenceClassification final : public Module {
 public:
  BertForSequenceClassification(Context& context, const BertSpec& spec, std::int64_t classes);
  Vars forward_all(Tape& tape, const Vars& inputs) override;
  std::vector<Module*> blocks() override { return bert_.blocks(); }
  std::string type_name() const override { return "BertForSequenceClassification"; }

 private:
  Bert& bert_;
  Dropout& drop_;
  Linear& classifier_;
};

}  // namespace lockstep::nn
