#include "data/random.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>

#include "base/error.h"
#include "base/splitmix.h"

namespace lockstep::data {

namespace {

// The upper half of the normal distribution in 2^15 equally likely steps: entry k is its quantile at
// 1/2 + (k + 1/2) / 2^16. Looking up is several times faster than a transform such as Box and Muller's.
constexpr std::size_t kQuantiles = 1u << 15;

std::vector<float> normal_quantiles() {
  std::vector<float> quantiles(kQuantiles);
  double x = 0;
  for (std::size_t k = 0; k < kQuantiles; ++k) {
    const double above = 0.5 - (static_cast<double>(k) + 0.5) / (2.0 * kQuantiles);
    // Newton's method from the neighbour; the tail function is convex, so it never overshoots.
    for (double change = 1; std::abs(change) > 1e-9;) {
      const double density = std::exp(-x * x / 2) / std::sqrt(2 * std::numbers::pi);
      change = (std::erfc(x / std::numbers::sqrt2) / 2 - above) / density;
      x += change;
    }
    quantiles[k] = static_cast<float>(x);
  }
  return quantiles;
}

class Random : public Dataset {
 public:
  Random(Info info, std::shared_ptr<const std::vector<float>> quantiles, std::uint64_t seed, std::uint64_t first)
      : Dataset(std::move(info)), quantiles_(std::move(quantiles)), seed_(seed), first_(first) {}

  void read(std::uint64_t index, std::span<float> x, std::int32_t& label) const override {
    LOCKSTEP_ASSERT(index < size() && x.size() == sample_elements(), "sample {} into {} numbers", index, x.size());
    SplitMix64 random(mix64(seed_, first_ + index));
    label = static_cast<std::int32_t>(random.below(static_cast<std::uint32_t>(classes())));
    const float* quantiles = quantiles_->data();
    for (std::size_t i = 0; i < x.size(); i += 4) {
      std::uint64_t word = random.next();
      for (std::size_t j = i; j < std::min(i + 4, x.size()); ++j, word >>= 16) {
        // Bit 15 becomes the sign bit: a branch here would be mispredicted every other time.
        const auto magnitude = std::bit_cast<std::uint32_t>(quantiles[word & (kQuantiles - 1)]);
        x[j] = std::bit_cast<float>(magnitude | static_cast<std::uint32_t>(word & kQuantiles) << 16);
      }
    }
  }

 private:
  std::shared_ptr<const std::vector<float>> quantiles_;
  std::uint64_t seed_;
  std::uint64_t first_;  // where this part's samples start in the endless row of samples
};

class RandomTokens : public Dataset {
 public:
  RandomTokens(Info info, std::uint64_t seed, std::uint64_t first)
      : Dataset(std::move(info)), seed_(seed), first_(first) {}

  void read_tokens(std::uint64_t index, std::span<std::int32_t> tokens, std::span<std::int32_t> labels) const override {
    LOCKSTEP_ASSERT(index < size() && tokens.size() == sample_elements() && labels.size() == tokens.size(),
                    "sample {} into {} tokens", index, tokens.size());
    SplitMix64 random(mix64(seed_, first_ + index));
    for (std::int32_t& token : tokens)
      token = static_cast<std::int32_t>(random.below(static_cast<std::uint32_t>(classes())));
    std::copy(tokens.begin() + 1, tokens.end(), labels.begin());
    labels.back() = static_cast<std::int32_t>(random.below(static_cast<std::uint32_t>(classes())));
  }

 private:
  std::uint64_t seed_;
  std::uint64_t first_;
};

// Training samples stand first in an endless row of samples, those for tests behind them.
template <class Part, class... Args>
DataSplits make_parts(std::uint64_t length, const std::vector<std::int64_t>& dims, int classes, bool tokens,
                      const Args&... args) {
  const std::uint64_t test_length = std::max<std::uint64_t>(1, length / 10);
  const auto info = [&](const char* name, std::uint64_t size) {
    return Dataset::Info{.name = name, .size = size, .dims = dims, .classes = classes, .tokens = tokens};
  };
  return {std::make_shared<Part>(info("random train", length), args..., std::uint64_t{0}),
          std::make_shared<Part>(info("random test", test_length), args..., length)};
}

}  // namespace

DataSplits make_random(const std::vector<std::int64_t>& dims, std::uint64_t length, int classes, std::uint64_t seed) {
  const auto quantiles = std::make_shared<const std::vector<float>>(normal_quantiles());
  return make_parts<Random>(length, dims, classes, false, quantiles, seed);
}

DataSplits make_random_tokens(std::int64_t context, std::uint64_t length, int classes, std::uint64_t seed) {
  if (context < 1) throw UsageError(fmt::format("samples of {} tokens", context), "give --context 1 or more");
  return make_parts<RandomTokens>(length, {context}, classes, true, seed);
}

}  // namespace lockstep::data
