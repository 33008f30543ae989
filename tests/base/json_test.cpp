// JSON that others wrote.
#include "base/json.h"

#include <gtest/gtest.h>

#include <string>

namespace lockstep {
namespace {

std::string complaint(const std::string& text, int deepest = 3) {
  std::string said = "nothing was thrown", ordered = said;
  try {
    static_cast<void>(parse_json(text, deepest));
  } catch (const JsonError& error) {
    said = error.what();
  }
  try {
    static_cast<void>(parse_ordered_json(text, deepest));
  } catch (const JsonError& error) {
    ordered = error.what();
  }
  EXPECT_EQ(said, ordered);
  return said;
}

TEST(Json, IsRead) {
  EXPECT_EQ(parse_json(R"({"b": [1, 2], "a": "x"})", 2).dump(), R"({"a":"x","b":[1,2]})");
  EXPECT_EQ(parse_ordered_json(R"({"b": [1, 2], "a": "x"})", 2).dump(), R"({"b":[1,2],"a":"x"})");
  EXPECT_EQ(parse_json(" 7 ", 0), 7);
}

TEST(Json, WhatIsNoneIsToldWithItsPlace) {
  EXPECT_EQ(complaint(""), "is not JSON at byte 1");
  EXPECT_EQ(complaint("[1, x]"), "is not JSON at byte 5");
  EXPECT_EQ(complaint("{\"\xff\": 1}"), "is not JSON at byte 3");
  EXPECT_EQ(complaint("{} {}"), "is not JSON at byte 4");
  try {
    static_cast<void>(parse_json("x", 0, /*offset=*/8));
    FAIL();
  } catch (const JsonError& error) {
    EXPECT_STREQ(error.what(), "is not JSON at byte 9");
  }
}

TEST(Json, NumbersThatNoDoubleHolds) {
  EXPECT_EQ(complaint("[1e308, -1e308, 18446744073709551616]"), "nothing was thrown");
  EXPECT_EQ(complaint("[1e309]"), "has a number that is too large before byte 7");
  EXPECT_EQ(complaint("{\"a\": -1e309}"), "has a number that is too large before byte 13");
}

TEST(Json, Depth) {
  EXPECT_EQ(complaint("[[[7]]]", 3), "nothing was thrown");
  EXPECT_EQ(complaint("[[[7]]]", 2), "nests deeper than 2 levels at byte 5");
  EXPECT_EQ(complaint(std::string(200'000, '['), 3), "nests deeper than 3 levels at byte 5");
}

TEST(Json, KeysComeOnce) {
  EXPECT_EQ(complaint(R"({"a": 1, "b": 2, "a": 3})"), "names 'a' twice, again before byte 20");
  EXPECT_EQ(complaint(R"({"a": {"b": 1}, "c": [{"b": 1}, {"b": 2}]})"), "nothing was thrown");
  EXPECT_EQ(complaint(R"({"a": {"b": 1}, "c": {"b": 1, "b": 1}})"), "names 'b' twice, again before byte 33");
  EXPECT_EQ(complaint(R"({"a": {"a": 1}, "b": [[{"c": 1}]], "b": 0})", 5), "names 'b' twice, again before byte 38");
}

TEST(Json, WholeNumbers) {
  const auto whole = [](const char* text) { return whole_number(parse_json(text, 1), 100); };
  EXPECT_EQ(whole("0"), 0u);
  EXPECT_EQ(whole("100"), 100u);
  for (const char* text : {"101", "-1", "1.0", "1e1", "1.6e120", "18446744073709551616", "\"1\"", "null", "[1]"})
    EXPECT_EQ(whole(text), std::nullopt) << text;
}

}  // namespace
}  // namespace lockstep
