#include "lockstep/data/open.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "base/error.h"
#include "data/built_in.h"
#include "lockstep/data/families.h"
#include "tests/data/idx_files.h"
#include "tests/support/refusal.h"

namespace lockstep::data {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

template <class E>
std::string error_of(const std::string& spec, const OpenOptions& options = {}) {
  return testing::refusal_of<E>([&] { open_data(spec, options); });
}

TEST(OpenRandom, Tokens) {
  const DataSplits data = open_data("random:tokens,50", {.classes = 7, .seed = 3, .context = 9});
  EXPECT_TRUE(data.train->has_tokens());
  EXPECT_EQ(data.train->sample_dims(), std::vector<std::int64_t>{9});
  EXPECT_EQ(data.train->size(), 50u);
  EXPECT_EQ(data.validation->size(), 5u);
  std::vector<std::int32_t> tokens(9), labels(9), again(9);
  std::set<std::int32_t> seen;
  for (std::uint64_t i = 0; i < 50; ++i) {
    data.train->read_tokens(i, tokens, labels);
    EXPECT_TRUE(std::equal(tokens.begin() + 1, tokens.end(), labels.begin()));
    seen.insert(tokens.begin(), tokens.end());
    seen.insert(labels.back());
  }
  EXPECT_EQ(seen, (std::set<std::int32_t>{0, 1, 2, 3, 4, 5, 6}));
  data.train->read_tokens(49, again, labels);
  EXPECT_EQ(tokens, again);
  data.validation->read_tokens(0, again, labels);
  EXPECT_NE(tokens, again);
  EXPECT_EQ(open_data("random:tokens,50").train->classes(), kRandomTokens);
  EXPECT_THAT(error_of<UsageError>("random:tokens,5", {.context = 0}), HasSubstr("--context"));
}

TEST(Open, UnknownNamesGetTheNearest) {
  EXPECT_THAT(error_of<UsageError>("digit"),
              ::testing::StartsWith("unknown data 'digit' → did you mean 'digits'? known data: digits, mnist:DIR, "));
  EXPECT_THAT(error_of<UsageError>("minst:/tmp"), HasSubstr("did you mean 'mnist'?"));
  EXPECT_THAT(error_of<UsageError>("Random:5,10"), HasSubstr("did you mean 'random'?"));
  EXPECT_THAT(error_of<UsageError>("elephant"),
              AllOf(HasSubstr("known data"), ::testing::Not(HasSubstr("did you mean"))));
  error_of<UsageError>("");
  error_of<UsageError>(":");
  error_of<UsageError>("digits:");
  error_of<UsageError>("digits", {.classes = -1});
}

TEST(Open, OptionsOfImagesAreForImages) {
  EXPECT_THAT(error_of<UsageError>("digits", {.settings = {{"augment", false}}}),
              HasSubstr("--augment for the data set digits"));
  EXPECT_THAT(error_of<UsageError>("cifar10:/nowhere", {.settings = {{"image-size", 64}}}), HasSubstr("--image-size"));
  EXPECT_THAT(error_of<UsageError>("random:5,10", {.settings = {{"max-corrupt", 1}}}), HasSubstr("--max-corrupt"));
  EXPECT_THAT(error_of<UsageError>("images:/nowhere", {.settings = {{"image-size", 0}}}),
              HasSubstr("give a number from 1 to"));
  EXPECT_THAT(error_of<UsageError>("images:"), HasSubstr("needs a directory"));
  EXPECT_THAT(error_of<UsageError>("cifar10"), HasSubstr("needs a directory"));
  EXPECT_THAT(error_of<UsageError>("cifar10:/nowhere", {.classes = 9}), HasSubstr("10 classes"));
}

// An argument of a kind that only the family knows is called as the family calls it.
TEST(Open, OwnFamiliesNameTheirArgument) {
  register_dataset({.name = "stream", .argument = "URL", .open = [](const auto&, const auto&, const auto&) {
                      return DataSplits();
                    }});
  for (const char* spec : {"stream", "stream:"})
    EXPECT_EQ(error_of<UsageError>(spec), fmt::format("data '{}' needs URL → write stream:URL", spec));
  EXPECT_THAT(error_of<UsageError>("random"), HasSubstr("needs a shape and a length → write random:SHAPE,LEN"));
}

TEST(OpenRandom, ShapesAndLengths) {
  const DataSplits vectors = open_data("random:5,1000");
  EXPECT_EQ(vectors.train->sample_dims(), (std::vector<std::int64_t>{5}));
  EXPECT_EQ(vectors.train->size(), 1000u);
  EXPECT_EQ(vectors.validation->size(), 100u);
  EXPECT_EQ(vectors.train->classes(), 10);
  const DataSplits images = open_data("random:3x32x40,7", {.classes = 4});
  EXPECT_EQ(images.train->sample_dims(), (std::vector<std::int64_t>{32, 40, 3}));
  EXPECT_EQ(images.validation->size(), 1u);
  EXPECT_EQ(images.validation->classes(), 4);
  EXPECT_EQ(open_data("random:1x1x1,9223372036854775807").train->size(), 9223372036854775807u);
}

TEST(OpenRandom, InvalidOptionsAreRefused) {
  for (const char* spec :
       {"random", "random:", "random:5", "random:5,", "random:,5", "random:5,10,3", "random:0,5", "random:-1,5",
        "random:5,-1", "random:axb,5", "random:5x,5", "random:28x28,5", "random:1x2x3x4,5", "random:5,1e3",
        "random:99999x99999x99999,1", "random:5,9223372036854775808", "random:5,10 "}) {
    EXPECT_THAT(error_of<UsageError>(spec), HasSubstr("data '" + std::string(spec) + "'"));
  }
  EXPECT_THAT(error_of<IoError>("random:5,0"), HasSubstr("empty data set"));
}

std::vector<float> sample(const Dataset& dataset, std::uint64_t index, std::int32_t* label = nullptr) {
  std::vector<float> x(dataset.sample_elements());
  std::int32_t ignored = 0;
  dataset.read(index, x, label != nullptr ? *label : ignored);
  return x;
}

TEST(OpenRandom, SamplesArePureFunctionsOfSeedAndIndex) {
  const auto a = open_data("random:9,100", {.seed = 3}), b = open_data("random:9,100", {.seed = 3});
  const auto other = open_data("random:9,100", {.seed = 4});
  EXPECT_EQ(sample(*a.train, 42), sample(*b.train, 42));
  EXPECT_EQ(sample(*a.validation, 9), sample(*b.validation, 9));
  EXPECT_NE(sample(*a.train, 42), sample(*a.train, 43));
  EXPECT_NE(sample(*a.train, 0), sample(*a.validation, 0));
  EXPECT_NE(sample(*a.train, 42), sample(*other.train, 42));
}

TEST(OpenRandom, BitsNeverChange) {
  const auto data = open_data("random:6,1000", {.seed = 5});
  std::int32_t label = -1;
  const auto train = sample(*data.train, 123, &label);
  EXPECT_EQ(label, 3);
  EXPECT_THAT(train, ::testing::Pointwise(::testing::FloatEq(), {-0.334878588f, 1.10249067f, 0.239897723f, -1.07720805f,
                                                                 -0.750342078f, 0.641787214f}));
  const auto test = sample(*data.validation, 7, &label);
  EXPECT_EQ(label, 1);
  EXPECT_THAT(test, ::testing::Pointwise(::testing::FloatEq(), {-0.811783462f, 0.502203627f, -2.06756411f,
                                                                -0.828595431f, 1.19301275f, -0.921311503f}));
}

TEST(OpenRandom, NumbersAreStandardNormalAndLabelsUniform) {
  const auto data = open_data("random:101,4000", {.classes = 7});
  double n = 0, sum = 0, squares = 0, cubes = 0, fourths = 0, within_one = 0;
  std::vector<double> labels(7, 0.0);
  for (std::uint64_t i = 0; i < 4000; ++i) {
    std::int32_t label = -1;
    for (const float value : sample(*data.train, i, &label)) {
      const double v = static_cast<double>(value);
      n += 1;
      sum += v;
      squares += v * v;
      cubes += v * v * v;
      fourths += v * v * v * v;
      within_one += std::abs(v) < 1;
    }
    labels.at(static_cast<std::size_t>(label)) += 1;
  }
  // Five standard errors each; the seed is fixed.
  EXPECT_NEAR(sum / n, 0, 5 / std::sqrt(n));
  EXPECT_NEAR(squares / n, 1, 5 * std::sqrt(2 / n));
  EXPECT_NEAR(cubes / n, 0, 5 * std::sqrt(15 / n));
  EXPECT_NEAR(fourths / n, 3, 5 * std::sqrt(96 / n));
  EXPECT_NEAR(within_one / n, 0.682689, 5 * std::sqrt(0.22 / n));
  for (const double count : labels) EXPECT_NEAR(count, 4000 / 7.0, 5 * std::sqrt(4000 / 7.0));
}

class OpenMnist : public ::testing::Test {
 protected:
  OpenMnist() { write_all(); }

