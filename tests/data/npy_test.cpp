// npy:X.npy,Y.npy: arrays as numpy.save() writes them, and what is refused.
#include "data/npy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "base/error.h"
#include "data/file_list.h"
#include "tests/support/refusal.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// As numpy.save() writes it (NEP 1): the data begin at a multiple of 64 bytes.
std::string npy(const std::string& type, const std::string& shape, const std::string& data,
                const char* order = "False") {
  std::string header = fmt::format("{{'descr': '{}', 'fortran_order': {}, 'shape': {}, }}", type, order, shape);
  header.resize((10 + header.size()) / 64 * 64 + 64 - 10 - 1, ' ');
  header += '\n';
  return std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(header.size() & 0xff) +
         static_cast<char>(header.size() >> 8) + header + data;
}

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

template <class T>
std::vector<T> counted(std::size_t count) {
  std::vector<T> values;
  for (std::size_t i = 0; i < count; ++i) values.push_back(static_cast<T>(i));
  return values;
}

class Npy : public ::testing::Test {
 protected:
  DataSplits open(const std::string& x, const std::string& y, const Settings& settings = {},
                  OpenOptions options = {}) const {
    options.settings = settings;
    return open_data(fmt::format("npy:{},{}", directory_.write("x.npy", x), directory_.write("y.npy", y)), options);
  }
  DataSplits whole(const std::string& x, const std::string& y, const Settings& settings = {}) const {
    return open(x, y, settings, {.parts = {.whole = true}});
  }
  std::string error(const std::string& x, const std::string& y, const Settings& settings = {}) const {
    return testing::refusal_of<Error>([&] { whole(x, y, settings); });
  }
  static std::vector<float> numbers_of(const Dataset& dataset, std::uint64_t i) {
    std::vector<float> x(dataset.sample_elements()), targets(dataset.targets_per_sample());
    std::vector<std::int32_t> labels(dataset.targets_per_sample());
    dataset.read_sample(i, {.x = x, .tokens = {}, .labels = labels, .targets = targets});
    return x;
  }

  testing::TemporaryDirectory directory_;
  const std::string labels_ = npy("<i8", "(2,)", bytes_of<std::int64_t>({1, 0}));
};

TEST_F(Npy, ReadsAllTypesOfNumbers) {
  const std::vector<float> expected = {3, 4, 5};
  const auto second = [&](const std::string& type, const std::string& data) {
    return numbers_of(*whole(npy(type, "(2, 3)", data), labels_).whole, 1);
  };
  EXPECT_EQ(second("<f4", bytes_of(counted<float>(6))), expected);
  EXPECT_EQ(second("<f8", bytes_of(counted<double>(6))), expected);
  EXPECT_EQ(second("<i2", bytes_of(counted<std::int16_t>(6))), expected);
  EXPECT_EQ(second("<i4", bytes_of(counted<std::int32_t>(6))), expected);
  EXPECT_EQ(second("<i8", bytes_of(counted<std::int64_t>(6))), expected);
  EXPECT_EQ(second("|i1", bytes_of(counted<std::int8_t>(6))), expected);
  EXPECT_EQ(second("<f2", bytes_of<std::uint16_t>({0, 0, 0, 0x4200, 0x4400, 0x4500})), expected);
  EXPECT_THAT(second("|u1", bytes_of<std::uint8_t>({0, 0, 0, 0, 51, 255})), ElementsAre(0.0f, 0.2f, 1.0f));
  EXPECT_THAT(second("|b1", bytes_of<std::uint8_t>({0, 0, 0, 1, 0, 1})), ElementsAre(1.0f, 0.0f, 1.0f));
}

TEST_F(Npy, ShapesAreVectorsOrImages) {
  const auto dims = [&](const std::string& shape, std::size_t count, const Settings& settings = {}) {
    return whole(npy("<f4", shape, bytes_of(counted<float>(count))), labels_, settings).whole->sample_dims();
  };
  EXPECT_THAT(dims("(2,)", 2), ElementsAre(1));
  EXPECT_THAT(dims("(2, 5)", 10), ElementsAre(5));
  EXPECT_THAT(dims("(2, 4, 5)", 40), ElementsAre(4, 5, 1));
  EXPECT_THAT(dims("(2, 4, 5, 3)", 120), ElementsAre(4, 5, 3));
  EXPECT_THAT(dims("(2, 3, 4, 5)", 120, {{"channels", "first"}}), ElementsAre(4, 5, 3));
  EXPECT_THAT(dims("(2, 3, 4, 5)", 120, {{"channels", "last"}}), ElementsAre(3, 4, 5));
  const auto first = whole(npy("<f4", "(2, 2, 1, 3)", bytes_of(counted<float>(12))), labels_, {{"channels", "first"}});
  EXPECT_THAT(numbers_of(*first.whole, 1), ElementsAre(6, 9, 7, 10, 8, 11));
}

