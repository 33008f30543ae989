#include "data/basic_tokenizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>

#include "base/error.h"

namespace lockstep::data {
namespace {

using Marks = TextRules::Marks;

/// The character at `at`, and how many bytes it has; less than one: there is none.
std::pair<char32_t, utf8proc_ssize_t> character_at(std::string_view text, std::size_t at) {
  utf8proc_int32_t code = 0;
  const auto length = utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()) + at,
                                       static_cast<utf8proc_ssize_t>(text.size() - at), &code);
  return {static_cast<char32_t>(code), length};
}

[[noreturn]] void refuse_byte(const std::string& source, std::size_t byte) {
  throw IoError(fmt::format("{}: byte {} is not UTF-8", source, byte),
                "convert it from the encoding that it has: iconv -f WINDOWS-1252 -t UTF-8, for example");
}

/// `text` with marks and the characters before them composed; nothing where it is not UTF-8.
std::optional<std::string> composed(std::string_view text) {
  utf8proc_uint8_t* bytes = nullptr;
  const auto length =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
                   &bytes, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(bytes, std::free);
  if (length == UTF8PROC_ERROR_NOMEM) throw std::bad_alloc();
  if (length < 0) return std::nullopt;
  return std::string(reinterpret_cast<const char*>(bytes), static_cast<std::size_t>(length));
}

/// Takes characters, and gives words.
class Cutter {
 public:
  Cutter(const TextRules& rules, const BasicTokenizer::Holds& holds, const std::function<void(std::string_view)>& visit)
      : rules_(rules), holds_(holds), visit_(visit) {}

  void add_plain(char letter) {
    put_in_order();
    word_ += letter;
  }

  void add(char32_t code) {
    const CharacterKind kind = kind_of(code);
    if (kind == CharacterKind::kLeftOut) return;
    if (kind == CharacterKind::kBlank) return end_word();
    const bool alone = kind == CharacterKind::kIdeograph && rules_.split_ideographs;
    if (alone) end_word();
    switch (rules_.marks) {
      case Marks::kKept: put_in_case(code); break;
      case Marks::kLeftOut: add_parts(code); break;
      case Marks::kLeftOutUnlessHeld: add_unless_held(code); break;
    }
    if (alone) end_word();
  }

  void end_word() {
    put_in_order();
    if (!word_.empty()) visit_(word_);
    word_.clear();
  }

 private:
  void add_parts(char32_t code) {
    for (const char32_t part : decomposed(code)) {
      if (const int order = combining_class_of(part); order > 0) {
        waiting_.emplace_back(order, part);
        continue;
      }
      const bool mark = kind_of(part) == CharacterKind::kMark;
      // Those that are left out and change places do so among others without a trace.
      if (mark && !stops_reordering(part)) continue;
      put_in_order();
      if (!mark) put_in_case(part);
    }
  }

  void add_unless_held(char32_t code) {
    const char32_t small = rules_.lower_case ? in_lower_case(code) : code;
    if (holds_(small)) return put(small);
    for (const char32_t part : decomposed(code))
      if (kind_of(part) != CharacterKind::kMark || holds_(part)) put_in_case(part);
  }

  static bool stops_reordering(char32_t mark) {
    return utf8proc_get_property(static_cast<utf8proc_int32_t>(mark))->combining_class == 0;
  }

  void put_in_order() {
    if (waiting_.empty()) return;
    std::ranges::stable_sort(waiting_, {}, [](const auto& each) { return each.first; });
    for (const auto& [order, code] : waiting_) put_in_case(code);
    waiting_.clear();
  }

  void put_in_case(char32_t code) {
    if (!rules_.lower_case) return put(code);
    put(in_lower_case(code));
    constexpr char32_t kDottedI = 0x130, kDotAbove = 0x307;
    if (code == kDottedI) put(kDotAbove);  // no other character becomes two
  }

  void put(char32_t code) {
    const CharacterKind kind = kind_of(code);
    if (kind == CharacterKind::kBlank) return end_plain_word();
    const bool alone = kind == CharacterKind::kPunctuation;
    if (alone) end_plain_word();
    std::array<utf8proc_uint8_t, 4> bytes{};
    const auto length = utf8proc_encode_char(static_cast<utf8proc_int32_t>(code), bytes.data());
    word_.append(reinterpret_cast<const char*>(bytes.data()), static_cast<std::size_t>(length));
    if (alone) end_plain_word();
  }

  void end_plain_word() {
    if (!word_.empty()) visit_(word_);
    word_.clear();
  }

  const TextRules& rules_;
  const BasicTokenizer::Holds& holds_;
  const std::function<void(std::string_view)>& visit_;
  std::string word_;
  std::vector<std::pair<int, char32_t>> waiting_;  // to be put in order
};

}  // namespace

void BasicTokenizer::for_each_word(std::string_view text, const std::string& source,
                                   const std::function<void(std::string_view)>& visit, std::size_t offset) const {
  std::string owned;
  if (rules_.marks == Marks::kLeftOutUnlessHeld &&
      !std::ranges::all_of(text, [](char byte) { return static_cast<unsigned char>(byte) < 0x80; }))
    if (auto whole = composed(text)) {
      owned = std::move(*whole);
      text = owned;
    }
  Cutter cutter(rules_, holds_, visit);
  for (std::size_t at = 0; at < text.size();) {
    const char byte = text[at];
    if ((byte >= 'a' && byte <= 'z') || (byte >= '0' && byte <= '9')) {  // most characters of most texts
      cutter.add_plain(byte);
      ++at;
      continue;
    }
    const auto [code, length] = character_at(text, at);
    if (length < 1) refuse_byte(source, offset + at);
    at += static_cast<std::size_t>(length);
    cutter.add(code);
  }
  cutter.end_word();
}

void check_utf8(std::string_view text, const std::string& source) {
  for (std::size_t at = 0; at < text.size();) {
    const auto length = character_at(text, at).second;
    if (length < 1) refuse_byte(source, at);
    at += static_cast<std::size_t>(length);
  }
}

std::optional<std::u32string> characters_of(std::string_view text) {
  std::u32string characters;
  for (std::size_t at = 0; at < text.size();) {
    const auto [code, length] = character_at(text, at);
    if (length < 1) return std::nullopt;
    at += static_cast<std::size_t>(length);
    characters += code;
  }
  return characters;
}

}  // namespace lockstep::data
