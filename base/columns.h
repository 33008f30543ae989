// Text as a terminal shows it, for tables whose frame no name may break. Text is UTF-8.
#pragma once

#include <string>
#include <string_view>

namespace lockstep {

/// `text` as one line that is safe to print: bytes that are no UTF-8, control characters and characters that turn the
/// direction of writing are each replaced by '?'.
std::string printable(std::string_view text);

/// How many columns printable(text) takes: two for East Asian characters, none for combining ones.
int columns_of(std::string_view text);

enum class Keep { kStart, kEnd };

/// printable(text), at most `columns` wide; where that cuts something off, "…" stands for it.
std::string cut_columns(std::string_view text, int columns, Keep keep = Keep::kStart);

}  // namespace lockstep
