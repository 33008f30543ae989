// JSON that others wrote, and what we write.
#include "base/json_value.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "tests/support/refusal.h"

namespace lockstep {
namespace {

std::string complaint(const std::string& text, int deepest = 3) {
  const std::string nothing = "nothing was thrown";
  const auto said = testing::what_of<JsonError>([&] { static_cast<void>(parse_json(text, deepest)); }, nothing);
  EXPECT_EQ(testing::what_of<JsonError>([&] { static_cast<void>(parse_ordered_json(text, deepest)); }, nothing), said);
  return said;
}

TEST(Json, IsRead) {
  EXPECT_EQ(parse_json(R"({"b": [1, 2], "a": "x"})", 2).dump(), R"({"a":"x","b":[1,2]})");
  EXPECT_EQ(parse_ordered_json(R"({"b": [1, 2], "a": "x"})", 2).dump(), R"({"b":[1,2],"a":"x"})");
  EXPECT_EQ(parse_json(" 7 ", 0), 7);
}

TEST(Json, ParseErrorsNameTheirPosition) {
  EXPECT_EQ(complaint(""), "is not JSON at byte 1");
  EXPECT_EQ(complaint("[1, x]"), "is not JSON at byte 5");
  EXPECT_EQ(complaint("{\"\xff\": 1}"), "is not JSON at byte 3");
  EXPECT_EQ(complaint("{} {}"), "is not JSON at byte 4");
  EXPECT_STREQ(testing::thrown<JsonError>([&] { static_cast<void>(parse_json("x", 0, /*offset=*/8)); }).what(),
               "is not JSON at byte 9");
}

TEST(Json, NumbersOutsideTheRangeOfDouble) {
  EXPECT_EQ(complaint("[1e308, -1e308, 18446744073709551616]"), "nothing was thrown");
  EXPECT_EQ(complaint("[1e309]"), "has a number that is too large before byte 7");
  EXPECT_EQ(complaint("{\"a\": -1e309}"), "has a number that is too large before byte 13");
}

TEST(Json, Depth) {
  EXPECT_EQ(complaint("[[[7]]]", 3), "nothing was thrown");
  EXPECT_EQ(complaint("[[[7]]]", 2), "nests deeper than 2 levels at byte 5");
  EXPECT_EQ(complaint(std::string(200'000, '['), 3), "nests deeper than 3 levels at byte 5");
}

TEST(Json, DuplicateKeysAreRefused) {
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

TEST(JsonMembers, NameWhatIsWrongAndItsPlace) {
  const std::string text =
      R"({"text": "x", "whole": 7, "number": -0.5, "list": [1, 2.5], "objects": [{"a": 1}, {"a": "b"}], "texts": {"b": "1", "a": "2"}, "mixed": {"b": 1}, "none": []})";
  const JsonMembers object(text, 3, "file, line 3", "write it anew");
  EXPECT_TRUE(object.has("text", "x"));
  EXPECT_FALSE(object.has("text", "y") || object.has("whole", "7") || object.has("gone", "x"));
  EXPECT_EQ(object.text("text"), "x");
  EXPECT_EQ(object.whole("whole", 7, 7), 7u);
  EXPECT_EQ(object.number("number"), -0.5);
  EXPECT_EQ(object.number("number", -0.5, 0), -0.5);
  EXPECT_EQ(object.positive("whole"), 7);
  EXPECT_EQ(object.numbers("list", 2, 1, 3), (std::vector<double>{1, 2.5}));
  EXPECT_EQ(object.objects("objects", 2).front().whole("a", 1), 1u);
  using Texts = std::vector<std::pair<std::string, std::string>>;
  EXPECT_EQ(object.texts("texts"), (Texts{{"a", "2"}, {"b", "1"}}));
  EXPECT_EQ(OrderedJsonMembers(text, 3, "file", "write it anew").texts("texts"), (Texts{{"b", "1"}, {"a", "2"}}));
  const auto refusal = [&](auto&& ask) {
    const auto error = testing::thrown<IoError>([&] { ask(object); });
    EXPECT_EQ(error.remedy(), "write it anew");
    return std::string(error.what());
  };
  using M = const JsonMembers&;
  EXPECT_EQ(refusal([](M m) { m.text("gone"); }), "file, line 3: 'gone' is missing");
  EXPECT_EQ(refusal([](M m) { m.text("whole"); }), "file, line 3: 'whole' is no text");
  EXPECT_EQ(refusal([](M m) { m.whole("whole", 8); }), "file, line 3: 'whole' is no whole number from 8 on");
  EXPECT_EQ(refusal([](M m) { m.whole("number", 1, 6); }), "file, line 3: 'number' is no whole number from 1 to 6");
  EXPECT_EQ(refusal([](M m) { m.number("text"); }), "file, line 3: 'text' is no number");
  EXPECT_EQ(refusal([](M m) { m.number("number", 0, 1e9); }), "file, line 3: 'number' is no number from 0 to 1e+09");
  EXPECT_EQ(refusal([](M m) { m.positive("number"); }), "file, line 3: 'number' is no number above 0");
  EXPECT_EQ(refusal([](M m) { m.numbers("list", 1, 0, 3); }), "file, line 3: 'list' is no list of 1 to 1 numbers");
  EXPECT_EQ(refusal([](M m) { m.numbers("list", 2, 0, 2); }), "file, line 3: 'list' is no number from 0 to 2");
  EXPECT_EQ(refusal([](M m) { m.objects("none", 9); }), "file, line 3: 'none' is no list of 1 to 9 objects");
  EXPECT_EQ(refusal([](M m) { m.objects("list", 9); }), "file, line 3: 'list' holds what is no object");
  EXPECT_EQ(refusal([](M m) { m.objects("objects", 2)[1].whole("a", 1); }),
            "file, line 3: 'a' is no whole number from 1 on");
  EXPECT_EQ(refusal([](M m) { m.texts("list"); }), "file, line 3: 'list' is no object");
  EXPECT_EQ(refusal([](M m) { m.texts("mixed"); }), "file, line 3: 'b' of 'mixed' is no text");
  EXPECT_EQ(refusal([](M) { JsonMembers("{", 2, "file", "write it anew"); }), "file: is not JSON at byte 2");
  EXPECT_EQ(refusal([](M) { JsonMembers("7", 2, "file", "write it anew"); }), "file: is no object");
}

struct Pair {
  std::string name;
  std::optional<double> value;
  void members(auto& io) { io("name", name, "value", value); }
};

struct Pairs {
  int count = 0;
  std::vector<Pair> pairs;
  std::vector<std::int64_t> numbers;
  void members(auto& io) { io("count", count, "pairs", pairs, "numbers", numbers); }
};

TEST(JsonMembers, OfOurStructsAreReadAsTheyWereWritten) {
  const Pairs written = {
      .count = -2, .pairs = {{"a", 0.5}, {"\"", std::nullopt}}, .numbers = {1, std::int64_t{1} << 60}};
  const std::string text = members_as_json(written).text();
  EXPECT_EQ(text, R"({"count":-2,"pairs":[{"name":"a","value":0.5},{"name":"\"","value":null}],)"
                  R"("numbers":[1,1152921504606846976]})");
  EXPECT_EQ(members_as_json(members_from_json<Pairs>(parse_json(text, 3))).text(), text);
  EXPECT_EQ(members_as_json(std::vector<Pair>()).text(), "[]");
  EXPECT_THROW(static_cast<void>(members_from_json<Pair>(parse_json(R"({"name": "a"})", 1))),
               nlohmann::json::exception);
}

TEST(JsonText, OfValues) {
  EXPECT_EQ(JsonText(nullptr).text(), "null");
  EXPECT_EQ(JsonText(true).text(), "true");
  EXPECT_EQ(JsonText(-7).text(), "-7");
  EXPECT_EQ(JsonText(std::numeric_limits<std::uint64_t>::max()).text(), "18446744073709551615");
  EXPECT_EQ(JsonText("a\"b\n\x01").text(), R"("a\"b\n\u0001")");
  EXPECT_EQ(JsonText(std::string("\xff!")).text(), "\"\xef\xbf\xbd!\"") << "no UTF-8";
  EXPECT_EQ(JsonText(std::optional<int>()).text(), "null");
  EXPECT_EQ(JsonText(std::optional<std::string>("x")).text(), R"("x")");
  EXPECT_EQ(JsonText(std::vector<int>()).text(), "[]");
  EXPECT_EQ(JsonText(std::vector<std::string>{"a", "b"}).text(), R"(["a","b"])");
  for (const double value : {0.0, -0.0, 1.0, 0.1, 1e-9, 1e300, 123456789.125, 2.0 / 3})
    EXPECT_EQ(parse_json(JsonText(value).text(), 0), value) << value;
  EXPECT_EQ(JsonText(3.0).text(), "3.0") << "a number with a fraction stays one";
  EXPECT_EQ(JsonText(std::nan("")).text(), "null");
  EXPECT_EQ(JsonText(INFINITY).text(), "null");
}

TEST(JsonText, OfObjects) {
  EXPECT_EQ(JsonObject().text(), "{}");
  JsonObject object = {{"z", 1}, {"a \"b\"", "x"}};
  object.add("list", std::vector<JsonText>{JsonText(1), JsonObject{{"in", nullptr}}});
  EXPECT_EQ(object.text(), R"({"z":1,"a \"b\"":"x","list":[1,{"in":null}]})");
  EXPECT_EQ(JsonText(object).text(), object.text());
}

}  // namespace
}  // namespace lockstep
