// Directories of images: whole ones, odd ones and corrupt ones.
#include "data/images.h"
#include "data/class_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "base/error.h"
#include "base/log.h"
#include "data/class_report.h"
#include "lockstep/data/families.h"
#include "lockstep/data/loader.h"
#include "tests/data/golden.h"
#include "tests/data/idx_files.h"
#include "tests/support/refusal.h"

namespace lockstep::data {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class ImagesTest : public ::testing::Test {
 protected:
  // Copies a golden image to DIR/name; another `fill` is another file.
  void put(const std::string& name, const std::string& golden = "rgb.png") {
    fs::create_directories(fs::path(directory_.path(name)).parent_path());
    fs::copy_file(golden::kDirectory / golden, directory_.path(name), fs::copy_options::overwrite_existing);
  }
  void put_text(const std::string& name, const std::string& content) {
    fs::create_directories(fs::path(directory_.path(name)).parent_path());
    write_file(directory_.path(name), content);
  }
  // Ten a class.
  void put_classes(const std::vector<std::string>& classes, const std::string& within = "") {
    for (const std::string& name : classes)
      for (int i = 0; i < 10; ++i)
        put(fmt::format("{}{}/{}.{}", within, name, i, i % 2 == 0 ? "png" : "jpg"),
            i % 2 == 0 ? "rgb.png" : "rgb420.jpg");
  }
  DataSplits open(OpenOptions options = {}) const {
    if (!options.settings.has(kImageSize)) options.settings.set(kImageSize, 8);
    return open_data("images:" + directory_.path().string(), options);
  }
  template <class E = IoError>
  std::string error(const OpenOptions& options = {}) const {
    return testing::refusal_of<E>([&] { open(options); });
  }
  static std::vector<float> read(const Dataset& dataset, std::uint64_t index, std::int32_t* label = nullptr) {
    std::vector<float> x(dataset.sample_elements());
    std::int32_t ignored = 0;
    dataset.read(index, x, label != nullptr ? *label : ignored);
    return x;
  }

