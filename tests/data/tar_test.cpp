// Archives with webdataset's layout: those of GNU tar in all its formats, odd ones, cut and corrupt ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "base/error.h"
#include "data/tar_index.h"
#include "lockstep/data/families.h"
#include "tests/data/golden.h"
#include "tests/data/idx_files.h"
#include "tests/support/refusal.h"

namespace lockstep::data {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class TarTest : public ::testing::Test {
 protected:
  void put_image(const std::string& name, const std::string& golden = "rgb.png") {
    fs::create_directories(fs::path(path("in/" + name)).parent_path());
    fs::copy_file(golden::kDirectory / golden, path("in/" + name), fs::copy_options::overwrite_existing);
  }
  void put_text(const std::string& name, const std::string& content) {
    fs::create_directories(fs::path(path("in/" + name)).parent_path());
    write_file(path("in/" + name), content);
  }
  void put_sample(const std::string& key, int label) {
    put_image(key + ".png");
    put_text(key + ".cls", std::to_string(label) + "\n");
  }
  /// tar's, of all that has been put, which then is gone.
  void pack(const std::string& archive, const std::string& flags = "") {
    const std::string command = "tar --sort=name " + flags + " -C '" + path("in") + "' -cf '" + path(archive) +
                                "' . && rm -r '" + path("in") + "'";
    ASSERT_EQ(std::system(command.c_str()), 0) << command;
  }
  void put_samples(int count, const std::string& prefix = "") {
    for (int i = 0; i < count; ++i) put_sample(prefix + fmt::format("{:04}", i), i % 3);
  }
  std::string path(const std::string& name) const { return directory_.path(name); }
  DataSplits open(const std::string& what, OpenOptions options = {}) const {
    options.settings.set(kImageSize, 8);
    return open_data("tar:" + path(what), options);
  }
  template <class E = IoError>
  std::string error(const std::string& what, const OpenOptions& options = {}) const {
    return testing::refusal_of<E>([&] { open(what, options); });
  }
  std::map<std::string, std::string> members(const std::string& archive) const {
    std::map<std::string, std::string> all;
    const RandomAccessFile file(path(archive));
    read_tar(file, [&](const TarMember& member) {
      const std::string name(member.name);
      const auto bytes = file.read(member.offset, static_cast<std::size_t>(member.bytes));
      all[name] = std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    });
    return all;
  }
  std::string content(const std::string& name) const {
    std::ifstream file(path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  TemporaryDirectory directory_;
};

TEST_F(TarTest, FindsTheMembersOfAllFormats) {
  const std::string deep = "a/" + std::string(90, 'd') + "/" + std::string(90, 'f') + ".txt";
  const std::string longest = std::string(200, 'n') + "/" + std::string(200, 'm') + ".txt";
  for (const std::string format : {"v7", "ustar", "oldgnu", "gnu", "pax"}) {
    std::map<std::string, std::string> expected = {{"./empty.txt", ""}, {"./block.txt", std::string(512, 'b')}};
    if (format != "v7") expected["./" + deep] = "deep";
    if (format != "v7" && format != "ustar") expected["./" + longest] = "longest";
    if (format == "pax") expected["./\xc3\xa4.txt"] = "umlaut";
    for (const auto& [name, text] : expected) put_text(name.substr(2), text);
    fs::create_symlink("empty.txt", path("in/link.txt"));
    pack(format + ".tar", "--format=" + format);
    EXPECT_EQ(members(format + ".tar"), expected) << format;
  }
}

TEST_F(TarTest, ReadsSamplesAsFromFolders) {
  put_samples(20);
  put_text("0003.json", "{}");
  put_text("README", "no sample");
  put_text(".hidden.cls", "9");
  pack("all.tar");
  const DataSplits splits = open("all.tar");
  EXPECT_EQ(splits.train->size(), 18U);
  EXPECT_EQ(splits.validation->size(), 2U);
  EXPECT_EQ(splits.train->classes(), 3);
  std::vector<float> x(splits.train->sample_elements()), folder(x.size());
  std::int32_t label = -1;
  for (const auto& part : {splits.train, splits.validation})
    for (std::uint64_t i = 0; i < part->size(); ++i) {
      part->read(i, x, label);
      const std::string name = part->sample_name(i);
      EXPECT_EQ(name.substr(0, name.size() - 8), path("all.tar") + "/");
      EXPECT_EQ(label, std::stoi(name.substr(name.size() - 8)) % 3);
    }
  fs::create_directories(path("folders/0"));
  for (int i = 0; i < 10; ++i) fs::copy_file(golden::kDirectory / "rgb.png", path(fmt::format("folders/0/{}.png", i)));
  OpenOptions options;
  options.settings.set(kImageSize, 8);
  open_data("images:" + path("folders"), options).train->read(0, folder, label);
  EXPECT_EQ(x, folder);
}

TEST_F(TarTest, DividesByTheNamesOfArchivesAndFolders) {
  for (const char* name : {"set-train-000.tar", "set-train-001.tar", "set-val-000.tar", "set-test-000.tar"}) {
    put_samples(5);
    pack(name);
  }
  const auto sizes = [](const DataSplits& splits) {
    return std::vector<std::uint64_t>{splits.train->size(), splits.validation->size(),
                                      splits.test == nullptr ? 0 : splits.test->size()};
  };
  EXPECT_THAT(sizes(open("")), ElementsAre(10, 5, 0));
  OpenOptions tests;
  tests.parts.test = true;
  EXPECT_THAT(sizes(open("", tests)), ElementsAre(10, 5, 5));
  EXPECT_THAT(sizes(open("set-train-{000..001}.tar," + path("set-val-000.tar"))), ElementsAre(10, 5, 0));
  EXPECT_THAT(error("set-train-{000..002}.tar"), HasSubstr("set-train-002.tar"));
  EXPECT_THAT(error<UsageError>("set-train-{2..1}.tar"), HasSubstr("no range of archives"));
  EXPECT_THAT(error<UsageError>("set-train-000.tar,"), HasSubstr("a comma without an archive"));
  OpenOptions whole;
  whole.parts.whole = true;
  EXPECT_EQ(open("set-val-000.tar", whole).whole->size(), 5U);
  for (const char* part : {"train", "val"}) {
    fs::create_directories(path("by/" + std::string(part)));
    put_samples(4);
    pack("by/" + std::string(part) + "/0.tar");
  }
  EXPECT_THAT(sizes(open("by")), ElementsAre(4, 4, 0));
}

TEST_F(TarTest, ReadsMoreArchivesThanItKeepsOpen) {
  put_sample("a", 0);
  pack("0.tar");
  for (int i = 1; i < 300; ++i) fs::copy_file(path("0.tar"), path(fmt::format("{}.tar", i)));
  const DataSplits splits = open("{0..299}.tar");
  EXPECT_EQ(splits.train->size() + splits.validation->size(), 300U);
  std::vector<float> x(splits.train->sample_elements());
  std::int32_t label = -1;
  splits.train->read(7, x, label);
  EXPECT_EQ(label, 0);
}

TEST_F(TarTest, SamplesThatAreNoneAreNamed) {
  const auto fails = [&](const std::string& why) {
    pack("bad.tar");
    EXPECT_THAT(error("bad.tar"), AllOf(HasSubstr("bad.tar"), HasSubstr(why)));
  };
  put_image("a.png");
  fails("a.png: an image without a class");
  put_text("a.cls", "1");
  fails("a: a class without a JPEG or PNG");
  put_image("a.png");
  put_image("a.jpg", "rgb420.jpg");
  put_text("a.cls", "1");
  fails("a second image of the same sample");
  for (const std::string label : {"cat", "-1", "1.5", "", "99999999999", "1048576"}) {
    put_image("a.png");
    put_text("a.cls", label);
    fails("a.cls: '" + label + "' is no class");
  }
  put_text("README", "nothing");
  fails("it has no sample");
  put_samples(3);
  pack("few.tar");
  OpenOptions options;
  options.classes = 2;
  EXPECT_THAT(error<UsageError>("few.tar", options), HasSubstr("whose largest class is 2"));
  fs::create_directories(path("nothing"));
  EXPECT_THAT(error("nothing"), HasSubstr("have .tar files"));
}

TEST_F(TarTest, ArchivesThatAreJoinedAreReadToTheLast) {
  for (const char* name : {"a.tar", "b.tar"}) {
    put_samples(20);
    pack(name);
  }
  write_file(path("both.tar"), content("a.tar") + content("b.tar"));
  const DataSplits splits = open("both.tar");
  EXPECT_EQ(splits.train->size() + splits.validation->size(), 40U);
}

TEST_F(TarTest, AnExactNameComesBeforeALongerOne) {
  for (int i = 0; i < 20; ++i) {
    put_sample(fmt::format("{:02}", i), 0);
    put_text(fmt::format("{:02}.mask.png", i), "not read");
  }
  pack("all.tar");
  const DataSplits splits = open("all.tar");
  EXPECT_THAT(splits.train->sample_name(0), ::testing::EndsWith("/00.png"));
}

TEST_F(TarTest, ArchivesThatCannotBeReadAreNamed) {
  put_samples(20);
  pack("all.tar");
  const std::string all = content("all.tar");
  const auto fails = [&](const std::string& bytes, const std::string& why) {
    write_file(path("bad.tar"), bytes);
    EXPECT_THAT(error("bad.tar"), AllOf(HasSubstr("bad.tar"), HasSubstr(why)));
  };
  fails("", "the archive is empty");
  fails("text", "cut in a header");
  fails(std::string(2000, 'x'), "it is no tar file");
  fails("\x1f\x8b\x08 and so on", "compressed with gzip");
  fails(std::string("\x28\xb5\x2f\xfd") + all, "compressed with zstd");
  std::string wrong = all;
  const std::size_t second = all.find("./0001.cls");
  wrong[second] = '/';
  fails(wrong, fmt::format("byte {}: a header's checksum is wrong", second));
  fails(all.substr(0, second + 100), "cut in a header");
  fails(all.substr(0, second), "the zeros that end it are missing");
  fails(all.substr(0, all.find("./0001.png") + 600), "0001.png has");
  put_samples(2);
  fs::resize_file(path("in/0000.png"), 1 << 20);
  put_text("sparse.bin", "");
  fs::resize_file(path("in/sparse.bin"), 16 << 20);
  for (const std::string format : {"gnu", "pax"}) {
    ASSERT_EQ(
        std::system(
            ("tar -S --format=" + format + " -C '" + path("in") + "' -cf '" + path("sparse.tar") + "' .").c_str()),
        0);
    EXPECT_THAT(error("sparse.tar"), HasSubstr("sparse"));
  }
}

TEST_F(TarTest, ACorruptImageIsReplaced) {
  put_samples(20);
  put_text("0000.png", "no image");
  pack("all.tar");
  const DataSplits splits = open("all.tar");
  std::vector<float> x(splits.train->sample_elements());
  std::int32_t label = -1;
  splits.train->read(0, x, label);
  EXPECT_EQ(splits.train->corrupt(), 1U);
  EXPECT_EQ(label, 1);
}

}  // namespace
}  // namespace lockstep::data
