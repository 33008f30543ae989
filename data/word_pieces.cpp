#include "data/word_pieces.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/text.h"
#include "data/tokenizer_files.h"

namespace lockstep::data {
namespace {

constexpr std::size_t kMostPieces = 1 << 24;
constexpr std::size_t kMostWordCharacters = 100;
constexpr std::string_view kContinues = "##";

std::size_t length_of(std::string_view text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0u) != 0x80u; }));
}

/// The characters of a piece that texts can have: in one of several characters none stands alone, as punctuation does.
std::optional<std::u32string> found_in_texts(std::string_view key, bool continues, bool split_ideographs) {
  auto characters = characters_of(key);
  if (!characters) return std::nullopt;
  const bool several = characters->size() > 1 || continues;
  for (const char32_t code : *characters) switch (kind_of(code)) {
      case CharacterKind::kLeftOut:
      case CharacterKind::kBlank: return std::nullopt;
      case CharacterKind::kPunctuation:
        if (several) return std::nullopt;
        break;
      case CharacterKind::kIdeograph:
        if (several && split_ideographs) return std::nullopt;
        break;
      case CharacterKind::kLetter:
      case CharacterKind::kMark: break;
    }
  return characters;
}

bool loses_marks(char32_t code) {
  if (kind_of(code) == CharacterKind::kMark) return true;
  const Decomposition parts = decomposed(code);
  return parts.count != 1 || parts.codes[0] != code;
}

TextRules text_rules(const WordPieceRules& rules) {
  return {.lower_case = *rules.lower_case,
          .marks = !rules.strip_marks   ? TextRules::Marks::kLeftOutUnlessHeld
                   : *rules.strip_marks ? TextRules::Marks::kLeftOut
                                        : TextRules::Marks::kKept,
          .split_ideographs = rules.split_ideographs};
}

}  // namespace

WordPieces::WordPieces(std::vector<std::string> pieces, const std::string& source, WordPieceRules rules)
    : pieces_(std::move(pieces)), rules_(std::move(rules)), words_(TextRules{}) {
  const auto refuse = [&](const std::string& why) {
    throw IoError(fmt::format("{} is not a usable vocabulary: {}", source, why), "take the vocab.txt of a BERT");
  };
  if (pieces_.size() > kMostPieces) refuse(fmt::format("it has more than {} pieces", kMostPieces));
  bool capitals = false;
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const std::string_view piece = pieces_[i];
    const bool continues = piece.size() > kContinues.size() && piece.starts_with(kContinues);
    const std::string_view key = continues ? piece.substr(kContinues.size()) : piece;
    if (!(continues ? continues_ : starts_).emplace(key, static_cast<std::int32_t>(i)).second)
      refuse(fmt::format("line {}, '{}', is there twice", i + 1, printable(utf8_prefix(piece, 40))));
    longest_ = std::max(longest_, key.size());
    if (!characters_of(piece)) refuse(fmt::format("line {}, '{}', is not UTF-8", i + 1, printable(piece)));
    const auto characters = found_in_texts(key, continues, rules_.split_ideographs);
    if (!characters) continue;
    capitals = capitals || std::ranges::any_of(*characters, [](char32_t code) { return in_lower_case(code) != code; });
    std::ranges::copy_if(*characters, std::back_inserter(held_), loses_marks);
  }
  std::ranges::sort(held_);
  held_.erase(std::ranges::unique(held_).begin(), held_.end());
  if (!rules_.lower_case) rules_.lower_case = !capitals;
  // Without pieces that have any, no mark stays.
  if (!rules_.strip_marks && (!*rules_.lower_case || held_.empty())) rules_.strip_marks = *rules_.lower_case;
  words_ =
      BasicTokenizer(text_rules(rules_), [this](char32_t code) { return std::ranges::binary_search(held_, code); });
  const auto special = [&](std::string_view name) {
    const auto found = starts_.find(name);
    if (found == starts_.end()) refuse(fmt::format("it has no {}", name));
    return found->second;
  };
  padding_ = special("[PAD]");
  unknown_ = special("[UNK]");
  start_ = special("[CLS]");
  separator_ = special("[SEP]");
  mask_ = special("[MASK]");
  for (const std::string_view name : kSpecialPieces) special_.add(std::string(name), special(name));
  for (const std::string& name : rules_.added) special_.add(name, special(name));
}

