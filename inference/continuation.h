// A text that a language model continues, token by token, and which token comes next.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
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

struct TokenChoice {
  double temperature = 1.0;  // logits are divided by it; 0: the likeliest token, of several the first
  std::int64_t top_k = 0;    // of the likeliest so many alone; 0: of all
  std::uint64_t seed = 1;
};

/// Keeps its memory. One thread at a time.
class TokenChooser {
 public:
  explicit TokenChooser(const TokenChoice& choice) : choice_(choice) {}

  /// A token with the probability that softmax(logits / temperature) gives it, or gives it among the top k. Which one
  /// is a pure function of the logits, the choice, `text` and `place`: the numbers of the text and of the token within
  /// it. Throws DivergedError where a logit that matters is not a number, or infinite.
  std::int32_t choose(std::span<const float> logits, std::uint64_t text, std::uint64_t place);

 private:
  struct Candidate {
    float logit;
    std::int32_t token;
  };
  void keep_largest(std::span<const float> logits);

  TokenChoice choice_;
  std::vector<Candidate> candidates_;
  std::vector<double> sums_;  // of the weights of all up to each
};

}  // namespace lockstep::inference
