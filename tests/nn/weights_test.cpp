// Weight files of several kinds, and indices of several files.
#include "lockstep/nn/io/weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::nn {
namespace {

using lockstep::testing::TemporaryDirectory;
using lockstep::testing::write_file;
using ::testing::HasSubstr;

HostTensor tensor_of(const std::string& name) { return {name, DType::kU8, {1}, {std::byte{7}}}; }

class Index : public ::testing::Test {
 protected:
  Index() {
    write_safetensors(directory_.path("one.safetensors"), {tensor_of("a"), tensor_of("b")});
    write_safetensors(directory_.path("two.safetensors"), {tensor_of("c")});
  }
  std::vector<HostTensor> read(const std::string& index) {
    write_file(directory_.path("model.safetensors.index.json"), index);
    return read_weights(directory_.path("model.safetensors.index.json"));
  }
  std::string refusal(const std::string& index) {
    try {
      read(index);
    } catch (const IoError& error) {
      return error.what();
    }
    return "nothing was thrown";
  }
  TemporaryDirectory directory_;
};

TEST_F(Index, NamesTheFilesOfAllTensors) {
  const auto all = read(R"({"metadata": {"total_size": 3}, "weight_map": {"a": "one.safetensors",
                            "b": "one.safetensors", "c": "two.safetensors"}})");
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[2].name, "c");
}

TEST_F(Index, WhatDoesNotFitIsNamed) {
  EXPECT_THAT(refusal(""), HasSubstr("not JSON at byte"));
  EXPECT_THAT(refusal("{\"weight_map\": {\"a\": "), HasSubstr("not JSON at byte"));
  EXPECT_THAT(refusal(R"({"weight_map": {"a": 1e999}})"), HasSubstr("a number that is too large"));
  EXPECT_THAT(refusal(R"({"weight_map": {"a": "b", "a": "c"}})"), HasSubstr("names 'a' twice"));
  EXPECT_THAT(refusal("[]"), HasSubstr("no weight_map"));
  EXPECT_THAT(refusal(R"({"weight_map": {"a": 3}})"), HasSubstr("no weight_map"));
  EXPECT_THAT(refusal(R"({"weight_map": {"a": "../one.safetensors"}})"), HasSubstr("no file beside it"));
  EXPECT_THAT(refusal(R"({"weight_map": {"a": "/etc/passwd"}})"), HasSubstr("no file beside it"));
  EXPECT_THAT(refusal(R"({"weight_map": {"a": ".."}})"), HasSubstr("no file beside it"));
  EXPECT_THAT(refusal(R"({"weight_map": {"a": "."}})"), ::testing::Not("nothing was thrown"));
  EXPECT_THAT(refusal(R"({"weight_map": {"a": ""}})"), HasSubstr("no file beside it"));
  EXPECT_THAT(refusal(R"({"weight_map": {"a": "gone.safetensors"}})"), HasSubstr("gone.safetensors"));
  EXPECT_THAT(refusal(R"({"weight_map": {"a": "one.safetensors"}})"), HasSubstr("holds 'b'"));
  EXPECT_THAT(refusal(R"({"weight_map": {"c": "two.safetensors", "d": "two.safetensors"}})"), HasSubstr("1 of its 2"));
  EXPECT_THAT(refusal("{\"weight_map\": " + std::string(100000, '[')), HasSubstr("nests deeper"));
}

}  // namespace
}  // namespace lockstep::nn
