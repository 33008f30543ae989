#include "lockstep/nn/io/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>

#include "base/error.h"
#include "base/file.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::nn {
namespace {

using lockstep::testing::read_file;
using lockstep::testing::TemporaryDirectory;
using lockstep::testing::write_file;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto* const data = reinterpret_cast<const std::byte*>(text.data());
  return {data, data + text.size()};
}

std::string length_of(std::uint64_t n) {
  std::string text(8, '\0');
  std::memcpy(text.data(), &n, 8);
  return text;
}

std::string file_of(const std::string& header, const std::string& data = "") {
  return length_of(header.size()) + header + data;
}

class Safetensors : public ::testing::Test {
 protected:
  // The error for a file of this content: it must be an IoError, be one line and name the file.
  std::string refusal(const std::string& content) {
    const std::string path = dir.path("bad.safetensors");
    write_file(path, content);
    return refusal_of(path);
  }
  std::string refusal_of(const std::string& path) {
    try {
      read_safetensors(path);
    } catch (const IoError& error) {
      EXPECT_THAT(error.line(), HasSubstr(path));
      EXPECT_EQ(error.line().find('\n'), std::string::npos);
      return error.line();
    }
    ADD_FAILURE() << "read without an error";
    return "";
  }
  TemporaryDirectory dir;
};

TEST_F(Safetensors, RoundTrip) {
  const std::string path = dir.path("a.safetensors");
  const std::vector<HostTensor> tensors = {
      {"fc.weight", DType::kF32, {2, 3}, bytes_of("012345678901234567890123")},
      {"count", DType::kI64, {}, bytes_of("abcdefgh")},
      {"none", DType::kF32, {0, 7}, {}},
      {"half", DType::kBF16, {1, 1, 3}, bytes_of("xyxyxy")},
      {"odd \"name\" \\ ü", DType::kU8, {3}, bytes_of("uvw")},
      {"d", DType::kF64, {1}, bytes_of("ABCDEFGH")},
      {"i", DType::kI32, {1, 1, 1, 1, 1, 1, 1, 1}, bytes_of("IJKL")},
  };
  write_safetensors(path, tensors, {{"format", "pt"}});
  const auto read = read_safetensors(path);
  ASSERT_EQ(read.size(), tensors.size());
  for (const auto& wanted : tensors) {
    const auto found = std::find_if(read.begin(), read.end(), [&](const auto& t) { return t.name == wanted.name; });
    ASSERT_NE(found, read.end()) << wanted.name;
    EXPECT_EQ(found->dtype, wanted.dtype);
    EXPECT_EQ(found->shape, wanted.shape);
    EXPECT_EQ(found->bytes, wanted.bytes);
  }
  // The data section begins at a multiple of 8.
  std::uint64_t header = 0;
  const std::string content = read_file(path);
  std::memcpy(&header, content.data(), 8);
  EXPECT_EQ(header % 8, 0u);
  EXPECT_EQ(content.size(), 8 + header + 24 + 8 + 6 + 3 + 8 + 4);
  EXPECT_EQ(dir.files(), 1);
}

TEST_F(Safetensors, NoTensors) {
  const std::string path = dir.path("empty.safetensors");
  write_safetensors(path, {});
  EXPECT_TRUE(read_safetensors(path).empty());
  write_file(path, file_of("{}"));
  EXPECT_TRUE(read_safetensors(path).empty());
  write_file(path, file_of(R"({"__metadata__":{"a":"b"}}   )"));
  EXPECT_TRUE(read_safetensors(path).empty());
}

TEST_F(Safetensors, CutAtEveryByte) {
  const std::string path = dir.path("a.safetensors");
  write_safetensors(path, {{"a", DType::kF32, {2}, bytes_of("12345678")}, {"b", DType::kU8, {3}, bytes_of("abc")}});
  const std::string whole = read_file(path);
  for (std::size_t n = 0; n < whole.size(); ++n) {
    SCOPED_TRACE(n);
    refusal(whole.substr(0, n));
  }
  for (std::size_t n = 0; n < 8; ++n) EXPECT_THAT(refusal(whole.substr(0, n)), HasSubstr("inside the header's length"));
  EXPECT_THAT(refusal(whole + "x"), HasSubstr("1 bytes follow the last tensor"));
}

TEST_F(Safetensors, EveryByteOfTheHeaderFlipped) {
  const std::string path = dir.path("a.safetensors");
  write_safetensors(path, {{"a", DType::kF32, {2}, bytes_of("12345678")}, {"b", DType::kU8, {3}, bytes_of("abc")}});
  const std::string whole = read_file(path);
  for (std::size_t i = 0; i < whole.size() - 11; ++i)
    for (const int bit : {1, 16, 128}) {
      std::string bad = whole;
      bad[i] = static_cast<char>(bad[i] ^ bit);
      write_file(path, bad);
      try {
        read_safetensors(path);  // a flipped letter of a name is still a name
      } catch (const IoError& error) {
        EXPECT_THAT(error.what(), HasSubstr(path));
      }
    }
}

