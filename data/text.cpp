#include "data/text.h"

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "data/documents.h"
#include "data/text_file.h"
#include "data/tokens.h"
#include "lockstep/data/families.h"

namespace lockstep::data {
namespace {

// Calls visit(code point) for each character.
template <class Visit>
void each_character(std::string_view text, const std::string& source, const Visit& visit) {
  std::size_t at = 0;
  const auto refuse = [&] {
    throw IoError(fmt::format("{}: byte {} is not UTF-8", source, at),
                  "convert it from the encoding that it has: iconv -f WINDOWS-1252 -t UTF-8, for example");
  };
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  while (at < text.size()) {
    const unsigned char first = byte(at);
    const std::size_t length = first < 0x80 ? 1 : first < 0xC2 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    if (length == 0 || first > 0xF4 || at + length > text.size()) refuse();
    char32_t code = length == 1 ? first : first & (0x7Fu >> length);
    for (std::size_t i = 1; i < length; ++i) {
      if ((byte(at + i) & 0xC0u) != 0x80u) refuse();
      code = code << 6 | (byte(at + i) & 0x3Fu);
    }
    // Longer than it need be, half of a UTF-16 pair, beyond the last character.
    constexpr char32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
    if (code < kLeast[length] || (code >= 0xD800 && code < 0xE000) || code > 0x10FFFF) refuse();
    visit(code, at);
    at += length;
  }
}

class Text final : public Dataset {
 public:
  Text(Info info, std::shared_ptr<const std::vector<std::int32_t>> tokens, TokenRows rows)
      : Dataset(std::move(info)), tokens_(std::move(tokens)), rows_(rows) {}

  void read_tokens(std::uint64_t index, std::span<std::int32_t> tokens, std::span<std::int32_t> labels) const override {
    LOCKSTEP_ASSERT(index < size() && tokens.size() == sample_elements() && labels.size() == tokens.size());
    const std::uint64_t begin = rows_.begin_of(index);
    const std::span<const std::int32_t> row(tokens_->data() + begin, tokens.size() + 1);
    std::ranges::copy(row.first(tokens.size()), tokens.begin());
    std::ranges::copy(row.last(tokens.size()), labels.begin());
  }

 private:
  std::shared_ptr<const std::vector<std::int32_t>> tokens_;  // of both parts
  TokenRows rows_;
};

}  // namespace

Characters::Characters(std::string_view text, const std::string& source) {
  std::vector<bool> seen(0x110000);
  each_character(text, source, [&](char32_t code, std::size_t) { seen[code] = true; });
  for (char32_t code = 0; code < seen.size(); ++code)
    if (seen[code]) characters_.push_back(code);
}

std::vector<std::int32_t> Characters::encode(std::string_view text, const std::string& source) const {
  std::vector<std::int32_t> tokens;
  tokens.reserve(text.size());
  each_character(text, source, [&](char32_t code, std::size_t at) {
    const auto found = std::ranges::lower_bound(characters_, code);
    if (found == characters_.end() || *found != code)
      throw IoError(fmt::format("{}: the character U+{:04X} at byte {} is not among the model's {}", source,
                                static_cast<std::uint32_t>(code), at, size()),
                    "use characters of the text that the model was trained on");
    tokens.push_back(static_cast<std::int32_t>(found - characters_.begin()));
  });
  return tokens;
}

std::string Characters::decode(std::span<const std::int32_t> tokens) const {
  std::string text;
  for (const std::int32_t token : tokens) {
    LOCKSTEP_ASSERT(token >= 0 && token < size(), "token {} of {}", token, size());
    append_utf8(text, characters_[static_cast<std::size_t>(token)]);
  }
  return text;
}

std::string Characters::text() const {
  std::string all;
  for (const char32_t code : characters_) append_utf8(all, code);
  return all;
}

Characters read_characters(const std::string& path) {
  const Documents texts(path);
  return {texts.joined(), path};
}

namespace {

// Rows of the tokens of `texts`, with a label for each.
DataSplits rows_of(const Documents& texts, const Vocabulary& vocabulary, std::int64_t context,
                   std::shared_ptr<const Characters> characters, const WordPieces* pieces, bool whole) {
  const std::string& path = texts.name();
  const auto tokens = std::make_shared<const std::vector<std::int32_t>>(texts.encode(vocabulary));
  if (pieces != nullptr) {
    UnknownTokens unknown(*pieces);
    unknown.add(*tokens);
    if (const auto warning = unknown.warning("text " + path)) log_warn("{}", *warning);
  }
  const std::string digest = vocabulary.sha256();
  const auto part = [&](const char* name, const TokenRows& rows) {
    return std::make_shared<Text>(
        Dataset::Info{.name = fmt::format("text {}{}", path, name),
                      .size = rows.count(),
                      .dims = {context},
                      .classes = vocabulary.size(),
                      .tokens = true,
                      .bytes_per_token = static_cast<double>(texts.bytes()) / static_cast<double>(tokens->size()),
                      .characters = characters,
                      .vocabulary_sha256 = digest},
        tokens, rows);
  };
  if (whole) return {.whole = part("", whole_tokens(tokens->size(), context, path))};
  const TokenParts parts = split_tokens(tokens->size(), context, path);
  return {.train = part(" train", parts.train), .validation = part(" validation", parts.validation)};
}

}  // namespace

DataSplits open_text(const std::string& path, std::int64_t context, std::shared_ptr<const Characters> characters,
                     bool whole) {
  const Documents texts(path);
  if (characters == nullptr) characters = std::make_shared<const Characters>(texts.joined(), path);
  return rows_of(texts, *characters, context, characters, nullptr, whole);
}

DataSplits open_text_of(const std::string& path, std::int64_t context, const Vocabulary& vocabulary, bool whole) {
  const Documents texts(path);
  return rows_of(texts, vocabulary, context, nullptr, nullptr, whole);
}

DataSplits open_masked_text(const std::string& path, std::int64_t context, const WordPieceOptions& options,
                            bool whole) {
  const Documents texts(path);
  auto pieces = options.pieces;
  if (pieces == nullptr) {
    WordPieceLearner learner(options.cased);
    learner.add(texts.joined(), path);
    pieces = learner.learn(static_cast<std::size_t>(options.vocabulary_size));
  }
  return mask_rows(rows_of(texts, *pieces, masked_row_tokens(context), nullptr, pieces.get(), whole),
                   special_tokens(*pieces), pieces);
}

const DatasetFamily& text_family() {
  static const DatasetFamily family = {
      .name = "text",
      .argument = "FILE",
      .about = "its characters, word pieces or byte pairs",
      .has_tokens = true,
      .consecutive = true,
      .takes_vocabulary = true,
      .open =
          [](const std::string& spec, const std::string& path, const OpenOptions& options) {
            if (options.classes > 0)
              throw UsageError(
                  fmt::format("--classes {} for {}: a text has as many tokens as it has {}", options.classes, spec,
                              options.word_pieces  ? "word pieces"
                              : options.vocabulary ? "in its vocabulary"
                                                   : "characters"),
                  "leave --classes out");
            const bool whole = options.parts.whole;
            if (options.word_pieces) return open_masked_text(path, options.context, *options.word_pieces, whole);
            if (options.vocabulary) return open_text_of(path, options.context, *options.vocabulary, whole);
            return open_text(path, options.context, options.characters, whole);
          },
      .files = document_files};
  return family;
}

}  // namespace lockstep::data