  TemporaryDirectory directory_;
};

TEST_F(ImagesTest, RandAugmentChangesTheBytesOfAugmentedSamples) {
  put_classes({"a", "b"});
  const auto plain = open().train, changed = open({.settings = {{"randaugment", {3, 20}}}}).train;
  std::vector<float> x(plain->sample_elements()), y(x.size()), wanted(x.size());
  std::int32_t label = -1;
  PixelChanger changer;
  for (std::uint64_t draw = 0; draw < 20; ++draw) {
    plain->read_augmented(draw % 18, draw, x, label);
    changed->read_augmented(draw % 18, draw, y, label);
    std::vector<std::uint8_t> bytes;
    for (std::size_t i = 0; i < x.size(); ++i)
      bytes.push_back(
          static_cast<std::uint8_t>(std::lround((x[i] * kImageNet.std[i % 3] + kImageNet.mean[i % 3]) * 255)));
    changer.apply({.count = 3, .bin = 20}, draw, bytes, {8, 8});
    normalise(bytes, kImageNet, wanted);
    ASSERT_EQ(y, wanted) << draw;
  }
  EXPECT_EQ(read(*plain, 3), read(*changed, 3));
}

// The next whole image takes a corrupt partner's place, with its label.
TEST_F(ImagesTest, SamplesAreMixedWithWholeImages) {
  put_classes({"a", "b"});
  for (int i = 0; i < 9; ++i) put_text(fmt::format("a/{}.{}", i, i % 2 == 0 ? "png" : "jpg"), "no image");
  const auto train = open({.settings = {{"mixup", 1.0}}}).train;
  Loader loader(train, sampler::DistributedSampler({.length = 18, .seed = 1, .global_batch = 18}, 0, 1),
                {.workers = 2});
  for (int epoch = 0; epoch < 3; ++epoch) {
    const Batch& batch = loader.next();
    ASSERT_EQ(batch.targets.size(), 36u);
    for (std::size_t i = 0; i < 18; ++i) EXPECT_NEAR(batch.targets[2 * i] + batch.targets[2 * i + 1], 1, 1e-6);
  }
  EXPECT_GE(train->corrupt(), 8u);
}

TEST_F(ImagesTest, EveryTenthIsForValidation) {
  put_classes({"b", "a", "c"});
  const DataSplits splits = open();
  EXPECT_EQ(splits.train->size(), 27u);
  EXPECT_EQ(splits.validation->size(), 3u);
  EXPECT_EQ(splits.train->classes(), 3);
  EXPECT_EQ(splits.train->sample_dims(), (std::vector<std::int64_t>{8, 8, 3}));
  std::int32_t label = -1;
  for (std::uint64_t i = 0; i < 27; ++i) {
    read(*splits.train, i, &label);
    EXPECT_EQ(label, static_cast<int>(i / 9));
  }
  for (std::uint64_t i = 0; i < 3; ++i) {
    read(*splits.validation, i, &label);
    EXPECT_EQ(label, static_cast<int>(i));
  }
  EXPECT_EQ(open({.classes = 5}).train->classes(), 5);
  EXPECT_THAT(error<UsageError>({.classes = 2}), AllOf(HasSubstr("--classes 2"), HasSubstr("3 folders")));
  EXPECT_EQ(open({.settings = {{"image-size", 224}}}).train->sample_elements(), 224u * 224 * 3);
}

TEST_F(ImagesTest, TrainAndValAreFoundAndLabelledAlike) {
  put_classes({"ant", "bee", "cow"}, "train/");
  put("val/cow/1.png");
  put("val/ant/1.png");
  const DataSplits splits = open();
  EXPECT_EQ(splits.train->size(), 30u);
  EXPECT_EQ(splits.validation->size(), 2u);
  std::int32_t label = -1;
  read(*splits.validation, 0, &label);
  EXPECT_EQ(label, 0);
  read(*splits.validation, 1, &label);
  EXPECT_EQ(label, 2);
  put("val/dog/1.png");
  EXPECT_THAT(error(), AllOf(HasSubstr("val/dog"), HasSubstr("no such class")));
  fs::remove_all(directory_.path("val"));
  EXPECT_THAT(error(), HasSubstr("neither classes nor the parts"));
  fs::create_directory(directory_.path("test"));
  EXPECT_THAT(error(), HasSubstr("(test, train)"));
  EXPECT_THAT(testing::thrown<IoError>([&] { open(); }).remedy(),
              AllOf(HasSubstr("rename the part to validate on to val"), HasSubstr("/train: then every tenth image")));
}

TEST_F(ImagesTest, WholeAndTestParts) {
  put("some/ant/1.png");
  put("some/bee/1.png");
  const std::string some = "images:" + directory_.path("some");
  const DataSplits whole = open_data(some, {.parts = {.whole = true}});
  EXPECT_EQ(whole.train, nullptr);
  EXPECT_EQ(whole.whole->size(), 2u);
  EXPECT_EQ(whole.whole->name(), "images " + directory_.path("some"));
  std::int32_t label = -1;
  const DataSplits known = open_data(some, {.parts = {.whole = true, .class_names = {"cow", "bee", "ant"}}});
  read(*known.whole, 0, &label);
  EXPECT_EQ(label, 2);
  EXPECT_EQ(known.whole->classes(), 3);
  EXPECT_THROW(open_data(some, {.parts = {.whole = true, .class_names = {"ant", "cow"}}}), UsageError);

  put_classes({"ant", "bee"}, "d/train/");
  put("d/val/bee/1.png");
  put("d/test/bee/1.png");
  put("d/test/bee/2.png");
  const std::string divided = "images:" + directory_.path("d");
  EXPECT_EQ(open_data(divided).test, nullptr);
  const DataSplits all = open_data(divided, {.parts = {.whole = true, .test = true}});
  EXPECT_EQ(all.whole, nullptr);
  EXPECT_EQ(all.test->size(), 2u);
  const auto joined = concatenate({all.train, all.validation, all.test}, "all");
  EXPECT_EQ(joined->size(), 23u);
  for (const auto& [index, wanted] : std::map<std::uint64_t, int>{{0, 0}, {19, 1}, {20, 1}, {22, 1}}) {
    std::vector<float> x(joined->sample_elements());
    joined->read_sample(index, {.x = x, .tokens = {}, .labels = std::span(&label, 1), .targets = {}});
    EXPECT_EQ(label, wanted) << index;
  }
}

TEST_F(ImagesTest, ReportsWhatWasFound) {
  put_classes({"ant", "bee"}, "d/train/");
  put("d/train/bee/more.png");
  put("d/val/bee/1.png");
  const auto splits = open_data("images:" + directory_.path("d"));
  EXPECT_EQ(samples_text(*splits.train), "21 samples of 2 classes: ant 10, bee 11");
  EXPECT_THAT(class_doubts(splits), ElementsAre(AllOf(HasSubstr("validation has no sample of 'ant'"))));
  // A folder one level too high.
  put_classes({"ant", "bee"}, "high/photos/");
  EXPECT_THAT(class_doubts(open_data("images:" + directory_.path("high"))),
              ElementsAre(HasSubstr("are of one class, 'photos'")));
  put_classes({"1", "1.0"}, "numbers/");
  EXPECT_THAT(class_doubts(open_data("images:" + directory_.path("numbers"))),
              ElementsAre(HasSubstr("the classes '1' and '1.0', which are one number")));
  put_classes({"ant", "bee"}, "fine/");
  EXPECT_THAT(class_doubts(open_data("images:" + directory_.path("fine"))), IsEmpty());
  EXPECT_EQ(samples_text(*open_data("digits").train), "1437 samples of 10 classes");
  EXPECT_EQ(samples_text(*open_data("random:tokens,30", {.context = 4}).train), "30 samples");
}

TEST_F(ImagesTest, AClassThatIsALinkToNowhereIsNamed) {
  put_classes({"ant", "bee"});
  fs::create_directory_symlink("/nowhere", directory_.path("cow"));
  EXPECT_THAT(error(), AllOf(HasSubstr("cow"), HasSubstr("a link to nowhere")));
}

TEST_F(ImagesTest, FoldersWithinAndLinksAreFollowedAndHiddenOnesAreNot) {
  put_classes({"a"});
  put("a/deep/er/x.JPEG", "rgb420.jpg");
  put(".ipynb_checkpoints/x.png");
  put("a/._9.png");
  put_text("a/readme.txt", "no image");
  put("elsewhere.d/y.png");
  fs::rename(directory_.path("elsewhere.d"), directory_.path(".elsewhere"));
  fs::create_directory_symlink(directory_.path(".elsewhere"), directory_.path("linked"));
  const DataSplits splits = open();
  EXPECT_EQ(splits.train->size() + splits.validation->size(), 12u);
  EXPECT_EQ(splits.train->classes(), 2);
  fs::create_directory_symlink(directory_.path("a"), directory_.path("a/deep/loop"));
  EXPECT_THAT(error(), HasSubstr("contains itself"));
}

TEST_F(ImagesTest, DirectoriesThatAreNoDataSet) {
  EXPECT_THAT(error(), HasSubstr("no folders"));
  put("x.png");
  EXPECT_THAT(error(), HasSubstr("holds images, but no folders"));
  put_classes({"a", "b"});
  fs::create_directory(directory_.path("empty"));
  EXPECT_THAT(error(), AllOf(HasSubstr("/empty"), HasSubstr("no images")));
  put_text("empty/x.webp", "RIFF");
  EXPECT_THAT(error(), AllOf(HasSubstr("no JPEG or PNG"), HasSubstr("x.webp")));
  fs::remove_all(directory_.path("empty"));
  fs::remove_all(directory_.path("b"));
  for (int i = 1; i < 10; ++i) fs::remove(directory_.path(fmt::format("a/{}.{}", i, i % 2 == 0 ? "png" : "jpg")));
  EXPECT_THAT(error(), HasSubstr("1 images are too few"));
  EXPECT_THROW(open_data("images:" + directory_.path("x.png")), IoError);
  EXPECT_THROW(open_data("images:" + directory_.path("nowhere")), IoError);
  if (::geteuid() != 0) {
    ::chmod(directory_.path("a").c_str(), 0);
    EXPECT_THAT(error(), HasSubstr("Permission denied"));
    ::chmod(directory_.path("a").c_str(), 0700);
  }
}

TEST_F(ImagesTest, CorruptFilesAreNamedOnceAndReplaced) {
  put_classes({"a", "b"});
  put_text("a/3.jpg", "no image at all");
  put_text("a/4.png", golden::read(golden::kDirectory / "rgb.png").substr(0, 300));
  fs::remove(directory_.path("a/5.jpg"));
  fs::create_symlink("/nowhere", directory_.path("a/5.jpg"));
  ASSERT_EQ(::mkfifo(directory_.path("b/90.png").c_str(), 0600), 0);
  const DataSplits splits = open();
  ASSERT_EQ(splits.train->size(), 19u);
  const auto whole = read(*splits.train, 6);
  ::testing::internal::CaptureStderr();
  for (int again = 0; again < 2; ++again) {
    for (std::uint64_t i = 3; i < 6; ++i) EXPECT_EQ(read(*splits.train, i), whole);
    std::int32_t label = -1;
    EXPECT_EQ(read(*splits.train, 18, &label), read(*splits.train, 0));  // the first one follows the last
    EXPECT_EQ(label, 0);
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(splits.train->corrupt(), 4u);
  EXPECT_EQ(splits.validation->corrupt(), 0u);
  EXPECT_THAT(said, AllOf(HasSubstr("a/3.jpg: it starts as neither"), HasSubstr("a/4.png: "),
                          HasSubstr("a/5.jpg: No such file"), HasSubstr("b/90.png: not a regular file")));
  EXPECT_EQ(std::ranges::count(said, '\n'), 4) << said;
}

TEST_F(ImagesTest, TooManyCorruptFilesAreAnError) {
  put_classes({"a", "b"});
  for (int i = 0; i < 8; i += 2) put_text(fmt::format("a/{}.png", i), "corrupt");
  const DataSplits splits = open({.settings = {{"max-corrupt", 3}}});
  for (std::uint64_t i = 0; i < 6; ++i) EXPECT_NO_THROW(read(*splits.train, i)) << i;
  EXPECT_THAT(testing::thrown<IoError>([&] { read(*splits.train, 6); }).line(),
              AllOf(HasSubstr("4 images are corrupt"), HasSubstr("a/6.png"), HasSubstr("--max-corrupt 3")));
  EXPECT_NO_THROW(read(*open({.settings = {{"max-corrupt", 4}}}).train, 6));
}

TEST_F(ImagesTest, OnlyCorruptFilesAreAnError) {
  for (int i = 0; i < 20; ++i) put_text(fmt::format("a/{}.png", i), "corrupt\n");
  const DataSplits splits = open();
  for (int again = 0; again < 2; ++again) EXPECT_THROWN(IoError, "none of its 18 images", read(*splits.train, 5));
}

// Batches of some ranks, put together in the order of the epoch: samples by index.
std::map<std::uint64_t, std::vector<float>> epoch_of(const std::shared_ptr<const Dataset>& dataset, int world,
                                                     sampler::SamplerState from, int workers) {
  std::map<std::uint64_t, std::vector<float>> samples;
  for (int rank = 0; rank < world; ++rank) {
    sampler::SamplerConfig config{.length = dataset->size(), .seed = 3, .global_batch = 6};
    sampler::DistributedSampler sampler(config, rank, world);
    sampler.restore(from);
    Loader loader(dataset, sampler, {.workers = workers});
    for (bool last = false; !last; sampler.advance()) {
      const Batch& batch = loader.next();
      std::vector<std::uint64_t> indices(batch.count);
      sampler.indices(batch.plan, indices);
      for (std::size_t i = 0; i < indices.size(); ++i) {
        const auto x = batch.x.subspan(i * dataset->sample_elements(), dataset->sample_elements());
        samples[indices[i]].assign(x.begin(), x.end());
      }
      last = batch.plan.last_of_epoch;
    }
  }
  return samples;
}

TEST_F(ImagesTest, AugmentationIsTheSameOnAnyNumberOfRanksAndAfterAResume) {
  put_classes({"a", "b"});
  const auto train = open().train;
  const auto alone = epoch_of(train, 1, {}, 0);
  ASSERT_EQ(alone.size(), 18u);
  EXPECT_EQ(epoch_of(train, 3, {}, 2), alone);
  const auto next = epoch_of(train, 1, {.epoch = 1, .cursor = 0}, 1);
  EXPECT_EQ(epoch_of(train, 2, {.epoch = 1, .cursor = 0}, 1), next);
  int changed = 0, plain = 0;
  for (const auto& [index, x] : next) {
    changed += x != alone.at(index);
    plain += x == read(*train, index);
  }
  EXPECT_GE(changed, 17);
  EXPECT_LE(plain, 1);
  for (const auto& [index, x] : epoch_of(train, 2, {.epoch = 1, .cursor = 6}, 1)) EXPECT_EQ(x, next.at(index));
  // Two samples of the same file's bytes are changed apart.
  EXPECT_NE(alone.at(0), alone.at(2));
}

TEST_F(ImagesTest, WithoutAugmentationTrainingReadsAsEvaluationDoes) {
  put_classes({"a", "b"});
  const auto train = open({.settings = {{"augment", false}}}).train;
  for (const auto& [index, x] : epoch_of(train, 2, {}, 1)) EXPECT_EQ(x, read(*train, index));
}

TEST_F(ImagesTest, EvaluationLoadersReadPlainly) {
  put_classes({"a", "b"});
  const auto train = open().train;
  Loader loader(train, sampler::Slice{0, 18}, 18, {.workers = 0});
  const Batch& batch = loader.next();
  for (std::size_t i = 0; i < 18; ++i) {
    const auto x = batch.x.subspan(i * train->sample_elements(), train->sample_elements());
    EXPECT_EQ(std::vector<float>(x.begin(), x.end()), read(*train, i));
  }
}

TEST_F(ImagesTest, FilesMayBeCalledAnything) {
  put_classes({"a"});
  put("a/new\nline.png");
  put_text("a/z\x1b[31m.png", "corrupt");
  const DataSplits splits = open();
  ::testing::internal::CaptureStderr();
  for (std::uint64_t i = 0; i < splits.train->size(); ++i) read(*splits.train, i);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, AllOf(HasSubstr("a/z?[31m.png"), Not(HasSubstr("\x1b"))));
}

}  // namespace
}  // namespace lockstep::data
