#include "devices/frame.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::devices {
namespace {

std::string blanks(int count) { return std::string(static_cast<std::size_t>(std::max(count, 0)), ' '); }

/// The character where lines join. `arms` is a sum: 1 left, 2 right, 4 above, 8 below.
const char* junction(unsigned arms, bool doubled) {
  static constexpr std::array<const char*, 16> kSingle = {" ", "─", "─", "─", "│", "┘", "└", "┴",
                                                          "│", "┐", "┌", "┬", "│", "┤", "├", "┼"};
  static constexpr std::array<const char*, 16> kDouble = {" ", "═", "═", "═", "│", "╛", "╘", "╧",
                                                          "│", "╕", "╒", "╤", "│", "╡", "╞", "╪"};
  return doubled ? kDouble[arms] : kSingle[arms];
}

}  // namespace

void Frame::line(const Cells& cells, const std::vector<std::string>& texts) {
  LOCKSTEP_ASSERT(cells.size() == texts.size(), "{} texts for {} cells", texts.size(), cells.size());
  const int width = std::accumulate(cells.begin(), cells.end(), 1, [](int sum, int cell) { return sum + cell + 3; });
  LOCKSTEP_ASSERT(width == columns_, "a line of {} columns in a frame of {}", width, columns_);
  Row row{.text = "│", .borders = {0}};
  for (std::size_t i = 0; i < cells.size(); ++i) {
    row.text += " " + left_in(texts[i], cells[i]) + " │";
    row.borders.push_back(row.borders.back() + cells[i] + 3);
  }
  rows_.push_back(std::move(row));
}

void Frame::rule() { rows_.push_back({.kind = Kind::kRule}); }
void Frame::double_rule() { rows_.push_back({.kind = Kind::kDoubleRule}); }

std::string Frame::drawn_rule(Kind kind, const Row* above, const Row* below) const {
  const auto meets = [](const Row* row, int column) {
    return row != nullptr && std::ranges::find(row->borders, column) != row->borders.end();
  };
  std::string text;
  for (int column = 0; column < columns_; ++column) {
    const unsigned arms = (column > 0 ? 1u : 0u) | (column + 1 < columns_ ? 2u : 0u) |
                          (meets(above, column) ? 4u : 0u) | (meets(below, column) ? 8u : 0u);
    text += junction(arms, kind == Kind::kDoubleRule);
  }
  return text;
}

std::string Frame::text() const {
  if (rows_.empty()) return "";
  std::string text = drawn_rule(Kind::kRule, nullptr, &rows_.front()) + "\n";
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const Row* below = i + 1 < rows_.size() ? &rows_[i + 1] : nullptr;
    text += rows_[i].kind == Kind::kLine ? rows_[i].text
                                         : drawn_rule(rows_[i].kind, i > 0 ? &rows_[i - 1] : nullptr, below);
    text += "\n";
  }
  return text + drawn_rule(Kind::kRule, &rows_.back(), nullptr) + "\n";
}

std::string spread(std::string_view left, std::string_view right, int columns) {
  const std::string end = cut_columns(right, columns);
  const int end_columns = columns_of(end);
  const int room = columns - end_columns - (end_columns > 0 ? 1 : 0);
  return left_in(left, std::max(room, 0)) + blanks(columns - std::max(room, 0) - end_columns) + end;
}

std::string left_in(std::string_view text, int columns) {
  const std::string shown = cut_columns(text, columns);
  return shown + blanks(columns - columns_of(shown));
}

std::string right_in(std::string_view text, int columns) {
  const std::string shown = cut_columns(text, columns);
  return blanks(columns - columns_of(shown)) + shown;
}

}  // namespace lockstep::devices
