// The library's error for a program that uses it wrongly.
#pragma once

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <exception>
#include <string>

#include "base/error.h"

namespace lockstep::testing {

/// The refusal of `work`: a UsageError's text and remedy; another error's text, marked; or nothing.
template <class Work>
std::string refusal_of(const Work& work) {
  try {
    work();
  } catch (const UsageError& error) {
    EXPECT_FALSE(error.remedy().empty()) << error.what();
    return error.line();
  } catch (const std::exception& error) {
    return fmt::format("no UsageError: {}", error.what());
  }
  return "";
}

}  // namespace lockstep::testing

/// The statement at the end is refused, and the refusal has `text` in it.
#define EXPECT_REFUSED(text, ...) \
  EXPECT_THAT(lockstep::testing::refusal_of([&] { __VA_ARGS__; }), ::testing::HasSubstr(text))
