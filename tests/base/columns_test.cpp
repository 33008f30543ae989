#include "base/text.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace lockstep {
namespace {

TEST(Columns, OfWideAndCombiningCharacters) {
  EXPECT_EQ(columns_of(""), 0);
  EXPECT_EQ(columns_of("abc"), 3);
  EXPECT_EQ(columns_of("é"), 1);
  EXPECT_EQ(columns_of("e\u0301"), 1);  // e and a combining accent
  EXPECT_EQ(columns_of("訓練"), 4);
  EXPECT_EQ(columns_of("\xff\xfe"), 2);  // no UTF-8: "??"
}

TEST(Columns, WhatIsNotSafeToPrintIsReplaced) {
  EXPECT_EQ(printable("plain é 訓練"), "plain é 訓練");
  EXPECT_EQ(printable("a\033[2Jb\nc\td\x7f"), "a?[2Jb?c?d?");
  EXPECT_EQ(printable("a\u009b2J\u202ecod.exe"), "a?2J?cod.exe");
  EXPECT_EQ(printable(std::string("a\0b", 3)), "a?b");
  EXPECT_EQ(one_line("a\nb\tc\x7f d\xff é"), "a b c  d? é");
  EXPECT_EQ(printable("a\xe8\xa8"), "a??");  // a character that was cut
  EXPECT_EQ(printable("\xc0\x80|\xed\xa0\x80|\xf8"), "??|???|?");
}

TEST(Columns, TextIsWrappedAtBlanks) {
  EXPECT_EQ(wrapped("one two three", 7), (std::vector<std::string>{"one two", "three"}));
  EXPECT_EQ(wrapped("訓練 ab", 6), (std::vector<std::string>{"訓練", "ab"}));
  EXPECT_EQ(wrapped("a longest b", 4), (std::vector<std::string>{"a", "longest", "b"}));
  EXPECT_EQ(wrapped("", 4), std::vector<std::string>{""});
}

TEST(Columns, CutsAtTheEnd) {
  EXPECT_EQ(cut_columns("abcdef", 6), "abcdef");
  EXPECT_EQ(cut_columns("abcdef", 5), "abcd…");
  EXPECT_EQ(cut_columns("abcdef", 1), "…");
  EXPECT_EQ(cut_columns("abcdef", 0), "");
  EXPECT_EQ(cut_columns("abcdef", -3), "");
  EXPECT_EQ(cut_columns("訓練訓練", 6), "訓練…");
  EXPECT_EQ(cut_columns("訓練訓練", 5), "訓練…");
  EXPECT_EQ(cut_columns("訓練訓練", 4), "訓…");
  EXPECT_EQ(cut_columns("e\u0301e\u0301e\u0301", 2), "e\u0301…");
}

TEST(Columns, CutsAtTheStart) {
  EXPECT_EQ(cut_columns("abcdef", 6, Keep::kEnd), "abcdef");
  EXPECT_EQ(cut_columns("abcdef", 5, Keep::kEnd), "…cdef");
  EXPECT_EQ(cut_columns("訓練訓練", 4, Keep::kEnd), "…練");
  EXPECT_EQ(cut_columns("xe\u0301e\u0301", 2, Keep::kEnd), "…e\u0301");
}

// Every cut of anything fits.
TEST(Columns, NoCutIsWiderThanAsked) {
  const std::string texts[] = {"plain text", "訓練 e\u0301\u0302 訓練", "\xff\xe8\xa8 \033[1m",
                               "\u0301\u0301\u0301abc"};
  for (const auto& text : texts)
    for (int columns = -1; columns < 16; ++columns)
      for (const Keep keep : {Keep::kStart, Keep::kEnd}) {
        const std::string cut = cut_columns(text, columns, keep);
        EXPECT_LE(columns_of(cut), std::max(columns, 0)) << cut;
        EXPECT_EQ(printable(cut), cut);
      }
}

}  // namespace
}  // namespace lockstep
