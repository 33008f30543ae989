#include "data/labelled_texts.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "data/file_list.h"

namespace lockstep::data {
namespace {

enum TextInput : std::size_t { kTextTypes, kTextLength };

class LabelledTexts final : public Dataset {
 public:
  LabelledTexts(Info info, std::vector<EncodedText> texts, std::vector<std::int32_t> labels,
                std::vector<std::string> sources)
      : Dataset(std::move(info)), texts_(std::move(texts)), labels_(std::move(labels)), sources_(std::move(sources)) {}

  std::string sample_name(std::uint64_t index) const override { return sources_[index]; }

  void read_sample(std::uint64_t index, const Sample& sample) const override {
    LOCKSTEP_ASSERT(index < texts_.size() && sample.further.size() == 2 && sample.labels.size() == 1);
    sample.further[kTextLength].integers[0] =
        write_sample(*word_pieces(), texts_[index], sample.tokens, sample.further[kTextTypes].integers);
    sample.labels[0] = labels_[index];
  }

 private:
  std::vector<EncodedText> texts_;
  std::vector<std::int32_t> labels_;
  std::vector<std::string> sources_;
};

}  // namespace

std::int32_t write_sample(const WordPieces& pieces, const EncodedText& text, std::span<std::int32_t> tokens,
                          std::span<std::int32_t> types) {
  std::size_t first = text.first.size(), second = text.second.size();
  const std::size_t around = text.pair ? 3 : 2;
  LOCKSTEP_ASSERT(tokens.size() >= around && types.size() == tokens.size());
  const std::size_t room = tokens.size() - around;
  while (first + second > room) --(first > second ? first : second);
  auto at = tokens.begin();
  const auto put = [&](std::span<const std::int32_t> part) { at = std::ranges::copy(part, at).out; };
  *at++ = pieces.start();
  put(std::span(text.first).first(first));
  *at++ = pieces.separator();
  const auto begin_second = at - tokens.begin();
  if (text.pair) {
    put(std::span(text.second).first(second));
    *at++ = pieces.separator();
  }
  const auto length = at - tokens.begin();
  std::fill(at, tokens.end(), pieces.padding());
  std::ranges::fill(types, 0);
  std::fill(types.begin() + begin_second, types.begin() + length, 1);
  return static_cast<std::int32_t>(length);
}

void hold_out(TextRows& rows) {
  if (rows.train.size() < kNthForValidation)
    throw IoError(fmt::format("{}: {} texts are too few: a tenth is for validation", rows.name, rows.train.size()),
                  "add texts");
  std::vector<TextRow> mine;
  for (std::uint64_t i = 0; i < rows.train.size(); ++i)
    (is_held_out(i) ? rows.validation : mine).push_back(std::move(rows.train[i]));
  rows.train = std::move(mine);
}

DataSplits open_labelled_texts(TextRows rows, const OpenOptions& options) {
  if (!options.word_pieces)
    throw UsageError(fmt::format("{} has a class for each text", rows.name),
                     "use it with a model that classifies texts, or give the text alone: text:FILE");
  const auto found = static_cast<int>(rows.classes.size());
  if (options.classes > 0 && options.classes < found)
    throw UsageError(fmt::format("--classes {} for {}, which has {}", options.classes, rows.name, found),
                     fmt::format("leave --classes out, or give {} or more", found));
  const std::int64_t least = rows.pairs ? 5 : 3;  // one piece of each text
  if (options.context < least)
    throw UsageError(
        fmt::format("samples of {} tokens, {} of which are [CLS] and [SEP]", options.context, least / 2 + 1),
        fmt::format("give --max-length {} or more", least));
  auto pieces = options.word_pieces->pieces;
  if (pieces == nullptr) {
    WordPieceLearner learner(options.word_pieces->cased);
    for (const TextRow& row : rows.train) {
      learner.add(row.first, row.source);
      learner.add(row.second, row.source);
    }
    pieces = learner.learn(static_cast<std::size_t>(options.word_pieces->vocabulary_size));
  }
  WordPieceEncoder encoder(*pieces);
  const auto part = [&](const std::string& name, std::vector<TextRow>& texts) {
    if (texts.empty()) throw IoError(fmt::format("{}: it has no text", rows.name + name), "add some");
    std::vector<EncodedText> encoded;
    std::vector<std::int32_t> labels;
    std::vector<std::string> sources;
    std::size_t cut = 0;
    UnknownTokens unknown(*pieces);
    for (TextRow& row : texts) {
      EncodedText text = {.first = encoder.encode(row.first, row.source),
                          .second = encoder.encode(row.second, row.source),
                          .pair = rows.pairs};
      if (std::cmp_greater(text.tokens(), options.context)) ++cut;
      unknown.add(text.first);
      unknown.add(text.second);
      encoded.push_back(std::move(text));
      labels.push_back(row.label);
      sources.push_back(std::move(row.source));
    }
    if (cut > 0)
      log_info("{}{}: {} of {} texts have more than {} tokens, and are cut", rows.name, name, cut, texts.size(),
               options.context);
    if (const auto warning = unknown.warning(rows.name + name)) log_warn("{}", *warning);
    Dataset::Info info{
        .name = rows.name + name,
        .size = texts.size(),
        .dims = {options.context},
        .classes = std::max(options.classes, found),
        .tokens = true,
        .vocabulary = pieces->size(),
        .own_targets = true,
        .further_inputs = {{.name = "token types", .dims = {options.context}, .integers = true},
                           {.name = "lengths", .integers = true}},
        .class_names = rows.classes,
        .class_counts = std::vector<std::uint64_t>(static_cast<std::size_t>(std::max(options.classes, found))),
        .reading = rows.reading,
        .word_pieces = pieces};
    for (const std::int32_t label : labels) ++info.class_counts[static_cast<std::size_t>(label)];
    texts = {};
    return std::make_shared<LabelledTexts>(std::move(info), std::move(encoded), std::move(labels), std::move(sources));
  };
  if (options.parts.whole && rows.validation.empty()) return {.whole = part("", rows.train)};
  return {.train = part(" train", rows.train),
          .validation = part(" validation", rows.validation),
          .test = rows.test.empty() ? nullptr : part(" test", rows.test)};
}

}  // namespace lockstep::data
