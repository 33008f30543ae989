// A table in a frame of fixed width, whose rows may have different cells.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::devices {

/// Cells of a row: how many columns each has for its text, between one blank on either side.
using Cells = std::vector<int>;

/// Collects lines and draws them. Text that does not fit its cell is cut, so that no text breaks the frame. Not
/// thread-safe.
class Frame {
 public:
  /// `columns` is the width of the whole, frame included.
  explicit Frame(int columns) : columns_(columns) {}

  /// One line; the cells with their borders must add up to the frame's width. `texts` has one for each cell.
  void line(const Cells& cells, const std::vector<std::string>& texts);
  /// A rule between the lines before and after it.
  void rule();
  /// The rule under headings.
  void double_rule();

  /// The text, each line ended by '\n'.
  std::string text() const;

 private:
  enum class Kind { kLine, kRule, kDoubleRule };
  struct Row {
    Kind kind = Kind::kLine;
    std::string text = {};          // of a line
    std::vector<int> borders = {};  // of a line: columns at which it has one
  };
  std::string drawn_rule(Kind kind, const Row* above, const Row* below) const;

  int columns_;
  std::vector<Row> rows_;
};

/// `left` and `right` at the two ends of `columns` columns; where they do not both fit, `left` is cut.
std::string spread(std::string_view left, std::string_view right, int columns);

/// `text` at the left, or at the right, of `columns` columns; cut where it does not fit.
std::string left_in(std::string_view text, int columns);
std::string right_in(std::string_view text, int columns);

}  // namespace lockstep::devices