std::shared_ptr<const WordPieces> WordPieces::read(const std::string& path, std::optional<bool> cased) {
  const MappedFile file(path);
  std::vector<std::string> pieces;
  for (std::string_view text = file.text(); !text.empty();) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (pieces.size() > kMostPieces) break;
    pieces.emplace_back(line);
  }
  while (!pieces.empty() && pieces.back().empty()) pieces.pop_back();
  if (pieces.empty())
    throw IoError(fmt::format("{} is not a usable vocabulary: it is empty", path), "take the vocab.txt of a BERT");
  const TokenizerFiles files = read_tokenizer_files(path, TokenizerKind::kBert);
  append_added_tokens(files, pieces, path);
  WordPieceRules rules = {.lower_case = files.lower_case,
                          .strip_marks = files.strip_marks,
                          .split_ideographs = files.split_ideographs.value_or(true)};
  if (cased) {
    // What the files say of marks goes with what they say of capitals.
    if (rules.lower_case && *rules.lower_case == *cased) rules.strip_marks.reset();
    rules.lower_case = !*cased;
  }
  for (const auto& [name, number] : files.added)
    if (std::ranges::find(kSpecialPieces, name) == kSpecialPieces.end()) rules.added.push_back(name);
  return std::make_shared<const WordPieces>(std::move(pieces), path, std::move(rules));
}

void WordPieces::encode_word(std::string_view word, std::vector<std::int32_t>& to) const {
  if (length_of(word) > kMostWordCharacters) {
    to.push_back(unknown_);
    return;
  }
  const std::size_t first = to.size();
  std::string_view rest = word;
  while (!rest.empty()) {
    const auto& table = rest.size() == word.size() ? starts_ : continues_;
    std::size_t length = std::min(rest.size(), longest_);
    for (;; --length) {
      if (length == 0) {
        to.resize(first);
        to.push_back(unknown_);
        return;
      }
      const auto found = table.find(rest.substr(0, length));
      if (found == table.end()) continue;
      to.push_back(found->second);
      break;
    }
    rest.remove_prefix(length);
  }
}

std::vector<std::int32_t> WordPieces::encode(std::string_view text, const std::string& source) const {
  return WordPieceEncoder(*this).encode(text, source);
}

std::vector<std::int32_t> WordPieceEncoder::encode(std::string_view text, const std::string& source) {
  constexpr std::size_t kMostKept = 1 << 20;
  std::vector<std::int32_t> tokens;
  const auto take_word = [&](std::string_view word) {
    key_ = word;
    const auto known = words_.find(key_);
    if (known != words_.end()) {
      tokens.insert(tokens.end(), known->second.begin(), known->second.end());
      return;
    }
    const auto begin = static_cast<std::ptrdiff_t>(tokens.size());
    pieces_.encode_word(word, tokens);
    if (words_.size() < kMostKept) words_.emplace(key_, std::vector(tokens.begin() + begin, tokens.end()));
  };
  pieces_.special().cut(
      text,
      [&](std::string_view part) {
        pieces_.words().for_each_word(part, source, take_word, static_cast<std::size_t>(part.data() - text.data()));
      },
      [&](std::int32_t token) { tokens.push_back(token); });
  return tokens;
}

std::string WordPieces::reads() const {
  const TextRules& rules = words_.rules();
  return fmt::format("{}, {}", rules.lower_case ? "in lower case" : "with capital letters",
                     rules.marks == TextRules::Marks::kKept      ? "with accents"
                     : rules.marks == TextRules::Marks::kLeftOut ? "without accents"
                                                                 : "without accents that no piece has");
}

std::string WordPieces::sha256() const {
  Sha256 hash;
  for (const std::string& piece : pieces_) hash.update(piece + "\n");
  hash.update(reads() + (rules_.split_ideographs ? "\n" : ", ideographs within words\n"));
  for (const std::string& name : rules_.added) hash.update(name + "\n");
  return hash.finish();
}

void UnknownTokens::add(std::span<const std::int32_t> tokens) {
  unknown_ += static_cast<std::uint64_t>(std::ranges::count(tokens, pieces_.unknown()));
  all_ += tokens.size();
}

std::optional<std::string> UnknownTokens::warning(const std::string& source) const {
  if (unknown_ * 5 <= all_) return std::nullopt;
  return fmt::format(
      "{}: {} of {} word pieces are [UNK]: the vocabulary may be that of other texts, or of texts that are not "
      "read {} (--cased yes|no)",
      source, unknown_, all_, pieces_.reads());
}

std::string WordPieces::decode(std::span<const std::int32_t> tokens) const {
  std::string text;
  for (const std::int32_t token : tokens) {
    LOCKSTEP_ASSERT(token >= 0 && token < size(), "token {} of {}", token, size());
    const std::string_view piece = pieces_[static_cast<std::size_t>(token)];
    if (piece.size() > kContinues.size() && piece.starts_with(kContinues)) {
      text += piece.substr(kContinues.size());
    } else {
      if (!text.empty()) text += ' ';
      text += piece;
    }
  }
  return text;
}

}  // namespace lockstep::data
