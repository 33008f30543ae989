#include "checkpoint/folder.h"

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "lockstep/base/env.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

std::string refusal(const std::string& directory) {
  try {
    const DirectoryLock second(directory, 0ms, 0ms);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "none";
}

TEST(DirectoryLock, AllowsOneRunAtATime) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory.path();
  {
    DirectoryLock first(path);
    EXPECT_TRUE(first.held());
    EXPECT_THAT(refusal(path), AllOf(HasSubstr("another training writes its checkpoints to " + path),
                                     HasSubstr("host " + host_name()), HasSubstr("pid " + std::to_string(::getpid()))));
    const DirectoryLock moved = std::move(first);
    EXPECT_THAT(refusal(path), HasSubstr("another training"));
  }
  EXPECT_TRUE(std::filesystem::is_empty(path));
  EXPECT_TRUE(DirectoryLock(path).held());
}

// However its owner ended; what the file says is not believed.
TEST(DirectoryLock, EndsWithItsProcess) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory.path();
  const pid_t child = ::fork();
  if (child == 0) {
    const DirectoryLock lock(path);
    ::_exit(lock.held() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(std::filesystem::exists(path + "/.lock"));
  EXPECT_TRUE(DirectoryLock(path, 0ms, 0ms).held());
}

// A run that ends meanwhile lets the next one in.
TEST(DirectoryLock, WaitsForAnEndingRun) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory.path();
  auto first = std::make_unique<DirectoryLock>(path);
  std::thread ends([&] {
    std::this_thread::sleep_for(200ms);
    first.reset();
  });
  EXPECT_TRUE(DirectoryLock(path, 60s, 60s).held());
  ends.join();
}

TEST(DirectoryLock, IsSkippedInReadOnlyDirectories) {
  EXPECT_FALSE(DirectoryLock("/proc").held());
  EXPECT_FALSE(DirectoryLock("/nowhere").held());
}

}  // namespace
}  // namespace lockstep::checkpoint
