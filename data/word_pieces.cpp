#include "data/word_pieces.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/text.h"

namespace lockstep::data {
namespace {

constexpr std::size_t kMostPieces = 1 << 24;
constexpr std::size_t kMostWordCharacters = 100;
constexpr std::string_view kContinues = "##";

bool is_punctuation(utf8proc_int32_t code) {
  // All signs of ASCII count, also those that Unicode calls symbols: "$", "+", "^", …
  if (code < 0x80)
    return (code >= '!' && code <= '/') || (code >= ':' && code <= '@') || (code >= '[' && code <= '`') ||
           (code >= '{' && code <= '~');
  switch (utf8proc_category(code)) {
    case UTF8PROC_CATEGORY_PC:
    case UTF8PROC_CATEGORY_PD:
    case UTF8PROC_CATEGORY_PS:
    case UTF8PROC_CATEGORY_PE:
    case UTF8PROC_CATEGORY_PI:
    case UTF8PROC_CATEGORY_PF:
    case UTF8PROC_CATEGORY_PO: return true;
    default: return false;
  }
}

bool is_blank(utf8proc_int32_t code) {
  return code == ' ' || code == '\t' || code == '\n' || code == '\r' ||
         (code >= 0x80 && utf8proc_category(code) == UTF8PROC_CATEGORY_ZS);
}

bool is_left_out(utf8proc_int32_t code) {
  if (code == 0 || code == 0xFFFD) return true;
  switch (utf8proc_category(code)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN: return true;
    default: return false;
  }
}

// The blocks of CJK ideographs that BERT's tokenizer takes for words of their own.
bool is_chinese(utf8proc_int32_t code) {
  constexpr std::array<std::pair<utf8proc_int32_t, utf8proc_int32_t>, 8> kBlocks = {{{0x4E00, 0x9FFF},
                                                                                     {0x3400, 0x4DBF},
                                                                                     {0x20000, 0x2A6DF},
                                                                                     {0x2A700, 0x2B73F},
                                                                                     {0x2B740, 0x2B81F},
                                                                                     {0x2B820, 0x2CEAF},
                                                                                     {0xF900, 0xFAFF},
                                                                                     {0x2F800, 0x2FA1F}}};
  return code >= 0x3400 && std::ranges::any_of(kBlocks, [code](const auto& block) {
           return code >= block.first && code <= block.second;
         });
}

void append(std::string& text, utf8proc_int32_t code) {
  std::array<utf8proc_uint8_t, 4> bytes{};
  const auto length = utf8proc_encode_char(code, bytes.data());
  text.append(reinterpret_cast<const char*>(bytes.data()), static_cast<std::size_t>(length));
}

// Appends `code` in lower case and without accents.
void append_plain(std::string& text, utf8proc_int32_t code) {
  if (code < 0x80) {
    text += static_cast<char>(code >= 'A' && code <= 'Z' ? code - 'A' + 'a' : code);
    return;
  }
  std::array<utf8proc_int32_t, 24> parts{};  // no character has more
  int last_class = 0;
  const auto count = utf8proc_decompose_char(code, parts.data(), static_cast<utf8proc_ssize_t>(parts.size()),
                                             UTF8PROC_DECOMPOSE, &last_class);
  for (utf8proc_ssize_t i = 0; i < std::min<utf8proc_ssize_t>(count, static_cast<utf8proc_ssize_t>(parts.size()));
       ++i) {
    const utf8proc_int32_t part = parts[static_cast<std::size_t>(i)];
    if (utf8proc_category(part) != UTF8PROC_CATEGORY_MN) append(text, utf8proc_tolower(part));
  }
}

std::size_t characters_of(std::string_view text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0u) != 0x80u; }));
}

bool is_special(std::string_view piece) { return piece.starts_with('[') && piece.ends_with(']'); }

