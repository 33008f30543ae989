// Groups through a table of the program's own: in memory for threads, in files for processes.
#include "lockstep/comm/key_value_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.h"
#include "tests/comm/forked_ranks.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::comm {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::on_processes;
using ::testing::StartsWith;

class Table {
 public:
  void set(const std::string& key, const std::string& value) {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  std::optional<std::string> get(const std::string& key, Clock::duration wait) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, wait, [&] { return values_.contains(key); });
    const auto found = values_.find(key);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

/// A rank's view of a table, which works so often.
class View final : public KeyValueStore {
 public:
  explicit View(std::shared_ptr<Table> table, int calls = 1'000'000) : table_(std::move(table)), calls_(calls) {}
  void set(const std::string& key, const std::string& value) override {
    count();
    table_->set(key, value);
  }
  std::optional<std::string> get(const std::string& key, Clock::duration wait) override {
    count();
    return table_->get(key, wait);
  }

 private:
  void count() {
    if (calls_-- <= 0) throw std::runtime_error("the disk is full");
  }
  std::shared_ptr<Table> table_;
  int calls_;
};

std::shared_ptr<View> view_of(const std::shared_ptr<Table>& table) { return std::make_shared<View>(table); }

/// A file for each key, which never waits.
class Files final : public KeyValueStore {
 public:
  explicit Files(std::filesystem::path directory) : directory_(std::move(directory)) {}
  void set(const std::string& key, const std::string& value) override {
    const auto path = path_of(key), unfinished = path_of(key + fmt::format(".{}", ::getpid()));
    std::ofstream(unfinished, std::ios::binary) << value;
    std::filesystem::rename(unfinished, path);
  }
  std::optional<std::string> get(const std::string& key, Clock::duration) override {
    std::ifstream file(path_of(key), std::ios::binary);
    if (!file) return std::nullopt;
    return std::string(std::istreambuf_iterator<char>(file), {});
  }

