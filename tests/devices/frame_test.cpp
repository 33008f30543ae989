#include "devices/frame.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace lockstep::devices {
namespace {

TEST(Frame, RulesJoinTheBordersOfTheirNeighbours) {
  Frame frame(15);
  frame.line({11}, {"title"});
  frame.rule();
  frame.line({1, 7}, {"a", "b"});
  frame.double_rule();
  frame.line({1, 7}, {"1", "2"});
  frame.line({1, 7}, {"3", "4"});
  frame.rule();
  frame.line({4, 4}, {"5", "6"});
  EXPECT_EQ(frame.text(),
            "┌─────────────┐\n"
            "│ title       │\n"
            "├───┬─────────┤\n"
            "│ a │ b       │\n"
            "╞═══╪═════════╡\n"
            "│ 1 │ 2       │\n"
            "│ 3 │ 4       │\n"
            "├───┴──┬──────┤\n"
            "│ 5    │ 6    │\n"
            "└──────┴──────┘\n");
}

TEST(Frame, NoTextBreaksIt) {
  Frame frame(15);
  frame.line({1, 7}, {"aaaa", "訓練訓練訓練"});
  frame.line({1, 7}, {"\n", "a\033[2Jb"});
  EXPECT_EQ(frame.text(),
            "┌───┬─────────┐\n"
            "│ … │ 訓練訓… │\n"
            "│ ? │ a?[2Jb  │\n"
            "└───┴─────────┘\n");
}

TEST(Frame, WantsLinesOfItsWidth) {
  Frame frame(15);
  EXPECT_THROW(frame.line({1, 6}, {"a", "b"}), InternalError);
  EXPECT_THROW(frame.line({1, 7}, {"a"}), InternalError);
  EXPECT_EQ(frame.text(), "");
}

TEST(Spread, PutsBothSidesApart) {
  EXPECT_EQ(spread("ab", "cd", 6), "ab  cd");
  EXPECT_EQ(spread("abcdef", "xy", 6), "ab… xy");
  EXPECT_EQ(spread("abcdef", "", 6), "abcdef");
  EXPECT_EQ(spread("", "xy", 4), "  xy");
  EXPECT_EQ(spread("ab", "vwxyz", 5), "vwxyz");
  EXPECT_EQ(spread("ab", "uvwxyz", 5), "uvwx…");
}

}  // namespace
}  // namespace lockstep::devices
