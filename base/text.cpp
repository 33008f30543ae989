#include "base/text.h"

#include <fmt/format.h>
#include <locale.h>
#include <wchar.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <numeric>
#include <vector>

namespace lockstep {

namespace {
constexpr const char* kBlanks = " \t\r\n";
}

std::optional<std::int64_t> parse_int(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) return std::nullopt;
  return value;
}

std::optional<double> parse_double(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) return std::nullopt;
  return value;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> pieces;
  while (true) {
    const auto at = text.find(separator);
    pieces.emplace_back(text.substr(0, at));
    if (at == std::string_view::npos) return pieces;
    text.remove_prefix(at + 1);
  }
}

std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  for (std::size_t at = 0; (at = text.find_first_not_of(kBlanks, at)) != text.npos;) {
    const std::size_t end = std::min(text.find_first_of(kBlanks, at), text.size());
    words.emplace_back(text.substr(at, end - at));
    at = end;
  }
  return words;
}

std::string_view trim(std::string_view text) {
  const auto first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

std::string lower_case(std::string text) {
  for (char& c : text)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return text;
}

std::string_view utf8_prefix(std::string_view text, std::size_t most_bytes) {
  if (text.size() <= most_bytes) return text;
  const auto continues = [&](std::size_t at) { return (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80; };
  std::size_t end = most_bytes;
  for (int steps = 0; steps < 3 && end > 0 && continues(end); ++steps) --end;
  // Bytes that are no UTF-8 are cut anywhere.
  return text.substr(0, continues(end) ? most_bytes : end);
}

std::string join(std::span<const std::string> pieces, std::string_view separator) {
  std::string joined;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (i > 0) joined += separator;
    joined += pieces[i];
  }
  return joined;
}

std::string listed(std::span<const std::string> pieces, std::string_view before_last) {
  if (pieces.size() < 2) return join(pieces, "");
  return fmt::format("{} {} {}", join(pieces.first(pieces.size() - 1), ", "), before_last, pieces.back());
}

namespace {

// Optimal string alignment distance, three rows at a time.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  std::iota(last.begin(), last.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replace = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({replace, last[j] + 1, row[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    std::swap(before, last);
    std::swap(last, row);
  }
  return last[b.size()];
}

constexpr const char* kEllipsis = "…";

/// The C library's tables of characters, whatever locale the process is in. Changes the calling thread alone.
class Utf8Locale {
 public:
  Utf8Locale() {
    // Making it reads a file.
    static const locale_t utf8 = ::newlocale(LC_CTYPE_MASK, "C.UTF-8", nullptr);
    if (utf8 != nullptr) before_ = ::uselocale(utf8);
  }
  ~Utf8Locale() {
    if (before_ != nullptr) ::uselocale(before_);
  }
  Utf8Locale(const Utf8Locale&) = delete;
  Utf8Locale& operator=(const Utf8Locale&) = delete;

 private:
  locale_t before_ = nullptr;
};

struct Glyph {
  std::string_view bytes;
  int columns;
};

bool turns_direction(wchar_t character) {
  return (character >= 0x200e && character <= 0x200f) || (character >= 0x202a && character <= 0x202e) ||
         (character >= 0x2066 && character <= 0x2069);
}

std::vector<Glyph> glyphs_of(std::string_view text) {
  const Utf8Locale locale;
  std::vector<Glyph> glyphs;
  while (!text.empty()) {
    mbstate_t state = {};
    wchar_t character = 0;
    const std::size_t size = ::mbrtowc(&character, text.data(), text.size(), &state);
    const bool valid = size != 0 && size <= text.size();  // otherwise NUL, or one of two very large numbers
    const int columns = valid && !turns_direction(character) ? ::wcwidth(character) : -1;
    glyphs.push_back(columns < 0 ? Glyph{"?", 1} : Glyph{text.substr(0, size), columns});
    text.remove_prefix(valid ? size : 1);
  }
  return glyphs;
}

std::string joined(const std::vector<Glyph>& glyphs) {
  std::string text;
  for (const auto& glyph : glyphs) text += glyph.bytes;
  return text;
}

int total_columns(const std::vector<Glyph>& glyphs) {
  return std::accumulate(glyphs.begin(), glyphs.end(), 0,
                         [](int sum, const Glyph& glyph) { return sum + glyph.columns; });
}

}  // namespace

std::optional<std::string> nearest(std::string_view word, std::span<const std::string> candidates) {
  std::optional<std::string> best;
  std::size_t best_distance = std::max<std::size_t>(2, word.size() / 3) + 1;
  for (const auto& candidate : candidates) {
    // A prefix that people stopped typing is nearer than its length says.
    const bool prefix = word.size() >= 3 && candidate.starts_with(word);
    const std::size_t distance = prefix ? 1 : edit_distance(word, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

std::string human_bytes(double bytes) {
  constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB"};
  std::size_t unit = 0;
  while (bytes >= 1000 && unit + 1 < std::size(kUnits)) {
    bytes /= 1000;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, kUnits[unit]);
}

std::string printable(std::string_view text) { return joined(glyphs_of(text)); }

std::string one_line(std::string_view text) {
  std::string line(text);
  std::ranges::replace_if(
      line, [](unsigned char c) { return c < ' ' || c == 0x7f; }, ' ');
  return printable(line);
}

int columns_of(std::string_view text) { return total_columns(glyphs_of(text)); }

std::vector<std::string> wrapped(std::string_view text, int columns) {
  std::vector<std::string> lines = {""};
  for (const auto& word : split(text, ' ')) {
    if (!lines.back().empty() && columns_of(lines.back()) + 1 + columns_of(word) > columns) lines.emplace_back();
    lines.back() += (lines.back().empty() ? "" : " ") + word;
  }
  return lines;
}

std::string cut_columns(std::string_view text, int columns, Keep keep) {
  auto glyphs = glyphs_of(text);
  if (total_columns(glyphs) <= columns) return joined(glyphs);
  if (columns < 1) return "";
  if (keep == Keep::kEnd) std::ranges::reverse(glyphs);
  int taken = 0;
  std::size_t count = 0;
  while (taken + glyphs[count].columns < columns) taken += glyphs[count++].columns;
  glyphs.resize(count);
  if (keep == Keep::kStart) return joined(glyphs) + kEllipsis;
  // A combining character whose base is cut off would sit on the "…".
  while (!glyphs.empty() && glyphs.back().columns == 0) glyphs.pop_back();
  std::ranges::reverse(glyphs);
  return kEllipsis + joined(glyphs);
}

}  // namespace lockstep
