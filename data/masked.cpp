#include "data/tokens.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/splitmix.h"

namespace lockstep::data {
namespace {

constexpr std::int64_t kAround = 2;  // [CLS] and [SEP]
// A sample of an evaluation is masked in one way always. Another number would make other losses.
constexpr std::uint64_t kEvaluationDraw = 0x6d61736b;

enum Further : std::size_t { kTypes, kLength, kPositions };

class MaskedRows final : public Dataset {
 public:
  MaskedRows(Info info, std::shared_ptr<const Dataset> rows, const SpecialTokens& special)
      : Dataset(std::move(info)), rows_(std::move(rows)), special_(special) {}

  void read_sample(std::uint64_t index, const Sample& sample) const override {
    LOCKSTEP_ASSERT(sample.tokens.size() == rows_->sample_elements() + kAround && sample.further.size() == 3);
    const auto row = sample.tokens.subspan(1, sample.tokens.size() - kAround);
    thread_local std::vector<std::int32_t> unused;  // the tokens that follow
    unused.resize(row.size());
    rows_->read_tokens(index, row, unused);
    sample.tokens.front() = special_.start;
    sample.tokens.back() = special_.separator;
    std::ranges::fill(sample.further[kTypes].integers, 0);
    sample.further[kLength].integers[0] = static_cast<std::int32_t>(sample.tokens.size());

    SplitMix64 random(sample.draw ? mix64(*sample.draw, kEvaluationDraw) : mix64(kEvaluationDraw, index));
    const auto positions = sample.further[kPositions].integers;
    LOCKSTEP_ASSERT(positions.size() == sample.labels.size());
    // Each of the rest of the row is taken with the share that is still wanted of it (Knuth, "The Art of Computer
    // Programming", vol. 2, 3.4.2, algorithm S): all choices of so many are equally likely.
    for (std::size_t at = 0, taken = 0; taken < positions.size(); ++at) {
      if (random.below(static_cast<std::uint32_t>(row.size() - at)) >= positions.size() - taken) continue;
      positions[taken] = static_cast<std::int32_t>(at + 1);
      sample.labels[taken] = row[at];
      if (const std::uint32_t tenth = random.below(10); tenth < 8)
        row[at] = special_.mask;
      else if (tenth == 8)
        row[at] = static_cast<std::int32_t>(random.below(static_cast<std::uint32_t>(classes())));
      ++taken;
    }
  }

 private:
  std::shared_ptr<const Dataset> rows_;
  SpecialTokens special_;
};

}  // namespace

SpecialTokens special_tokens(const WordPieces& pieces) { return {pieces.start(), pieces.separator(), pieces.mask()}; }

std::int64_t masked_row_tokens(std::int64_t context) {
  if (context <= kAround)
    throw UsageError(fmt::format("samples of {} tokens, two of which are [CLS] and [SEP]", context),
                     "give --max-length 3 or more");
  return context - kAround;
}

std::int64_t masked_positions(std::int64_t context) {
  return std::max<std::int64_t>(1, (masked_row_tokens(context) * 15 + 50) / 100);
}

DataSplits mask_rows(const DataSplits& rows, const SpecialTokens& special, std::shared_ptr<const WordPieces> pieces) {
  const auto masked = [&](const std::shared_ptr<const Dataset>& part) -> std::shared_ptr<const Dataset> {
    if (part == nullptr) return nullptr;
    const std::int64_t context = part->sample_dims()[0] + kAround;
    return std::make_shared<MaskedRows>(
        Dataset::Info{.name = part->name(),
                      .size = part->size(),
                      .dims = {context},
                      .classes = part->classes(),
                      .tokens = true,
                      .own_targets = true,
                      .target_dims = {masked_positions(context)},
                      .further_inputs = {{.name = "token types", .dims = {context}, .integers = true},
                                         {.name = "lengths", .integers = true},
                                         {.name = "positions", .dims = {masked_positions(context)}, .integers = true}},
                      .word_pieces = pieces},
        part, special);
  };
  return {.train = masked(rows.train),
          .validation = masked(rows.validation),
          .test = masked(rows.test),
          .whole = masked(rows.whole)};
}

}  // namespace lockstep::data
