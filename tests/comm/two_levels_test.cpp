// Reductions in two levels, of ranks that are on several sockets, or are taken to be: each socket's ranks in their
// order, then the sockets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "comm/shm/sockets.h"
#include "devices/cpus.h"
#include "lockstep/comm/make_group.h"
#include "tests/comm/reference.h"
#include "tests/support/ranks.h"
#include "tests/support/refusal.h"

namespace lockstep::comm {
namespace {

using reference::Bytes;

std::unique_ptr<ProcessGroup> make_over(const std::string& sockets) {
  ::setenv("LOCKSTEP_SHM_SOCKETS", sockets.c_str(), 1);
  GroupOptions options = testing::group_options();
  options.timeout_seconds = 20;
  return make_group(testing::world(), options);
}

/// Of ranks that are on `sockets` sockets, equal parts of them.
Bytes expected(DType dtype, ReduceOp op, std::size_t count, std::uint64_t seed, int ranks, int sockets) {
  std::vector<std::vector<int>> ranks_of(static_cast<std::size_t>(sockets));
  for (int r = 0; r < ranks; ++r) ranks_of[static_cast<std::size_t>(r * sockets / ranks)].push_back(r);
  return reference::reduce_rounding_hosts(dtype, op, reference::contributions(dtype, count, seed, ranks), ranks_of);
}

struct Reduction {
  Reduction(ProcessGroup& on, DType type, ReduceOp with, std::size_t elements, std::uint64_t number)
      : group(on), dtype(type), op(with), count(elements), seed(number), arena(on.allocate(count * size_of(dtype))) {
    const Bytes mine = reference::contribution(dtype, count, seed, group.rank());
    std::copy(mine.begin(), mine.end(), arena->data());
  }
  void start() { work = group.all_reduce({.arena = arena.get(), .count = count, .dtype = dtype}, op); }
  void check(int sockets) {
    work.wait_host();
    const Bytes wanted = expected(dtype, op, count, seed, group.size(), sockets);
    EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), arena->data()))
        << name_of(op) << " of " << count << ' ' << name_of(dtype) << " on " << sockets << " sockets";
  }
  ProcessGroup& group;
  DType dtype;
  ReduceOp op;
  std::size_t count;
  std::uint64_t seed;
  std::unique_ptr<Arena> arena;
  Work work;
};

TEST(TwoLevels, SumWithinSocketsAndThenAcross) {
  for (const int sockets : {1, 2, 3, 64}) {
    const auto group = make_over(std::to_string(sockets));
    const int parts = std::min(sockets, group->size());
    std::uint64_t seed = 0;
    for (const std::size_t count : {20'000u, 65'537u, 300'003u})
      for (const DType dtype : {DType::kF32, DType::kF64, DType::kI32}) {
        Reduction one(*group, dtype, ReduceOp::kSum, count, ++seed);
        one.start();
        one.check(parts);
      }
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProd}) {
      Reduction one(*group, DType::kF32, op, 50'000, ++seed);
      one.start();
      one.check(parts);
    }
    group->shutdown();
  }
}

// In one level: results that are rounded once, and few bytes.
TEST(TwoLevels, CollapseWhereTheyCostBitsOrTime) {
  const auto group = make_over("2");
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Reduction one(*group, dtype, ReduceOp::kSum, 100'000, 7);
    one.start();
    one.check(1);
  }
  for (const std::size_t count : {1u, 256u, 257u, 16'384u}) {
    Reduction one(*group, DType::kF32, ReduceOp::kSum, count, count);
    one.start();
    one.check(1);
  }
  group->shutdown();
}

TEST(TwoLevels, SeveralOperationsUnderWay) {
  const auto group = make_over("2");
  for (int round = 0; round < 20; ++round) {
    std::vector<std::unique_ptr<Reduction>> all;
    for (std::uint64_t i = 0; i < 6; ++i)
      all.push_back(
          std::make_unique<Reduction>(*group, DType::kF32, ReduceOp::kSum, i % 2 == 0 ? 40'000 + i : 100 + i, i));
    for (const auto& one : all) one->start();
    for (std::size_t i = 0; i < all.size(); ++i) all[i]->check(i % 2 == 0 ? 2 : 1);
  }
  group->shutdown();
}

TEST(TwoLevels, InvalidSettings) {
  for (const char* value : {"0", "-1", "65", "two", ""})
    EXPECT_REFUSED("is no number of sockets", make_over(value)) << value;
  const int rank = testing::world().rank;
  EXPECT_REFUSED("has another LOCKSTEP_SHM_SOCKETS than this one", make_over(rank == 1 ? "3" : "2"));
  // Wherever ranks may run: it is as good as none.
  const auto group = make_over("auto");
  Reduction one(*group, DType::kF32, ReduceOp::kSum, 50'000, 3);
  one.start();
  one.work.wait_host();
  group->shutdown();
}

TEST(TwoLevels, CollapseWhereTheyMoveNoFewerBytes) {
  EXPECT_FALSE(SocketLevels({0, 0, 0}, 1).help());
  EXPECT_FALSE(SocketLevels({4, 7, 1}, 1).help());
  EXPECT_TRUE(SocketLevels({1, 0, 1}, 2).help());
}

}  // namespace
}  // namespace lockstep::comm
