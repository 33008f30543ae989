#include "launcher/job_dir.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

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

TEST_F(JobDirTest, SymlinkTargetsStay) {
  std::ofstream(base_ + "/elsewhere/precious") << "x";
  {
    const JobDir job(base_ + "/tmp", "");
    EXPECT_EQ(job.shm_path(), job.path());
    fs::create_directory_symlink(base_ + "/elsewhere", job.path() + "/link");
  }
  EXPECT_TRUE(fs::is_empty(base_ + "/tmp"));
  EXPECT_TRUE(fs::exists(base_ + "/elsewhere/precious"));
}

// Of jobs whose launcher and reaper were killed together; whose processes live, or are not this kernel's, stays.
TEST_F(JobDirTest, LeftoversOfKilledJobsAreRemoved) {
  std::string boot, user;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  {
    const JobDir job(base_ + "/tmp", "");
    const std::string name = fs::path(job.path()).filename();  // lockstep-USER-PID-XXXXXX
    user = name.substr(0, name.rfind('-', name.rfind('-') - 1) + 1);
  }
  const auto leave = [&](const std::string& name, const std::string& lock) {
    const std::string path = base_ + "/" + name;
    fs::create_directories(path + "/deep");
    if (!lock.empty()) std::ofstream(path + "/lock") << lock;
    return path;
  };
  const std::string dead = leave("tmp/" + user + "1-aaaaaa", boot),
                    dead_memory = leave("shm/" + user + "1-bbbbbb", boot);
  const std::string living = leave("tmp/" + user + "2-aaaaaa", boot), earlier = leave("tmp/" + user + "3-a", "");
  const std::string elsewhere = leave("tmp/" + user + "4-aaaaaa", "another kernel's"), other = leave("tmp/other", boot);
  fs::create_directory_symlink(leave("elsewhere/kept", boot), base_ + "/tmp/" + user + "5-aaaaaa");
  const int lock = ::open((living + "/lock").c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(::flock(lock, LOCK_SH), 0);
  const JobDir job(base_ + "/tmp", base_ + "/shm");
  for (int i = 0; i < 1000 && (fs::exists(dead) || fs::exists(dead_memory)); ++i) ::usleep(10'000);
  EXPECT_FALSE(fs::exists(dead) || fs::exists(dead_memory));
  for (const std::string& path :
       {living, earlier, elsewhere, other, base_ + "/elsewhere/kept/deep", job.path(), job.shm_path()})
    EXPECT_TRUE(fs::exists(path)) << path;
  // Its own are held.
  EXPECT_NE(::flock(::open((job.path() + "/lock").c_str(), O_RDONLY | O_CLOEXEC), LOCK_EX | LOCK_NB), 0);
  ::close(lock);
}

TEST_F(JobDirTest, AMemoryDirectoryThatCannotBeMadeIsReplaced) {
  const JobDir job(base_ + "/tmp", base_ + "/missing");
  EXPECT_EQ(job.shm_path(), job.path());
}

TEST_F(JobDirTest, ABaseThatCannotBeWritten) { EXPECT_THROW(JobDir(base_ + "/missing", ""), DeviceError); }

}  // namespace
}  // namespace lockstep::launcher
