// What a call throws: the library's error for a program that uses it wrongly, and any other.
#pragma once

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "base/error.h"

namespace lockstep::testing {

/// The refusal of `work`: the text and remedy of a UsageError, or of another E; another error's text, marked; or
/// nothing.
template <class E = UsageError, class Work>
std::string refusal_of(const Work& work) {
  try {
    work();
  } catch (const E& error) {
    EXPECT_FALSE(error.remedy().empty()) << error.what();
    EXPECT_EQ(error.line().find('\n'), std::string::npos) << error.line();
    return error.line();
  } catch (const std::exception& error) {
    return fmt::format("no {}: {}", std::is_same_v<E, UsageError> ? "UsageError" : "such error", error.what());
  }
  return "";
}

/// The E that `work` throws. Where it throws nothing, or another exception, the test fails and ends.
template <class E, class Work>
E thrown(const Work& work) {
  try {
    work();
  } catch (const E& error) {
    return error;
  }
  throw std::logic_error("nothing was thrown");
}

/// The text of the E that `work` throws; `otherwise` if it throws nothing. With its remedy: line_of().
template <class E, class Work>
std::string what_of(const Work& work, const std::string& otherwise = "") {
  try {
    work();
  } catch (const E& error) {
    return error.what();
  }
  return otherwise;
}
template <class E, class Work>
std::string line_of(const Work& work, const std::string& otherwise = "") {
  try {
    work();
  } catch (const E& error) {
    return error.line();
  }
  return otherwise;
}

}  // namespace lockstep::testing

/// The statement at the end is refused, and the refusal has `text` in it.
#define EXPECT_REFUSED(text, ...) \
  EXPECT_THAT(lockstep::testing::refusal_of([&] { __VA_ARGS__; }), ::testing::HasSubstr(text))

/// The statement at the end throws an `E` whose text has `text` in it.
#define EXPECT_THROWN(E, text, ...) \
  EXPECT_THAT(lockstep::testing::thrown<E>([&] { __VA_ARGS__; }).what(), ::testing::HasSubstr(text))