TEST_F(Safetensors, HeaderLengthThatLies) {
  const std::string whole = file_of(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", "abcd");
  const auto with_length = [&](std::uint64_t n) { return length_of(n) + whole.substr(8); };
  EXPECT_THAT(refusal(with_length(0)), HasSubstr("not JSON at byte"));
  EXPECT_THAT(refusal(with_length(7)), HasSubstr("not JSON at byte"));
  for (const std::uint64_t n : {std::uint64_t{1000}, std::uint64_t{99'999'999}, std::uint64_t{8} << 30,
                                std::uint64_t{1} << 63, ~std::uint64_t{0}})
    EXPECT_THAT(refusal(with_length(n)), HasSubstr("claim a header of"));
  EXPECT_THAT(refusal(std::string(8, '\0')), HasSubstr("not JSON"));
}

TEST_F(Safetensors, HeadersThatAreNotWhatTheFormatSays) {
  const auto tensor = [](const std::string& entry) { return file_of("{\"a\":" + entry + "}", "abcd"); };
  EXPECT_THAT(refusal(file_of("not json")), HasSubstr("not JSON at byte"));
  EXPECT_THAT(refusal(file_of("{\"a\":")), HasSubstr("not JSON at byte"));
  EXPECT_THAT(refusal(file_of("{} x")), HasSubstr("not JSON at byte"));
  EXPECT_THAT(refusal(file_of("{\"\xff\":1}")), HasSubstr("not JSON at byte"));
  EXPECT_THAT(refusal(file_of("[1,2]")), HasSubstr("not a JSON object"));
  EXPECT_THAT(refusal(file_of("7")), HasSubstr("not a JSON object"));
  EXPECT_THAT(refusal(file_of(std::string(200'000, '['))), HasSubstr("nests deeper"));
  EXPECT_THAT(refusal(tensor(R"({"dtype":"U8","shape":[[4]],"data_offsets":[0,4]})")), HasSubstr("nests deeper"));
  EXPECT_THAT(refusal(tensor("1e999")), HasSubstr("a number that is too large"));
  EXPECT_THAT(refusal(tensor("7")), HasSubstr("tensor 'a' (byte 9) lacks"));
  EXPECT_THAT(refusal(tensor("null")), HasSubstr("tensor 'a' (byte 9) lacks"));
  EXPECT_THAT(refusal(tensor("{}")), HasSubstr("tensor 'a' (byte 9) lacks"));
  EXPECT_THAT(refusal(tensor(R"({"dtype":"U8","shape":[4]})")), HasSubstr("tensor 'a' (byte 9) lacks"));
  EXPECT_THAT(refusal(tensor(R"({"dtype":8,"shape":[4],"data_offsets":[0,4]})")),
              HasSubstr("tensor 'a' (byte 9) lacks"));
  EXPECT_THAT(refusal(tensor(R"({"dtype":"F8","shape":[4],"data_offsets":[0,4]})")),
              HasSubstr("tensor 'a' (byte 9) has the dtype 'F8'"));
  EXPECT_THAT(refusal(tensor(R"({"dtype":"u8","shape":[4],"data_offsets":[0,4]})")), HasSubstr("dtype 'u8'"));
  for (const char* const shape : {"4", "{\"x\":4}", "null", "\"4\""})
    EXPECT_THAT(refusal(tensor(fmt::format(R"({{"dtype":"U8","shape":{},"data_offsets":[0,4]}})", shape))),
                HasSubstr("a shape that is no list"));
  for (const char* const shape :
       {"[-4]", "[4.0]", "[\"4\"]", "[null]", "[18446744073709551616]", "[0,9223372036854775808]"})
    EXPECT_THAT(refusal(tensor(fmt::format(R"({{"dtype":"U8","shape":{},"data_offsets":[0,4]}})", shape))),
                HasSubstr("a shape that is no size"))
        << shape;
  for (const char* const shape :
       {"[5]", "[4294967296,4294967296]", "[9223372036854775807]", "[4,4,4611686018427387904]"})
    EXPECT_THAT(refusal(tensor(fmt::format(R"({{"dtype":"U8","shape":{},"data_offsets":[0,4]}})", shape))),
                HasSubstr("larger than the file"))
        << shape;
  EXPECT_THAT(refusal(tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})")),
              HasSubstr("larger than the file"));
  EXPECT_THAT(refusal(tensor(R"({"dtype":"U8","shape":[3],"data_offsets":[0,4]})")),
              HasSubstr("4 bytes where its shape says 3"));
  for (const char* const offsets : {"[0]", "[0,4,4]", "[-1,4]", "[0.0,4]", "[\"0\",4]"})
    EXPECT_THAT(refusal(tensor(fmt::format(R"({{"dtype":"U8","shape":[4],"data_offsets":{}}})", offsets))),
                HasSubstr("data_offsets that are no offsets"))
        << offsets;
  for (const char* const offsets : {"4", "{}", "{\"a\":0,\"b\":4}"})
    EXPECT_THAT(refusal(tensor(fmt::format(R"({{"dtype":"U8","shape":[4],"data_offsets":{}}})", offsets))),
                HasSubstr("tensor 'a'"))
        << offsets;
  for (const char* const offsets : {"[4,0]", "[0,5]", "[4,8]", "[0,18446744073709551615]", "[18446744073709551612,0]"})
    EXPECT_THAT(refusal(tensor(fmt::format(R"({{"dtype":"U8","shape":[4],"data_offsets":{}}})", offsets))),
                HasSubstr("of 4 data bytes"))
        << offsets;
}

// What a terminal would obey, and what would fill it.
TEST_F(Safetensors, NamesAreShownAsText) {
  const auto lines = [&](const std::string& name, const std::string& dtype) {
    const std::string said =
        refusal(file_of("{\"" + name + R"(":{"dtype":")" + dtype + R"(","shape":[4],"data_offsets":[0,4]}})", "abcd"));
    EXPECT_EQ(said.find_first_of("\n\x1b"), std::string::npos) << said;
    EXPECT_LT(said.size(), 1000u);
    return said;
  };
  EXPECT_THAT(lines("fc\\n\\u001b[2J", "F8"), HasSubstr("has the dtype 'F8'"));
  EXPECT_THAT(lines(std::string(100000, 'x'), "F8"), HasSubstr("has the dtype 'F8'"));
  EXPECT_THAT(lines("a", "\\n" + std::string(100000, 'F')), HasSubstr("tensor 'a'"));
  const std::string twice = "{\"x\\n\":1,\"x\\n\":2}";
  EXPECT_EQ(refusal(file_of(twice)).find('\n'), std::string::npos);
}

TEST_F(Safetensors, TensorsThatOverlapOrLeaveHoles) {
  const auto two = [](const std::string& a, const std::string& b) {
    return file_of(fmt::format(R"({{"a":{{"dtype":"U8","shape":[4],"data_offsets":[{}]}},)"
                               R"("b":{{"dtype":"U8","shape":[2],"data_offsets":[{}]}}}})",
                               a, b),
                   "abcdefgh");
  };
  EXPECT_THAT(refusal(two("0,4", "2,4")), HasSubstr("overlap or hole"));
  EXPECT_THAT(refusal(two("0,4", "5,7")),
              AllOf(HasSubstr("tensor 'b' (byte 61) begins at data byte 5"), HasSubstr("4 was")));
  EXPECT_THAT(refusal(two("1,5", "5,7")), HasSubstr("tensor 'a' (byte 9) begins at data byte 1"));
  EXPECT_THAT(refusal(two("0,4", "4,6")), HasSubstr("2 bytes follow"));
  EXPECT_THAT(refusal(file_of(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                              R"("a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
                              "abcd")),
              HasSubstr("names 'a' twice"));
}

TEST_F(Safetensors, WhatIsNoFile) {
  EXPECT_THAT(refusal_of(dir.path("missing")), HasSubstr("No such file"));
  EXPECT_THAT(refusal_of(dir.path(".")), HasSubstr("is a directory"));
  const std::string pipe = dir.path("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(refusal_of(pipe), HasSubstr("not a regular file"));
}

TEST_F(Safetensors, TwoTensorsOfOneNameAreABug) {
  const std::string path = dir.path("a");
  const HostTensor tensor = {"a", DType::kU8, {1}, bytes_of("x")};
  EXPECT_THROW(write_safetensors(path, {tensor, tensor}), InternalError);
  EXPECT_EQ(dir.files(), 0);
}

TEST_F(Safetensors, AFailedWriteNamesTheFile) {
  try {
    write_safetensors(dir.path("no/such/dir/a"), {});
    FAIL();
  } catch (const IoError& error) {
    EXPECT_THAT(error.line(), HasSubstr(dir.path("no/such/dir/a")));
  }
}

TEST_F(Safetensors, AtomicFilesAreWholeOrNotThere) {
  const std::string path = dir.path("a");
  write_file(path, "old");
  {
    AtomicFile file(path);
    file.write(bytes_of("new and longer"));
    EXPECT_EQ(read_file(path), "old");
    EXPECT_EQ(dir.files(), 2);
  }
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(dir.files(), 1);
  {
    AtomicFile file(path);
    file.write(bytes_of("new and"));
    file.write(bytes_of(" longer"));
    file.commit();
  }
  EXPECT_EQ(read_file(path), "new and longer");
  EXPECT_EQ(dir.files(), 1);
  // A rename that cannot be: the target has become a directory.
  {
    AtomicFile file(dir.path("d"));
    std::filesystem::create_directory(dir.path("d"));
    file.write(bytes_of("x"));
    EXPECT_THROW(file.commit(), IoError);
  }
  EXPECT_EQ(dir.files(), 2);
}

}  // namespace
}  // namespace lockstep::nn