TEST_F(Npy, TargetsAreClassesOrNumbers) {
  const std::string x = npy("<f4", "(2, 1)", bytes_of(counted<float>(2)));
  const auto classes = whole(x, labels_).whole;
  EXPECT_EQ(classes->classes(), 2);
  EXPECT_THAT(classes->info().class_counts, ElementsAre(1, 1));
  EXPECT_THAT(classes->target_dims(), IsEmpty());
  const auto numbers = whole(x, npy("<f8", "(2,)", bytes_of<double>({0.5, 2}))).whole;
  EXPECT_TRUE(numbers->has_numeric_targets());
  EXPECT_THAT(numbers->target_dims(), ElementsAre(1));
  const auto two = whole(x, npy("<f4", "(2, 2)", bytes_of<float>({1, 2, 3, 4}))).whole;
  EXPECT_THAT(two->target_dims(), ElementsAre(2));
  std::vector<float> none(1), targets(2);
  two->read_sample(1, {.x = none, .tokens = {}, .labels = {}, .targets = targets});
  EXPECT_THAT(targets, ElementsAre(3, 4));
}

TEST_F(Npy, OneOfTenIsHeldOut) {
  const auto splits =
      open(npy("<f4", "(30,)", bytes_of(counted<float>(30))), npy("<i8", "(30,)", bytes_of(counted<std::int64_t>(30))));
  EXPECT_EQ(splits.train->size(), 27u);
  ASSERT_EQ(splits.validation->size(), 3u);
  for (std::uint64_t i = 0; i < 3; ++i) {
    const float row = numbers_of(*splits.validation, i)[0];
    EXPECT_TRUE(is_held_out(static_cast<std::uint64_t>(row)));
  }
}

TEST_F(Npy, RefusesWhatIsNoArrayOfNumbers) {
  const std::string x = npy("<f4", "(2, 1)", bytes_of(counted<float>(2)));
  EXPECT_THAT(error("", labels_), HasSubstr("it is no NumPy array"));
  EXPECT_THAT(error("PK\x03\x04 and so on", labels_), HasSubstr("an archive of arrays"));
  EXPECT_THAT(error(x.substr(0, 40), labels_), HasSubstr("in its header"));
  EXPECT_THAT(error(x.substr(0, x.size() - 1), labels_), HasSubstr("it has 7 bytes of data"));
  EXPECT_THAT(error(x + "!", labels_), HasSubstr("it has 9 bytes of data"));
  EXPECT_THAT(error(npy(">f4", "(2, 1)", bytes_of(counted<float>(2))), labels_), HasSubstr("type '>f4'"));
  EXPECT_THAT(error(npy("<f4", "(2, 1)", bytes_of(counted<float>(2)), "True"), labels_), HasSubstr("Fortran's order"));
  EXPECT_THAT(error(npy("<f4", "()", bytes_of(counted<float>(1))), labels_), HasSubstr("it has no rows"));
  EXPECT_THAT(error(npy("<f4", "(0, 3)", ""), labels_), HasSubstr("it has no rows"));
  EXPECT_THAT(error(npy("<f4", "(2, 0)", ""), labels_), HasSubstr("no numbers"));
  EXPECT_THAT(error(npy("<f4", "(4611686018427387904, 9)", ""), labels_), HasSubstr("says another number"));
  EXPECT_THAT(error(npy("<f4", "(2, x)", ""), labels_), HasSubstr("shape that is none"));
  std::string other = x;
  other[6] = 9;
  EXPECT_THAT(error(other, labels_), HasSubstr("version 9"));
}

