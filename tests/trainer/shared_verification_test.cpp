// Checkpoints in parts are verified by all ranks together (Note [Shared verification]).
#include "trainer/resume.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <span>

#include "base/error.h"
#include "base/hash.h"
#include "tests/support/ranks.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::trainer {
namespace {

namespace fs = std::filesystem;
using checkpoint::CheckpointManifest;
using lockstep::testing::group;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::size_t kPartBytes = std::size_t{1} << 20;

CheckpointManifest manifest_in(std::size_t parts) {
  CheckpointManifest manifest;
  manifest.step = 7;
  manifest.parts.resize(parts);
  for (std::size_t part = 0; part < parts; ++part)
    manifest.parts[part]["w"] = {.begin = static_cast<std::int64_t>(part), .count = 1};
  return manifest;
}

void write_text(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

/// Collective: a checkpoint of step `step`, which rank 0 writes, with `parts` parts of a mebibyte each.
std::string write_checkpoint_in(const fs::path& directory, std::int64_t step, std::size_t parts) {
  const std::string path = (directory / fmt::format("step-{:010}", step)).string();
  if (group().rank() == 0) {
    fs::create_directories(path);
    CheckpointManifest manifest = manifest_in(parts);
    manifest.step = step;
    std::vector<std::string> files = {checkpoint::kWeightsFile, checkpoint::kAverageFile};
    if (parts == 0) files.emplace_back(checkpoint::kOptimizerFile);
    for (std::size_t part = 0; part < parts; ++part) files.push_back(checkpoint::part_file(part, parts));
    for (std::size_t i = 0; i < files.size(); ++i) {
      const std::string text(i < 2 ? 100 : kPartBytes, static_cast<char>('a' + i));
      write_text(fs::path(path) / files[i], text);
      Sha256 hash;
      hash.update(std::as_bytes(std::span(text)));
      manifest.files[files[i]] = {.bytes = text.size(), .sha256 = hash.finish()};
    }
    write_text(fs::path(path) / checkpoint::kManifestFile, encode(manifest));
  }
  group().barrier().wait_host();
  return path;
}

/// Collective: what rank 0 says is wrong with the checkpoint at its `path`, on all ranks; empty: nothing.
std::string trouble_with(const std::string& path) {
  std::string why;
  verify_together(group(), [&](checkpoint::Verify verify) {
    EXPECT_EQ(group().rank(), 0);
    try {
      EXPECT_EQ(verify(path).step, 7);
    } catch (const IoError& error) {
      why = error.what();
    }
  });
  return group().all_gather_text(why).front();
}

class SharedVerification : public ::testing::Test {
 protected:
  SharedVerification() : directory(group().all_gather_text(own_.path().string()).front()) {}
  ~SharedVerification() override { group().barrier().wait_host(); }  // the directory is rank 0's

 private:
  lockstep::testing::TemporaryDirectory own_;

 protected:
  fs::path directory;
};

TEST(VerificationShares, EachFileIsOneRanks) {
  for (std::size_t parts = 1; parts < 9; ++parts)
    for (std::size_t ranks = 1; ranks < 9; ++ranks) {
      const CheckpointManifest manifest = manifest_in(parts);
      std::vector<std::string> files = {"weights.safetensors"};
      for (std::size_t part = 0; part < parts; ++part) files.push_back(checkpoint::part_file(part, parts));
      files.emplace_back("hook.safetensors");
      std::vector<std::string> all;
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        const auto mine = share_of(files, manifest, rank, ranks);
        EXPECT_LE(mine.size(), (parts + ranks - 1) / ranks + (rank == 0 ? 2 : 0)) << rank;
        if (parts == ranks) {
          EXPECT_EQ(std::ranges::count(mine, checkpoint::part_file(rank, parts)), 1);
        }
        all.insert(all.end(), mine.begin(), mine.end());
      }
      std::ranges::sort(all);
      std::ranges::sort(files);
      EXPECT_EQ(all, files) << parts << " parts, " << ranks << " ranks";
    }
}

TEST_F(SharedVerification, CorruptionIsFoundInAnyFile) {
  for (const std::size_t parts : {0u, 1u, 3u, 4u}) {
    const std::string path = write_checkpoint_in(directory, 7, parts);
    ASSERT_EQ(trouble_with(path), "");
    std::vector<std::string> files = {checkpoint::kWeightsFile, checkpoint::kAverageFile, checkpoint::kManifestFile};
    for (std::size_t part = 0; part < parts; ++part) files.push_back(checkpoint::part_file(part, parts));
    for (const std::string& file : files) {
      const fs::path place = fs::path(path) / file;
      const auto corrupt = [&](const std::string& how, const std::function<void()>& act) {
        if (group().rank() == 0) fs::copy_file(place, directory / "kept", fs::copy_options::overwrite_existing), act();
        group().barrier().wait_host();
        EXPECT_THAT(trouble_with(path), HasSubstr(file)) << how;
        if (group().rank() == 0) fs::copy_file(directory / "kept", place, fs::copy_options::overwrite_existing);
        group().barrier().wait_host();
      };
      corrupt("cut", [&] { fs::resize_file(place, 10); });
      corrupt("missing", [&] { fs::remove(place); });
      corrupt("changed",
              [&] { std::fstream(place, std::ios::in | std::ios::out | std::ios::binary).seekp(50).put('!'); });
    }
    EXPECT_EQ(trouble_with(path), "");
    if (group().rank() == 0) fs::remove_all(path);
    group().barrier().wait_host();
  }
}

TEST_F(SharedVerification, TheNewestWholeOneIsFound) {
  for (const std::int64_t step : {6, 7, 8, 9}) write_checkpoint_in(directory, step, 3);
  if (group().rank() == 0) {
    fs::resize_file(directory / "step-0000000009" / checkpoint::part_file(2, 3), 10);
    fs::remove(directory / "step-0000000008" / checkpoint::part_file(0, 3));
  }
  group().barrier().wait_host();
  std::optional<checkpoint::Search> search;
  verify_together(group(),
                  [&](checkpoint::Verify verify) { search = checkpoint::newest_whole(directory.string(), verify); });
  EXPECT_EQ(search.has_value(), group().rank() == 0);
  if (!search) return;
  ASSERT_TRUE(search->found);
  EXPECT_EQ(search->found->manifest.step, 7);
  ASSERT_EQ(search->corrupt.size(), 2u);
  EXPECT_THAT(search->corrupt[0].why, AllOf(HasSubstr("step-0000000009"), HasSubstr(checkpoint::part_file(2, 3))));
  EXPECT_THAT(search->corrupt[1].why, AllOf(HasSubstr("step-0000000008"), HasSubstr(checkpoint::part_file(0, 3))));
}

// What this process has read so far, from files and all else; nothing where the system does not say.
std::optional<std::size_t> bytes_read() {
  std::ifstream io("/proc/self/io");
  for (std::string key; io >> key;) {
    std::size_t value = 0;
    io >> value;
    if (key == "rchar:") return value;
  }
  return std::nullopt;
}

TEST_F(SharedVerification, NoRankReadsAll) {
  if (!bytes_read()) GTEST_SKIP() << "the kernel does not count what processes read";
  constexpr std::size_t kParts = 12;
  const std::string path = write_checkpoint_in(directory, 7, kParts);
  const std::size_t before = *bytes_read();
  ASSERT_EQ(trouble_with(path), "");
  const std::size_t mine = *bytes_read() - before,
                    share = kParts * kPartBytes / static_cast<std::size_t>(group().size());
  EXPECT_GE(mine, share);
  EXPECT_LT(mine, share + kPartBytes / 2);
}

// A rank with another directory under that name leaves its share to the others.
TEST_F(SharedVerification, RanksThatDoNotSeeIt) {
  const std::string path = write_checkpoint_in(directory, 7, 5);
  for (int sees = 0; sees < group().size(); ++sees) {
    // By a relative path, from directories of which one has it.
    const fs::path from = fs::current_path();
    const fs::path elsewhere = directory / fmt::format("cwd-{}", group().rank());
    fs::create_directories(elsewhere);
    fs::current_path(group().rank() == 0 || group().rank() == sees ? directory : elsewhere);
    const std::string name = fs::path(path).filename().string();
    EXPECT_EQ(trouble_with(name), "");
    group().barrier().wait_host();
    const fs::path part = fs::path(path) / checkpoint::part_file(4, 5);
    if (group().rank() == 0) fs::rename(part, directory / "away");
    group().barrier().wait_host();
    EXPECT_THAT(trouble_with(name), HasSubstr(checkpoint::part_file(4, 5)));
    if (group().rank() == 0) fs::rename(directory / "away", part);
    fs::current_path(from);
    group().barrier().wait_host();
  }
}

// The others do not wait for a rank 0 that has ended its search with an error.
TEST_F(SharedVerification, AnErrorOfRank0) {
  const auto search = [] { verify_together(group(), [](checkpoint::Verify) { throw UsageError("no more", "stop"); }); };
  if (group().rank() == 0)
    EXPECT_THROW(search(), UsageError);
  else
    EXPECT_NO_THROW(search());
  group().barrier().wait_host();
}

}  // namespace
}  // namespace lockstep::trainer
