#include "inference/continuation.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/splitmix.h"

namespace lockstep::inference {
namespace {

[[noreturn]] void fail(float logit, std::size_t token) {
  throw DivergedError(fmt::format("the model's logit of token {} is {}", token, std::isnan(logit) ? "NaN" : "infinite"),
                      "its weights are corrupt, or its training diverged");
}

}  // namespace

std::int32_t TokenChooser::choose(std::span<const float> logits, std::uint64_t text, std::uint64_t place) {
  LOCKSTEP_ASSERT(!logits.empty());
  std::size_t best = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    // -infinity is a token that never comes.
    if (!(logits[i] <= std::numeric_limits<float>::max())) fail(logits[i], i);
    if (logits[i] > logits[best]) best = i;
  }
  if (std::isinf(logits[best])) fail(logits[best], best);
  if (choice_.temperature == 0 || choice_.top_k == 1) return static_cast<std::int32_t>(best);

  const bool all = choice_.top_k <= 0 || static_cast<std::size_t>(choice_.top_k) >= logits.size();
  if (!all) keep_largest(logits);
  const std::size_t count = all ? logits.size() : candidates_.size();
  const auto logit = [&](std::size_t i) { return all ? logits[i] : candidates_[i].logit; };
  sums_.resize(count);
  double sum = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double below = (double{logit(i)} - double{logits[best]}) / choice_.temperature;
    constexpr double kLeast = -746;  // where exp() is 0
    sum += below > kLeast ? std::exp(below) : 0.0;
    sums_[i] = sum;
  }
  const std::uint64_t word = SplitMix64::word(mix64(choice_.seed, text), place);
  const double drawn = static_cast<double>(word >> 11) * 0x1p-53 * sum;
  const auto found = static_cast<std::size_t>(std::ranges::upper_bound(sums_, drawn) - sums_.begin());
  const std::size_t chosen = std::min(found, count - 1);
  return all ? static_cast<std::int32_t>(chosen) : candidates_[chosen].token;
}

// A heap whose top is what falls out next: the smallest, of equal ones the last.
void TokenChooser::keep_largest(std::span<const float> logits) {
  const auto k = static_cast<std::size_t>(choice_.top_k);
  const auto larger = [](const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
  };
  candidates_.clear();
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const Candidate next{logits[i], static_cast<std::int32_t>(i)};
    if (candidates_.size() == k) {
      if (!larger(next, candidates_.front())) continue;
      std::ranges::pop_heap(candidates_, larger);
      candidates_.pop_back();
    }
    candidates_.push_back(next);
    std::ranges::push_heap(candidates_, larger);
  }
  std::ranges::sort(candidates_, larger);
}

}  // namespace lockstep::inference
