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
#include <thread>

#include "base/error.h"
#include "base/flight_snapshot.h"
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

/// Whether the checkpoint of this step is there, and nothing that is being written or removed: that has hidden names.
bool holds_checkpoint_alone(const std::filesystem::path& folder, std::int64_t step) {
  std::error_code missing;
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder, missing))
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  return names == std::vector{fmt::format("step-{:010}", step)};
}

/// Stops a process, and waits until its main thread stands; false where it has ended.
bool stop(int pid) {
  ::kill(pid, SIGSTOP);
  while (true) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string stat;
    if (!std::getline(file, stat)) return false;
    const char state = stat[stat.rfind(')') + 2];
    if (state == 'T' || state == 'Z') return state == 'T';
    std::this_thread::sleep_for(1ms);
  }
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

  /// Trains on kRanks ranks. Once `rank` stands in a step of which `may` holds, before the optimizer, one bit of its
  /// parameters changes: nothing compares, copies or writes them there. What all ranks said, after each one's exit
  /// code.
  std::string train_with_altered(int rank, const std::string& options, const std::function<bool(std::int64_t)>& may) {
    std::string line = "export LOCKSTEP_FLIGHT_DIR=flight; ", all;
    const auto is_in_such_a_step = [&] {
      const auto record = flight::read((directory_.path() / "flight").string(), rank);
      using enum flight::Phase;
      return record && (record->phase == kData || record->phase == kForward || record->phase == kBackward) &&
             may(record->step);
    };
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
      if (!is_in_such_a_step()) continue;
      std::array<int, kRanks> pids{};
      std::ifstream in(directory_.path() / "pids");
      for (int& pid : pids) in >> pid;
      if (pids.back() <= 0) continue;
      const int pid = pids[static_cast<std::size_t>(rank)];
      replaced = stop(pid) && is_in_such_a_step();
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
  // The one before this step is there: of what has been compared before that, nothing changes.
  const std::string said = train_with_altered(
      0, "--steps 100000000 --checkpoint-dir c --checkpoint-every 1000 --keep 1 --save after.safetensors",
      [&](std::int64_t step) { return step % 1000 != 0 && holds_checkpoint_alone(folder, step / 1000 * 1000); });
  expect_end(said, " on rank 0 differs from that of the other 2 ranks");
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
    if (entry.is_regular_file()) {
      EXPECT_THAT(read_file(entry.path()), Not(HasSubstr(after_))) << entry.path();
    }
  EXPECT_FALSE(std::filesystem::exists(directory_.path() / "after.safetensors"));
}

TEST_F(ReplicaCheck, BeforeWeightsAreSaved) {
  const std::string said = train_with_altered(1, "--steps 3000 --metrics m.jsonl --save after.safetensors",
                                              [](std::int64_t step) { return step > 10 && step < 3000; });
  expect_end(said, " on rank 1 differs from that of the other 2 ranks");
  EXPECT_FALSE(std::filesystem::exists(directory_.path() / "after.safetensors"));
  EXPECT_THAT(read_file(directory_.path() / "m.jsonl"), Not(HasSubstr("\"final\"")));
}

}  // namespace
}  // namespace lockstep::testing
