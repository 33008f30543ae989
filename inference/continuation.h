// A text that a language model continues, token by token.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/nn/models/language_model.h"

namespace lockstep::inference {

/// One text after the other over one model. A model with a limited number of positions, P, sees the last P tokens of a
/// longer prompt; and when there are P, it forgets the older half of them and continues. So what it sees of a long text
/// is between half of P and P tokens, and each token costs the same in the long run. Model and backend must outlive it;
/// one thread uses it.
class Continuation {
 public:
  /// In evaluation mode; activations are of this type.
  Continuation(nn::Backend& backend, const nn::LanguageModel& model, DType activations);

  /// Starts a text with these tokens, at least one; at most `more` will be added.
  void begin(std::span<const std::int32_t> prompt, std::int64_t more);
  /// What comes next, for each token how likely; valid until the next call of begin() or add().
  std::span<const float> logits() const { return logits_; }
  void add(std::int32_t token);

 private:
  void feed(std::span<const std::int32_t> tokens);
  void restart(std::int64_t keep, std::int64_t more);

  nn::Backend& backend_;
  const nn::LanguageModel& model_;
  nn::Tape tape_;
  std::unique_ptr<nn::LanguageModel::Memory> memory_;
  std::int64_t room_ = 0;             // tokens that memory_ can hold
  std::vector<std::int32_t> recent_;  // the last tokens: those that memory_ has seen, at least
  std::vector<float> logits_;
};

}  // namespace lockstep::inference
