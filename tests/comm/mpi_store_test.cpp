// The store over MPI.
#include "comm/mpi/mpi_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "base/error.h"
#include "tests/support/ranks.h"

namespace lockstep::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

Deadline soon() { return Deadline::after(20s); }

// One store for all: a process has one MPI in its life.
TEST(MpiStore, FromJoiningToLeaving) {
  MpiStore store(testing::world(), soon());
  const int rank = store.rank(), size = store.size(), last = size - 1;

  // Values of all sizes, from eager messages to ones that need both sides.
  const auto value_of = [](int r, std::size_t bytes) { return std::string(bytes, static_cast<char>('a' + r)); };
  for (const std::size_t bytes : {0u, 1u, 5'000u, 100'000u, 1u << 20}) {
    store.set(fmt::format("{} bytes of {}", bytes, rank), value_of(rank, bytes));
    for (int r = 0; r < size; ++r)
      EXPECT_TRUE(store.get(fmt::format("{} bytes of {}", bytes, r), soon()) == value_of(r, bytes));
  }
  EXPECT_THROW(store.set("k", value_of(0, Store::kMostValueBytes + 1)), UsageError);
  EXPECT_EQ(store.broadcast_text("id", rank == last ? "word" : "", last, soon()), "word");
  const auto texts = store.all_gather_text("ranks", std::to_string(rank), soon());
  for (int r = 0; r < size; ++r) EXPECT_EQ(texts[static_cast<std::size_t>(r)], std::to_string(r));

  // Nobody depends on a rank that is elsewhere.
  if (rank == 0) {
    store.set("early", "1");
    std::this_thread::sleep_for(3s);
  } else {
    const auto begin = Clock::now();
    EXPECT_EQ(store.get("early", soon()), "1");
    store.set(fmt::format("from {}", rank), "2");
    if (rank == last) {
      EXPECT_EQ(store.get("from 1", soon()), "2");
      EXPECT_LT(Clock::now() - begin, 2500ms);
    }
  }
  const std::vector<std::string> never = {"never"};
  EXPECT_EQ(store.try_get(never, Deadline::after(0s))[0], std::nullopt);
  store.barrier("all", soon());
  store.leave(soon());
}

}  // namespace
}  // namespace lockstep::comm
