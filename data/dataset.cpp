#include "lockstep/data/dataset.h"

#include <algorithm>

#include "base/error.h"

namespace lockstep::data {

namespace {

std::size_t product(const std::vector<std::int64_t>& dims, const std::string& name, const char* what) {
  constexpr std::size_t kMost = std::size_t{1} << 60;
  std::size_t elements = 1;
  for (const auto dim : dims)
    if (dim < 0 || __builtin_mul_overflow(elements, static_cast<std::size_t>(dim), &elements) || elements > kMost)
      throw UsageError(fmt::format("the data set '{}' has {} of an extent of {}", name, what, dim),
                       "give extents of at least 0 whose product fits into memory");
  return elements;
}

class Concatenation final : public Dataset {
 public:
  Concatenation(Info info, std::vector<std::shared_ptr<const Dataset>> parts)
      : Dataset(std::move(info)), parts_(std::move(parts)) {}

  void read_sample(std::uint64_t index, const Sample& sample) const override {
    part_of(index).read_sample(index, sample);
  }
  void append_source(std::uint64_t index, std::vector<std::byte>& bytes) const override {
    part_of(index).append_source(index, bytes);
  }
  std::string sample_name(std::uint64_t index) const override {
    const Dataset& part = part_of(index);
    return part.sample_name(index);
  }
  std::uint64_t corrupt() const override {
    std::uint64_t count = 0;
    for (const auto& part : parts_) count += part->corrupt();
    return count;
  }

 private:
  /// `index` becomes that in the part.
  const Dataset& part_of(std::uint64_t& index) const {
    auto part = parts_.begin();
    for (; index >= (*part)->size(); ++part) index -= (*part)->size();
    return **part;
  }

  std::vector<std::shared_ptr<const Dataset>> parts_;
};

bool same_samples(const Dataset::Info& a, const Dataset::Info& b) {
  return a.dims == b.dims && a.classes == b.classes && a.tokens == b.tokens && a.vocabulary == b.vocabulary &&
         a.own_targets == b.own_targets && a.target_dims == b.target_dims && a.numeric_targets == b.numeric_targets &&
         a.further_inputs == b.further_inputs && a.categories == b.categories;
}

}  // namespace

std::shared_ptr<const Dataset> concatenate(std::vector<std::shared_ptr<const Dataset>> parts, std::string name) {
  check_usage(!parts.empty() && std::ranges::find(parts, nullptr) == parts.end(),
              "no parts to concatenate, or one that is none", "give at least one data set, and no nullptr");
  Dataset::Info info = parts.front()->info();
  info.name = std::move(name);
  info.size = 0;
  info.class_counts = {};
  info.target_range = {};
  for (const auto& part : parts) {
    if (!same_samples(part->info(), info))
      throw UsageError(fmt::format("{} and {} have samples of different kinds", parts.front()->name(), part->name()),
                       "give parts of one data set");
    info.size += part->size();
  }
  return std::make_shared<Concatenation>(std::move(info), std::move(parts));
}

Dataset::Dataset(Info info) : info_(std::move(info)) {
  elements_ = product(info_.dims, name(), "samples");
  if (info_.tokens && !info_.own_targets) {
    check_usage(
        info_.target_dims.empty() && !info_.numeric_targets, "a data set of tokens with targets of its own",
        "its targets are a label for each token: leave Info::target_dims and numeric_targets out, or set own_targets");
    info_.target_dims = info_.dims;
  }
  targets_ = product(info_.target_dims, name(), "targets");
  for (auto input = info_.further_inputs.begin(); input != info_.further_inputs.end(); ++input) {
    if (input->name.empty() ||
        std::any_of(info_.further_inputs.begin(), input, [&](const Input& other) { return other.name == input->name; }))
      throw UsageError(fmt::format("the data set '{}' has {}", name(),
                                   input->name.empty() ? "a further input without a name"
                                                       : fmt::format("two further inputs named '{}'", input->name)),
                       "give each of Info::further_inputs a name of its own");
    further_elements_.push_back(product(input->dims, name(), fmt::format("the input '{}'", input->name).c_str()));
  }
}

void Dataset::read_sample(std::uint64_t index, const Sample& sample) const {
  if (!further_inputs().empty())
    throw UsageError(fmt::format("the data set '{}' does not say how its further inputs are read", name()),
                     "override read_sample(std::uint64_t, const Sample&) const in its class, which fills "
                     "Sample::further");
  if (has_tokens() && !info_.own_targets) return read_tokens(index, sample.tokens, sample.labels);
  if (has_tokens() || has_numeric_targets() || sample.labels.size() != 1)
    throw UsageError(fmt::format("the data set '{}' does not say how its samples are read", name()),
                     "override read_sample(std::uint64_t, const Sample&) const in its class, which reads targets of "
                     "any shape");
  if (sample.draw) return read_augmented(index, *sample.draw, sample.x, sample.labels[0]);
  read(index, sample.x, sample.labels[0]);
}

void Dataset::append_source(std::uint64_t index, std::vector<std::byte>& bytes) const {
  std::vector<std::vector<float>> numbers;
  std::vector<std::vector<std::int32_t>> integers;
  const auto array = [&](bool of_integers, std::size_t values) {
    if (of_integers) return Array{.numbers = {}, .integers = integers.emplace_back(values)};
    return Array{.numbers = numbers.emplace_back(values), .integers = {}};
  };
  const Array x = array(has_tokens(), sample_elements());
  const Array targets = array(!has_numeric_targets(), targets_per_sample());
  std::vector<Array> further;
  for (std::size_t i = 0; i < further_inputs().size(); ++i)
    further.push_back(array(further_inputs()[i].integers, further_elements(i)));
  read_sample(index, {.x = x.numbers,
                      .tokens = x.integers,
                      .labels = targets.integers,
                      .targets = targets.numbers,
                      .further = further});
  const auto append = [&](std::span<const std::byte> more) { bytes.insert(bytes.end(), more.begin(), more.end()); };
  for (const auto& some : numbers) append(std::as_bytes(std::span(some)));
  for (const auto& some : integers) append(std::as_bytes(std::span(some)));
}

std::string Dataset::sample_name(std::uint64_t index) const { return fmt::to_string(index); }

void Dataset::read(std::uint64_t, std::span<float>, std::int32_t&) const {
  if (has_tokens())
    throw UsageError(fmt::format("the data set '{}' has tokens, and is read as numbers", name()),
                     "read it with read_tokens()");
  throw UsageError(fmt::format("the data set '{}' does not say how its samples are read", name()),
                   "override read_sample(), or read(std::uint64_t, std::span<float>, std::int32_t&) const, in its "
                   "class; for tokens set Info::tokens, and override read_tokens()");
}

void Dataset::read_augmented(std::uint64_t index, std::uint64_t, std::span<float> x, std::int32_t& label) const {
  read(index, x, label);
}

void Dataset::read_tokens(std::uint64_t, std::span<std::int32_t>, std::span<std::int32_t>) const {
  if (!has_tokens())
    throw UsageError(fmt::format("the data set '{}' has numbers, and is read as tokens", name()),
                     "read it with read()");
  throw UsageError(fmt::format("the data set '{}' does not say how its tokens are read", name()),
                   "override read_tokens(std::uint64_t, std::span<std::int32_t>, std::span<std::int32_t>) const in its "
                   "class");
}

}  // namespace lockstep::data
