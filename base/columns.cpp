#include "base/columns.h"

#include <locale.h>
#include <wchar.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

namespace lockstep {
namespace {

constexpr const char* kEllipsis = "…";

/// The C library's tables of characters, whatever locale the process is in. Changes the calling thread alone.
class Utf8Locale {
 public:
  Utf8Locale() : locale_(::newlocale(LC_CTYPE_MASK, "C.UTF-8", nullptr)) {
    if (locale_ != nullptr) before_ = ::uselocale(locale_);
  }
  ~Utf8Locale() {
    if (locale_ == nullptr) return;
    ::uselocale(before_);
    ::freelocale(locale_);
  }
  Utf8Locale(const Utf8Locale&) = delete;
  Utf8Locale& operator=(const Utf8Locale&) = delete;

 private:
  locale_t locale_;
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

std::string printable(std::string_view text) { return joined(glyphs_of(text)); }

int columns_of(std::string_view text) { return total_columns(glyphs_of(text)); }

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
