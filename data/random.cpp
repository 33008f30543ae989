#include "data/built_in.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>

#include "base/error.h"
#include "base/splitmix.h"
#include "base/text.h"
#include "data/tokens.h"
#include "lockstep/data/families.h"

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

// Of one endless sequence of samples, the first are for training, the following ones for tests.
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

namespace {

// The last three tokens are the special ones.
DataSplits make_random_masked(const OpenOptions& options, std::uint64_t length, int classes) {
  constexpr int kSpecial = 3;
  if (classes <= kSpecial)
    throw UsageError(fmt::format("{} random tokens, three of which are special", classes),
                     fmt::format("give --classes {} or more", kSpecial + 1));
  return mask_rows(make_random_tokens(masked_row_tokens(options.context), length, classes, options.seed),
                   {.start = classes - 3, .separator = classes - 2, .mask = classes - 1}, nullptr);
}

constexpr const char* kRandomHelp =
    "write random:SHAPE,LEN with SHAPE a number of features, CxHxW or 'tokens', such as random:3x32x32,1000";
constexpr std::string_view kTokens = "tokens";
// 4 GiB of f32: far above any sample, far below overflow.
constexpr std::int64_t kMostElements = std::int64_t{1} << 30;

// "5" → {5}; "3x32x40" (C, H, W, as people write it) → {32, 40, 3} (H, W, C, as memory holds it).
std::vector<std::int64_t> parse_shape(const std::string& spec, const std::string& text) {
  std::vector<std::int64_t> dims;
  std::int64_t elements = 1;
  for (const auto& piece : split(text, 'x')) {
    const auto dim = parse_int(piece);
    if (!dim || *dim < 1) throw UsageError(fmt::format("data '{}': '{}' is not a shape", spec, text), kRandomHelp);
    if (*dim > kMostElements / elements)
      throw UsageError(fmt::format("data '{}': a sample of more than 2^30 numbers", spec), "give a smaller shape");
    elements *= *dim;
    dims.push_back(*dim);
  }
  if (dims.size() == 3) return {dims[1], dims[2], dims[0]};
  if (dims.size() == 1) return dims;
  throw UsageError(fmt::format("data '{}': '{}' has {} dimensions, not 1 or 3", spec, text, dims.size()), kRandomHelp);
}

DataSplits open_random(const std::string& spec, const std::string& argument, const OpenOptions& options) {
  const auto pieces = split(argument, ',');
  if (pieces.size() != 2) throw UsageError(fmt::format("data '{}' needs a shape and a length", spec), kRandomHelp);
  const bool tokens = pieces[0] == kTokens;
  const auto dims = tokens ? std::vector<std::int64_t>() : parse_shape(spec, pieces[0]);
  const auto length = parse_int(pieces[1]);
  if (!length || *length < 0)
    throw UsageError(fmt::format("data '{}': '{}' is not a number of samples", spec, pieces[1]), kRandomHelp);
  if (*length == 0) throw IoError(fmt::format("data '{}': empty data set", spec), "give data with at least one sample");
  const int classes = options.classes > 0 ? options.classes : tokens ? kRandomTokens : kRandomClasses;
  if (tokens && options.word_pieces) return make_random_masked(options, static_cast<std::uint64_t>(*length), classes);
  if (tokens) return make_random_tokens(options.context, static_cast<std::uint64_t>(*length), classes, options.seed);
  return make_random(dims, static_cast<std::uint64_t>(*length), classes, options.seed);
}

}  // namespace

bool may_have_tokens(const std::string& spec) {
  const DatasetFamily* const family = find_dataset_family(spec);
  return family != nullptr &&
         (family->has_tokens || (family->synthetic && dataset_argument(spec).starts_with(kTokens)));
}

std::string random_data(std::span<const std::int64_t> dims, std::uint64_t length) {
  std::string shape(kTokens);
  if (dims.size() == 1) shape = fmt::to_string(dims[0]);
  if (dims.size() == 3) shape = fmt::format("{}x{}x{}", dims[2], dims[0], dims[1]);
  return fmt::format("random:{},{}", shape, length);
}

const DatasetFamily& random_family() {
  static const DatasetFamily family = {.name = "random",
                                       .argument = "SHAPE,LEN",
                                       .about = "synthetic",
                                       .any_classes = true,
                                       .synthetic = true,
                                       .open = open_random};
  return family;
}

}  // namespace lockstep::data
