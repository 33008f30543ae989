#include "data/vocabulary.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::data {
namespace {

constexpr const char* kReplacement = "\xEF\xBF\xBD";

/// How far `text` goes that may be, or is, one character: `length` bytes, of which `valid` are right so far.
struct Start {
  std::size_t length = 0;  // 0: no character starts so
  std::size_t valid = 0;
};

Start look(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return {1, 1};
  if (first < 0xC2 || first > 0xF4) return {0, 1};
  const std::size_t length = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  // The second byte reveals overlong forms, halves of UTF-16 pairs, and values beyond the last character.
  const unsigned char low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const unsigned char high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  std::size_t valid = 1;
  while (valid < length && valid < text.size()) {
    const unsigned char next = byte(valid);
    if (valid == 1 ? next < low || next > high : (next & 0xC0) != 0x80) return {0, valid};
    ++valid;
  }
  return {length, valid};
}

}  // namespace

std::vector<std::int32_t> TokenNumbers::encode(std::string_view text, const std::string& source) const {
  std::vector<std::int32_t> tokens;
  constexpr std::string_view kBetween = " ,\t\r\n";
  std::size_t at = 0;
  while ((at = text.find_first_not_of(kBetween, at)) != std::string_view::npos) {
    const std::size_t end = std::min(text.find_first_of(kBetween, at), text.size());
    const auto number = parse_int(text.substr(at, end - at));
    if (!number || *number < 0 || *number >= size_)
      throw IoError(fmt::format("{}: '{}' at byte {} is no token of the model's {}", source,
                                utf8_prefix(text.substr(at, end - at), 40), at, size_),
                    "write tokens as numbers, or give the vocabulary: --vocab vocab.json --merges merges.txt");
    tokens.push_back(static_cast<std::int32_t>(*number));
    at = end;
  }
  return tokens;
}

std::string TokenNumbers::decode(std::span<const std::int32_t> tokens) const {
  std::string text;
  for (const std::int32_t token : tokens) text += fmt::format(" {}", token);
  return text;
}

std::string Utf8Joiner::add(std::string_view bytes) {
  held_ += bytes;
  std::string whole;
  std::size_t at = 0;
  while (at < held_.size()) {
    const Start start = look(std::string_view(held_).substr(at));
    if (start.length > start.valid) break;  // more may come
    if (start.length == 0)
      whole += kReplacement;
    else
      whole.append(held_, at, start.length);
    at += start.valid;
  }
  held_.erase(0, at);
  return whole;
}

std::string Utf8Joiner::finish() {
  if (held_.empty()) return {};
  held_.clear();
  return kReplacement;
}

}  // namespace lockstep::data