bool has_capital(std::string_view piece) {
  const auto* at = reinterpret_cast<const utf8proc_uint8_t*>(piece.data());
  auto left = static_cast<utf8proc_ssize_t>(piece.size());
  utf8proc_int32_t code = 0;
  while (left > 0) {
    const auto length = utf8proc_iterate(at, left, &code);
    if (length <= 0) return false;
    if (utf8proc_category(code) == UTF8PROC_CATEGORY_LU) return true;
    at += length;
    left -= length;
  }
  return false;
}

}  // namespace

void for_each_word(std::string_view text, bool cased, const std::string& source,
                   const std::function<void(std::string_view)>& visit) {
  std::string word;
  const auto end_word = [&] {
    if (!word.empty()) visit(word);
    word.clear();
  };
  const auto* const bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  for (std::size_t at = 0; at < text.size();) {
    utf8proc_int32_t code = 0;
    const auto length = utf8proc_iterate(bytes + at, static_cast<utf8proc_ssize_t>(text.size() - at), &code);
    if (length <= 0)
      throw IoError(fmt::format("{}: byte {} is not UTF-8", source, at), "convert the file: iconv -t UTF-8");
    at += static_cast<std::size_t>(length);
    if (is_blank(code)) {
      end_word();
    } else if (code >= ' ' && code < 0x7f && !is_punctuation(code)) {  // most characters of most texts
      word += cased || code < 'A' || code > 'Z' ? static_cast<char>(code) : static_cast<char>(code - 'A' + 'a');
    } else if (is_left_out(code)) {
      continue;
    } else if (is_punctuation(code) || is_chinese(code)) {
      end_word();
      if (cased)
        append(word, code);
      else
        append_plain(word, code);
      end_word();
    } else if (cased) {
      append(word, code);
    } else {
      append_plain(word, code);
    }
  }
  end_word();
}

WordPieces::WordPieces(std::vector<std::string> pieces, const std::string& source) : pieces_(std::move(pieces)) {
  const auto refuse = [&](const std::string& why) {
    throw IoError(fmt::format("{} is not a usable vocabulary: {}", source, why), "take the vocab.txt of a BERT");
  };
  if (pieces_.size() > kMostPieces) refuse(fmt::format("it has more than {} pieces", kMostPieces));
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const std::string_view piece = pieces_[i];
    const bool continues = piece.size() > kContinues.size() && piece.starts_with(kContinues);
    const std::string_view key = continues ? piece.substr(kContinues.size()) : piece;
    if (!(continues ? continues_ : starts_).emplace(key, static_cast<std::int32_t>(i)).second)
      refuse(fmt::format("line {}, '{}', is there twice", i + 1, printable(utf8_prefix(piece, 40))));
    longest_ = std::max(longest_, key.size());
    cased_ = cased_ || (!is_special(piece) && has_capital(piece));
  }
  const auto special = [&](const char* name) {
    const auto found = starts_.find(name);
    if (found == starts_.end()) refuse(fmt::format("it has no {}", name));
    return found->second;
  };
  padding_ = special("[PAD]");
  unknown_ = special("[UNK]");
  start_ = special("[CLS]");
  separator_ = special("[SEP]");
  mask_ = special("[MASK]");
}

std::shared_ptr<const WordPieces> WordPieces::read(const std::string& path) {
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
  return std::make_shared<const WordPieces>(std::move(pieces), path);
}

void WordPieces::encode_word(std::string_view word, std::vector<std::int32_t>& to) const {
  if (characters_of(word) > kMostWordCharacters) {
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
  for_each_word(text, pieces_.cased(), source, [&](std::string_view word) {
    key_ = word;
    const auto known = words_.find(key_);
    if (known != words_.end()) {
      tokens.insert(tokens.end(), known->second.begin(), known->second.end());
      return;
    }
    const auto begin = static_cast<std::ptrdiff_t>(tokens.size());
    pieces_.encode_word(word, tokens);
    if (words_.size() < kMostKept) words_.emplace(key_, std::vector(tokens.begin() + begin, tokens.end()));
  });
  return tokens;
}

std::string WordPieces::sha256() const {
  Sha256 hash;
  for (const std::string& piece : pieces_) hash.update(piece + "\n");
  return hash.finish();
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