 private:
  std::filesystem::path path_of(std::string key) const {
    for (char& c : key)
      if (c == '/') c = '_';
    return directory_ / key;
  }
  std::filesystem::path directory_;
};

/// Runs `body` on threads, one per rank; what each one throws.
std::vector<std::string> on_threads(int size, const std::function<void(int rank)>& body) {
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      std::string& error = errors[static_cast<std::size_t>(rank)];
      try {
        body(rank);
      } catch (const UsageError& thrown) {
        error = "usage: " + thrown.line();
      } catch (const TimeoutError& thrown) {
        error = "timeout: " + thrown.line();
      } catch (const DeviceError& thrown) {
        error = "device: " + thrown.line();
      } catch (const PeerError& thrown) {
        error = "peer: " + thrown.line();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

bool reduces(ProcessGroup& group) {
  std::vector<std::int32_t> ones(70'000, 1);
  group.all_reduce(std::span(ones));
  return ones.front() == group.size() && ones.back() == group.size();
}

TEST(KeyValueStore, GroupsOfThreads) {
  for (const int size : {1, 2, 3}) {
    const auto table = std::make_shared<Table>();
    const auto errors = on_threads(size, [&](int rank) {
      const auto group = make_group(rank, size, view_of(table), {.timeout_seconds = 20});
      EXPECT_EQ(group->rank(), rank);
      EXPECT_EQ(group->name(), size == 1 ? "self" : "shm");
      EXPECT_TRUE(reduces(*group));
      group->shutdown();
    });
    EXPECT_THAT(errors, Each(""));
  }
}

TEST(KeyValueStore, SeveralGroupsOfOneStore) {
  const auto table = std::make_shared<Table>();
  const auto errors = on_threads(2, [&](int rank) {
    const auto store = view_of(table);
    const auto first = make_group(rank, 2, store), second = make_group(1 - rank, 2, store);
    EXPECT_TRUE(reduces(*first) && reduces(*second));
    first->shutdown();
    const auto third = make_group(rank, 2, store, {}, {4, 7});
    EXPECT_TRUE(reduces(*second) && reduces(*third));
    EXPECT_EQ(third->job_rank(1), 7);
    EXPECT_TRUE(reduces(*third->split(0)));
    second->shutdown();
    third->shutdown();
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(KeyValueStore, ProcessesOverFiles) {
  for (const auto& [hosts, name] : {std::pair{"aaa", "shm"}, std::pair{"ab", "hosts"}, std::pair{"aab", "hosts"}}) {
    const testing::TemporaryDirectory directory;
    on_processes({.hosts = hosts}, [&, name = std::string(name)](const World& world) {
      const auto store = std::make_shared<Files>(directory.path());
      const auto group = make_group(world.rank, world.size, store, {.timeout_seconds = 20});
      const bool well = group->name() == name && reduces(*group);
      group->shutdown();
      return well;
    });
  }
}

TEST(KeyValueStore, ARankThatDies) {
  const testing::TemporaryDirectory directory;
  on_processes({.hosts = "aaa", .doomed = 1}, [&](const World& world) {
    const auto group = make_group(world.rank, world.size, std::make_shared<Files>(directory.path()),
                                  {.timeout_seconds = 20}, {10, 11, 12});
    reduces(*group);
    if (world.rank == 1) ::raise(SIGKILL);
    return testing::throws<DeviceError>([&] { reduces(*group); }, {"rank 11 (host a", "rank 1 of its subgroup"});
  });
}

TEST(KeyValueStore, ARankThatNeverComes) {
  for (const bool numbered : {false, true}) {
    const auto table = std::make_shared<Table>();
    const auto job_ranks = numbered ? std::vector<int>{4, 6, 9} : std::vector<int>();
    const auto errors =
        on_threads(2, [&](int rank) { make_group(rank, 3, view_of(table), {.timeout_seconds = 0.3}, job_ranks); });
    const std::string late = numbered ? "rank 9" : "rank 2";
    EXPECT_THAT(errors, Each(AllOf(AnyOf(StartsWith("timeout: "), StartsWith("peer: ")),
                                   HasSubstr("joining the other ranks timed out after"),
                                   HasSubstr(" waiting for " + late + ", which has not joined"),
                                   HasSubstr("start " + late + " with the same key-value store and size"))));
    EXPECT_THAT(errors, ::testing::Contains(StartsWith("timeout: ")));
  }
}

TEST(KeyValueStore, AStoreThatThrows) {
  // From the first call on; and when the ranks have joined, and share memory.
  for (const int calls : {0, 1, 3, 8}) {
    const auto table = std::make_shared<Table>();
    const auto errors = on_threads(2, [&](int rank) {
      const auto store = rank == 1 ? std::make_shared<View>(table, calls) : view_of(table);
      make_group(rank, 2, store, {.timeout_seconds = 0.5})->shutdown();
    });
    EXPECT_THAT(errors[1], AllOf(StartsWith("device: the key-value store"), HasSubstr("the disk is full"))) << calls;
    EXPECT_THAT(errors[0], AllOf(StartsWith("timeout: "), HasSubstr("waiting for rank 1"))) << calls;
  }
}

// Not even an exception of the standard's.
TEST(KeyValueStore, AStoreThatThrowsANumber) {
  class Numbers final : public KeyValueStore {
   public:
    void set(const std::string&, const std::string&) override { throw 7; }
    std::optional<std::string> get(const std::string&, Clock::duration) override { throw 7; }
  };
  const auto errors = on_threads(1, [](int) { make_group(1, 2, std::make_shared<Numbers>()); });
  EXPECT_THAT(errors[0], AllOf(StartsWith("device: the key-value store"), HasSubstr("it does not say how")));
}

TEST(KeyValueStore, TimeoutIsAnnouncedToTheOthers) {
  const auto table = std::make_shared<Table>();
  const auto errors = on_threads(3, [&](int rank) {
    const double seconds = rank == 0 ? 0.2 : 60;
    if (rank < 2) make_group(rank, 3, view_of(table), {.timeout_seconds = seconds});
  });
  EXPECT_THAT(errors[0], StartsWith("timeout: "));
  EXPECT_THAT(errors[1], AllOf(StartsWith("peer: "), HasSubstr("waiting for rank 2, which has not joined")));
}

TEST(KeyValueStore, RanksThatDoNotAgree) {
  const auto errors_of = [](const std::function<void(int, std::shared_ptr<Table>)>& body) {
    const auto table = std::make_shared<Table>();
    return on_threads(2, [&](int rank) { body(rank, table); });
  };
  const GroupOptions soon{.timeout_seconds = 5};
  EXPECT_THAT(errors_of([&](int rank, auto table) { make_group(rank, 2 + rank, view_of(table), soon); }),
              Each(AnyOf(HasSubstr("this is rank 0 of 2, and rank 1 says that there are 3 → give all ranks"),
                         HasSubstr("this is rank 1 of 3, and rank 0 says that there are 2 → give all ranks"))));
  // Two processes of one rank: the second to look finds out; the first waits for rank 1 unless the second says so.
  EXPECT_THAT(errors_of([&](int, auto table) { make_group(0, 2, view_of(table), soon); }),
              ::testing::Contains(AllOf(StartsWith("usage: "), HasSubstr("rank 0 has joined already"))));
  EXPECT_THAT(errors_of([&](int rank, auto table) {
                make_group(rank, 2, view_of(table), {.timeout_seconds = 5, .backend = "mpi"});
              }),
              ::testing::Contains(StartsWith("usage: ")));
}

TEST(KeyValueStore, KeysOfAnEarlierJob) {
  const auto table = std::make_shared<Table>();
  const auto join = [&](int rank) { make_group(rank, 2, view_of(table), {.timeout_seconds = 5})->shutdown(); };
  EXPECT_THAT(on_threads(2, join), Each(""));
  EXPECT_THAT(on_threads(2, join), Each(HasSubstr("has joined already: another process has the same rank, or the store "
                                                  "has the keys of an earlier job")));
}

TEST(KeyValueStore, InvalidRanks) {
  const auto table = view_of(std::make_shared<Table>());
  EXPECT_THROW(make_group(2, 2, table), UsageError);
  EXPECT_THROW(make_group(-1, 2, table), UsageError);
  EXPECT_THROW(make_group(0, 0, table), UsageError);
  EXPECT_THROW(make_group(0, 2, table, {}, {1}), UsageError);
  EXPECT_THROW(make_group(0, 1, nullptr), UsageError);
  EXPECT_THROW(make_group(0, 1, table, {.timeout_seconds = 0}), UsageError);
  EXPECT_THROW(make_group(0, 2, table, {.encrypt = true}), UsageError);  // without a secret
}

}  // namespace
}  // namespace lockstep::comm
