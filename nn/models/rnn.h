// Recurrent layers between an embedding and a decoder, or under a classifier.
#pragma once

#include <cstdint>
#include <memory>

#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/models/language_model.h"

namespace lockstep::nn {

struct RnnSpec {
  RnnCell cell = RnnCell::kLstm;
  std::int64_t layers = 2, width = 256;  // width: features of the embedding and of each layer
  double dropout = 0.0;                  // of what the embedding and each layer hand on
  bool bidirectional = false;
};

/// Tokens, with the names of PyTorch's word language model example: encoder, rnn (weight_ih_l0, …), decoder. Each
/// sample begins with zeros, or with what carry_state() carries, of which h and c of each layer are (rows, width).
/// Tokens (N, T) i32 → logits (N, T, vocabulary).
class RnnLanguageModel final : public LanguageModel, public CarriesState {
 public:
  /// Throws UsageError for sizes below 1, and for two directions: the other one sees the tokens that are to be
  /// predicted.
  RnnLanguageModel(Context& context, const RnnSpec& spec, std::int64_t vocabulary);
  Var forward(Tape& tape, Var tokens) override;
  std::string type_name() const override { return "RnnLanguageModel"; }

  std::int64_t vocabulary() const override { return vocabulary_; }
  std::optional<std::int64_t> positions() const override { return std::nullopt; }
  /// The states of all layers: layers · width numbers a text, of an LSTM twice as many, however long it is.
  std::unique_ptr<Memory> begin(Tape& tape, std::int64_t batch, std::int64_t most) const override;
  Var next(Tape& tape, const Tensor& tokens, Memory& memory) const override;

  void carry_state(std::int64_t rows, DType activations) override;
  std::vector<NamedBuffer> carried_state() override;

 private:
  class States;

  Var carry_on(Tape& tape, Var x);

  Backend& backend_;
  RnnSpec spec_;
  std::vector<RnnState> carried_;  // of each layer
  std::vector<RnnState> passing_;  // those of a pass that carries, for as long as it lasts
  std::int64_t vocabulary_;
  Dropout& drop_;
  Embedding& encoder_;
  Recurrent& rnn_;
  Dropout& drop_out_;
  Linear& decoder_;
};

/// Images (N, H, W, C): their rows are the steps, and what the last one leaves, in the reverse direction the first one,
/// decides the class: rnn, decoder. Logits (N, classes).
class RnnClassifier final : public Module {
 public:
  /// `features`: of a row, W · C. Throws UsageError for sizes below 1.
  RnnClassifier(Context& context, const RnnSpec& spec, std::int64_t features, std::int64_t classes);
  Var forward(Tape& tape, Var images) override;
  std::string type_name() const override { return "RnnClassifier"; }

 private:
  Recurrent& rnn_;
  Dropout& drop_;
  Linear& decoder_;
};

}  // namespace lockstep::nn
