// A rank whose parameters have changed by themselves, as memory or a network that fails changes them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <future>
#include <sstream>

#include "base/error.h"
#include "lockstep/base/deadline.h"
#include "tests/program/command.h"
#include "tests/support/free_port.h"

namespace lockstep::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using namespace std::chrono_literals;

constexpr int kRanks = 3;
// So small a rate that parameters stay what they are at the start, bit for bit.
constexpr const char* kTrain =
    "lockstep train mlp --data digits --hidden 24 --batch 4 --optimizer sgd --lr 1e-30 --momentum 0 --weight-decay 0 "
    "--eval-every 0 --quiet";

/// The first bytes of the first tensor of a file of weights: after 8 bytes of length and the header.
std::string first_bytes_of(const std::filesystem::path& weights) {
  const std::string file = read_file(weights);
  std::uint64_t header = 0;
  std::memcpy(&header, file.data(), sizeof header);
  return file.substr(sizeof header + header, 64);
}

/// Whether a checkpoint is there, and nothing that is being written or removed: that has hidden names.
bool holds_one_checkpoint_alone(const std::filesystem::path& folder) {
  std::error_code missing;
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder, missing))
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  return names.size() == 1 && names.front().starts_with("step-");
}

/// Parameters lie in none that is larger: sanitizers have some of terabytes, mostly holes.
constexpr std::uint64_t kLargest = 1 << 30;

/// Writes `after` where `before` stands in the memory of a process; how often it does.
int replace_in_memory(int pid, const std::string& before, const std::string& after) {
  const std::string proc = "/proc/" + std::to_string(pid);
  std::ifstream maps(proc + "/maps");
  std::fstream memory(proc + "/mem", std::ios::in | std::ios::out | std::ios::binary);
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    std::uint64_t begin = 0, end = 0;
    std::array<char, 5> rights{};
    if (std::sscanf(line.c_str(), "%lx-%lx %4s", &begin, &end, rights.data()) != 3 || rights[1] != 'w') continue;
    if (end - begin > kLargest) continue;
    std::string bytes(end - begin, '\0');
    memory.clear();
    memory.seekg(static_cast<std::streamoff>(begin));
    if (!memory.read(bytes.data(), static_cast<std::streamsize>(bytes.size()))) continue;
    for (std::size_t at = 0; (at = bytes.find(before, at)) != std::string::npos; ++at) {
      memory.seekp(static_cast<std::streamoff>(begin + at));
      memory.write(after.data(), static_cast<std::streamsize>(after.size()));
      memory.flush();
      ++count;
    }
  }
  return count;
}

class ReplicaCheck : public ::testing::Test {
 protected:
  void SetUp() override {
    run_well(std::string(kTrain) + " --steps 1 --save before.safetensors", directory_.path());
    before_ = first_bytes_of(directory_.path() / "before.safetensors");
    after_ = before_;
    after_[4] = static_cast<char>(after_[4] ^ 1);
  }

  /// Trains on kRanks ranks; once `begun` holds while `rank` is stopped, one bit of its parameters changes. What all of
  /// them said, after each one's exit code.
  std::string train_with_altered(int rank, const std::string& options, const std::function<bool()>& begun) {
    std::string line, all;
    for (int r = 0; r < kRanks; ++r) {
      line += fmt::format(
          "RANK={0} LOCAL_RANK={0} WORLD_SIZE={1} LOCAL_WORLD_SIZE={1} MASTER_ADDR=127.0.0.1 MASTER_PORT={2} {3} {4} & "
          "p{0}=$!; ",
          r, kRanks, port_, kTrain, options);
      all += fmt::format(" $p{}", r);
    }
    line += fmt::format("echo{0} > pids.new; mv pids.new pids; for p in{0}; do wait $p; echo code $? >&2; done", all);
    auto outcome = std::async(std::launch::async, [&] { return run(line, directory_.path(), 120); });
    const auto deadline = Deadline::after(60s);
    const auto ended = [&] { return outcome.wait_for(10ms) == std::future_status::ready; };
    bool replaced = false;
    while (!replaced && !ended() && !deadline.expired()) {
      if (!begun()) continue;
      std::array<int, kRanks> pids{};
      std::ifstream in(directory_.path() / "pids");
      for (int& pid : pids) in >> pid;
      if (pids.back() <= 0) continue;
      // In the middle of a step or not: the parameters are not written while nobody runs.
      const int pid = pids[static_cast<std::size_t>(rank)];
      ::kill(pid, SIGSTOP);
      replaced = begun();
      if (replaced) {
        EXPECT_GE(replace_in_memory(pid, before_, after_), 1);
      }
      ::kill(pid, SIGCONT);
    }
    EXPECT_TRUE(replaced) << "the ranks have not come that far";
    return outcome.get().err;
  }

  static void expect_end(const std::string& said, const std::string& what) {
    EXPECT_THAT(said, HasSubstr(what));
    std::size_t ends = 0;
    for (const auto& line : lines_of(said)) ends += line == "code 5" ? 1 : 0;
    EXPECT_EQ(ends, kRanks) << said;
  }

  TemporaryDirectory directory_;
  int port_ = free_port();
  std::string before_, after_;
};

TEST_F(ReplicaCheck, BeforeACheckpointIsTaken) {
  const auto folder = directory_.path() / "c";
  // One is there and none is being written: of what has been compared before that, nothing changes.
  const std::string said = train_with_altered(
      0, "--steps 100000000 --checkpoint-dir c --checkpoint-every 1000 --keep 1 --save after.safetensors",
      [&] { return holds_one_checkpoint_alone(folder); });
  expect_end(said, " on rank 0 differs from that of the other 2 ranks");
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
    if (entry.is_regular_file()) {
      EXPECT_THAT(read_file(entry.path()), Not(HasSubstr(after_))) << entry.path();
    }
  EXPECT_FALSE(std::filesystem::exists(directory_.path() / "after.safetensors"));
}

TEST_F(ReplicaCheck, BeforeWeightsAreSaved) {
  const std::string said = train_with_altered(1, "--steps 3000 --metrics m.jsonl --save after.safetensors", [&] {
    return lines_of(read_file(directory_.path() / "m.jsonl")).size() > 10;
  });
  expect_end(said, " on rank 1 differs from that of the other 2 ranks");
  EXPECT_FALSE(std::filesystem::exists(directory_.path() / "after.safetensors"));
  EXPECT_THAT(read_file(directory_.path() / "m.jsonl"), Not(HasSubstr("\"final\"")));
}

}  // namespace
}  // namespace lockstep::testing
