#include "launcher/job_dir.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::launcher {
namespace {

namespace fs = std::filesystem;

class JobDirTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"tmp", "shm", "elsewhere"}) fs::create_directory(base_ + "/" + name);
  }
  lockstep::testing::TemporaryDirectory directory_;
  const std::string base_ = directory_.path();
};

TEST_F(JobDirTest, PrivateDirectoriesThatGoWithTheirOwner) {
  {
    const JobDir job(base_ + "/tmp", base_ + "/shm");
    for (const auto& path : {job.path(), job.shm_path()}) {
      struct stat status;
      ASSERT_EQ(::stat(path.c_str(), &status), 0);
      EXPECT_EQ(status.st_mode & 0777, 0700u);
      fs::create_directories(path + "/deep/deeper");
      std::ofstream(path + "/deep/deeper/file") << "x";
    }
    EXPECT_EQ(fs::path(job.shm_path()).parent_path(), base_ + "/shm");
  }
  EXPECT_TRUE(fs::is_empty(base_ + "/tmp"));
  EXPECT_TRUE(fs::is_empty(base_ + "/shm"));
}

TEST_F(JobDirTest, WhatLinksPointToStays) {
  std::ofstream(base_ + "/elsewhere/precious") << "x";
  {
    const JobDir job(base_ + "/tmp", "");
    EXPECT_EQ(job.shm_path(), job.path());
    fs::create_directory_symlink(base_ + "/elsewhere", job.path() + "/link");
  }
  EXPECT_TRUE(fs::is_empty(base_ + "/tmp"));
  EXPECT_TRUE(fs::exists(base_ + "/elsewhere/precious"));
}

TEST_F(JobDirTest, AMemoryDirectoryThatCannotBeMadeIsReplaced) {
  const JobDir job(base_ + "/tmp", base_ + "/missing");
  EXPECT_EQ(job.shm_path(), job.path());
}

TEST_F(JobDirTest, ABaseThatCannotBeWritten) { EXPECT_THROW(JobDir(base_ + "/missing", ""), DeviceError); }

}  // namespace
}  // namespace lockstep::launcher
