// Small text helpers: numbers, sizes, nearest names, and text as a terminal shows it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// Whole-string parses: nothing on trailing characters, overflow or an empty string.
std::optional<std::int64_t> parse_int(std::string_view text);
std::optional<double> parse_double(std::string_view text);

/// "a,b,,c" by ',' → {"a", "b", "", "c"}; an empty text gives one empty piece.
std::vector<std::string> split(std::string_view text, char separator);
/// " a  b\tc" → {"a", "b", "c"}.
std::vector<std::string> words_of(std::string_view text);
std::string_view trim(std::string_view text);
/// ASCII letters alone.
std::string lower_case(std::string text);
/// The first `most_bytes` bytes of `text`, fewer where that would cut a UTF-8 character in two.
std::string_view utf8_prefix(std::string_view text, std::size_t most_bytes);
std::string join(std::span<const std::string> pieces, std::string_view separator);
/// "a", "a and b", "a, b and c".
std::string listed(std::span<const std::string> pieces, std::string_view before_last = "and");

/// The candidate with the smallest edit distance to `word` (insertions, deletions, replacements and swaps of
/// neighbours count 1), if it is near enough to be what was meant.
std::optional<std::string> nearest(std::string_view word, std::span<const std::string> candidates);

/// "12.0 MB": decimal units, for people.
std::string human_bytes(double bytes);

/// `text` as one line that is safe to print: invalid UTF-8, control characters and characters that change the direction
/// of writing are each replaced by '?'.
std::string printable(std::string_view text);

/// printable(text) with a blank for each control character, line feeds among them.
std::string one_line(std::string_view text);

/// How many columns printable(text) takes: two for East Asian characters, none for combining ones.
int columns_of(std::string_view text);

/// `text` in lines of at most so many columns, broken at blanks. Words that are longer than a line stay whole.
std::vector<std::string> wrapped(std::string_view text, int columns);

enum class Keep { kStart, kEnd };

/// printable(text), at most `columns` wide; where that cuts something off, "…" stands for it.
std::string cut_columns(std::string_view text, int columns, Keep keep = Keep::kStart);

}  // namespace lockstep