  void write_all() {
    write_file(directory_.path("train-images-idx3-ubyte"), idx_content({4, 2, 3}, std::string(23, '\0') + "\xff"));
    write_file(directory_.path("train-labels-idx1-ubyte"), idx_content({4}, std::string("\x00\x09\x02\x03", 4)));
    write_file(directory_.path("t10k-images-idx3-ubyte"), idx_content({2, 2, 3}, std::string(12, 'a')));
    write_file(directory_.path("t10k-labels-idx1-ubyte"), idx_content({2}, std::string("\x05\x06", 2)));
  }
  std::string spec() const { return "mnist:" + directory_.path().string(); }

  TemporaryDirectory directory_;
};

TEST_F(OpenMnist, ReadsAndNormalises) {
  const DataSplits mnist = open_data(spec());
  EXPECT_EQ(mnist.train->size(), 4u);
  EXPECT_EQ(mnist.validation->size(), 2u);
  EXPECT_EQ(mnist.train->sample_dims(), (std::vector<std::int64_t>{2, 3, 1}));
  std::int32_t label = -1;
  EXPECT_FLOAT_EQ(sample(*mnist.train, 1, &label)[0], -0.1307f / 0.3081f);
  EXPECT_EQ(label, 9);
  const auto last = sample(*mnist.train, 3, &label);
  EXPECT_FLOAT_EQ(last[5], (1 - 0.1307f) / 0.3081f);
  EXPECT_FLOAT_EQ(last[4], -0.1307f / 0.3081f);
  EXPECT_EQ(label, 3);
  EXPECT_FLOAT_EQ(sample(*mnist.validation, 1)[0], ('a' / 255.0f - 0.1307f) / 0.3081f);
}

TEST_F(OpenMnist, TakesCompressedFilesAndDottedNames) {
  std::filesystem::remove(directory_.path("train-images-idx3-ubyte"));
  write_file(directory_.path("train-images.idx3-ubyte.gz"), gzip(idx_content({4, 2, 3}, std::string(24, '\1'))));
  std::filesystem::rename(directory_.path("t10k-labels-idx1-ubyte"), directory_.path("t10k-labels.idx1-ubyte"));
  EXPECT_EQ(open_data(spec()).train->size(), 4u);
}

TEST_F(OpenMnist, NamesWhatIsMissing) {
  EXPECT_THAT(error_of<UsageError>("mnist"), HasSubstr("needs a directory"));
  EXPECT_THAT(error_of<UsageError>("mnist:"), HasSubstr("needs a directory"));
  EXPECT_THAT(error_of<IoError>("mnist:/no/such/place"), HasSubstr("/no/such/place: "));
  EXPECT_THAT(error_of<IoError>("mnist:~/mnist"), HasSubstr("$HOME"));
  EXPECT_THAT(error_of<IoError>("mnist:" + directory_.path("t10k-labels-idx1-ubyte")), HasSubstr("not a directory"));
  for (const char* name :
       {"train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"}) {
    write_all();
    std::filesystem::remove(directory_.path(name));
    EXPECT_THAT(error_of<IoError>(spec()), HasSubstr(directory_.path(name) + ": missing"));
  }
}

TEST_F(OpenMnist, NamesWhatDoesNotFit) {
  write_file(directory_.path("train-labels-idx1-ubyte"), idx_content({3}, "abc"));
  EXPECT_THAT(error_of<IoError>(spec()), AllOf(HasSubstr("4 images"), HasSubstr("3 labels")));

  write_all();
  EXPECT_EQ(error_of<IoError>(spec(), {.classes = 9}),
            directory_.path("train-labels-idx1-ubyte") +
                ": label 9 of sample 1 (byte 9) is out of range for 9 classes → repair the file, or give the number of "
                "classes (--classes)");
  EXPECT_EQ(open_data(spec(), {.classes = 300}).validation->classes(), 300);

  write_file(directory_.path("t10k-images-idx3-ubyte"), idx_content({2, 3, 2}, std::string(12, 'a')));
  EXPECT_THAT(error_of<IoError>(spec()), HasSubstr("training images are 2×3 but test images are 3×2"));

  write_all();
  write_file(directory_.path("t10k-images-idx3-ubyte"), idx_content({0, 2, 3}, ""));
  EXPECT_THAT(error_of<IoError>(spec()), HasSubstr("t10k-images-idx3-ubyte: it holds 0 samples"));

  write_all();
  std::filesystem::copy_file(directory_.path("t10k-labels-idx1-ubyte"), directory_.path("t10k-images-idx3-ubyte"),
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_THAT(error_of<IoError>(spec()), HasSubstr("the number of dimensions (byte 3) is 1, not 3"));
}

}  // namespace
}  // namespace lockstep::data
