// Which token comes next, of all that a model thinks of.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace lockstep::inference {

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