TEST_F(Npy, RefusesPairsThatAreNone) {
  const std::string x = npy("<f4", "(2, 1)", bytes_of(counted<float>(2)));
  EXPECT_THAT(error(x, npy("<i8", "(3,)", bytes_of(counted<std::int64_t>(3)))), HasSubstr("has 2 rows, and"));
  EXPECT_THAT(error(x, npy("<i8", "(2,)", bytes_of<std::int64_t>({0, -1}))),
              HasSubstr("row 1 has -1, which is no class"));
  EXPECT_THAT(error(x, npy("<i8", "(2,)", bytes_of<std::int64_t>({0, 1L << 40}))), HasSubstr("which is no class"));
  EXPECT_THAT(error(x, npy("<f4", "(2,)", bytes_of<float>({0, std::nanf("")}))),
              HasSubstr("row 1 has a target that is not"));
  EXPECT_THAT(error(x, labels_, {{"channels", "first"}}), HasSubstr("leave it out"));
  EXPECT_THAT(error(npy("<f4", "(2, 3, 4, 5)", bytes_of(counted<float>(120))), labels_),
              HasSubstr("channels seem to be first"));
  EXPECT_THAT(testing::refusal_of<Error>([] { open_data("npy:x.npy"); }), HasSubstr("names no two files"));
}

/// As safetensors.torch.save_file() writes them: the data after the header, in its order.
std::string safetensors(const std::string& entries, const std::string& data) {
  const std::string header = "{" + entries + "}";
  const std::uint64_t length = header.size();
  return bytes_of<std::uint64_t>({length}) + header + data;
}

TEST_F(Npy, TensorsOfSafetensorsAreArraysToo) {
  const std::string x = "\"x\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}",
                    y = "\"y\":{\"dtype\":\"I64\",\"shape\":[2],\"data_offsets\":[24,40]}",
                    more = "\"__metadata__\":{\"format\":\"pt\"}",
                    data = bytes_of(counted<float>(6)) + bytes_of<std::int64_t>({1, 0});
  const std::string both = directory_.write("both.safetensors", safetensors(x + "," + more + "," + y, data));
  const std::string alone = directory_.write("alone.safetensors", safetensors(x, bytes_of(counted<float>(6))));
  const std::string labels = directory_.write("y.npy", labels_);
  OpenOptions options = {.parts = {.whole = true}};
  for (const std::string& spec : {fmt::format("npy:{0}:x,{0}:y", both), fmt::format("npy:{},{}", alone, labels)}) {
    const auto whole = open_data(spec, options).whole;
    EXPECT_THAT(numbers_of(*whole, 1), ElementsAre(3, 4, 5));
    EXPECT_EQ(whole->classes(), 2);
  }
  const auto fails = [&](const std::string& name, const std::string& content, const std::string& why) {
    const std::string path = directory_.write("bad.safetensors", content);
    EXPECT_THAT(testing::refusal_of<Error>([&] { ArrayFile{path + name}; }), HasSubstr(why));
  };
  fails("", safetensors(x + "," + y, data), "it has 2 tensors → name one of them");
  fails(":z", safetensors(x, data), "it has no tensor 'z'");
  fails("", safetensors(x, data.substr(0, 20)), "lies outside of it");
  fails("", safetensors("\"x\":{\"dtype\":\"F32\",\"shape\":[2,4],\"data_offsets\":[0,24]}", data),
        "its header says another");
  fails("", safetensors("\"x\":{\"dtype\":\"C64\",\"shape\":[3],\"data_offsets\":[0,24]}", data), "of type C64");
  fails("", safetensors("\"x\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,24]}", data), "has no shape");
  fails("", safetensors("\"x\":{\"dtype\":\"F32\",\"data_offsets\":[0,24]}", data), "lacks a tensor's type");
  fails("", safetensors("\"x\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[24,0]}", data), "lies outside of it");
  fails("", safetensors("\"x\":", ""), "its header");
  fails("", bytes_of<std::uint64_t>({1ULL << 60}), "its header is too long");
  fails("", "", "in its header");
  // bf16 and half: what NumPy has no type for, and what both have.
  const std::string bf16 = directory_.write(
      "bf16.safetensors", safetensors("\"x\":{\"dtype\":\"BF16\",\"shape\":[2,1],\"data_offsets\":[0,4]}",
                                      bytes_of<std::uint16_t>({0x3f80, 0xc020})));
  EXPECT_THAT(numbers_of(*open_data(fmt::format("npy:{},{}", bf16, labels), options).whole, 1), ElementsAre(-2.5f));
}

}  // namespace
}  // namespace lockstep::data
