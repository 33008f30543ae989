// Sends, receives and all-to-all, on every kind of group.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "base/error.h"
#include "lockstep/comm/make_group.h"
#include "tests/support/ranks.h"
#include "tests/support/refusal.h"

namespace lockstep::comm {
namespace {

using testing::group;

int me() { return group().rank(); }
int ranks() { return group().size(); }

/// Values that depend on who sends them to whom, and which message they are of.
template <class T>
std::vector<T> message(std::size_t count, int from, int to, int number) {
  std::vector<T> values(count);
  for (std::size_t i = 0; i < count; ++i)
    values[i] = static_cast<T>((static_cast<int>(i % 97) + 13 * from + 7 * to + 3 * number) % 120);
  return values;
}

template <class T>
void expect_exchanges_with_all() {
  const std::vector<std::size_t> counts{0, 1, 7, 1000, 100'003};
  std::vector<std::vector<T>> sent, received;
  std::vector<Transfer> transfers;
  for (int other = 0; other < ranks(); ++other)
    for (std::size_t i = 0; other != me() && i < counts.size(); ++i) {
      sent.push_back(message<T>(counts[i], me(), other, static_cast<int>(i)));
      received.emplace_back(counts[i]);
      transfers.push_back(group().isend(std::span(sent.back()), other));
      transfers.push_back(group().irecv(std::span(received.back()), other));
    }
  for (const Transfer& transfer : transfers) transfer.wait();
  std::size_t at = 0;
  for (int other = 0; other < ranks(); ++other)
    for (std::size_t i = 0; other != me() && i < counts.size(); ++i)
      EXPECT_EQ(received[at++], message<T>(counts[i], other, me(), static_cast<int>(i)));
}

TEST(Pairs, EachWithEachOtherOfAllTypes) {
  expect_exchanges_with_all<float>();
  expect_exchanges_with_all<double>();
  expect_exchanges_with_all<std::int32_t>();
  expect_exchanges_with_all<std::int64_t>();
  expect_exchanges_with_all<std::uint8_t>();
}

// Everybody sends before it receives, and far more than a stream holds.
TEST(Pairs, ARing) {
  if (ranks() == 1) GTEST_SKIP() << "a ring takes two";
  const int next = (me() + 1) % ranks(), before = (me() + ranks() - 1) % ranks();
  constexpr std::size_t kCount = 700'001;
  const auto mine = message<float>(kCount, me(), next, 0);
  std::vector<float> theirs(kCount);
  const Transfer out = group().isend(std::span(mine), next);
  const Transfer in = group().irecv(std::span(theirs), before);
  out.wait();
  in.wait();
  EXPECT_TRUE(out.done() && in.done());
  EXPECT_EQ(theirs, message<float>(kCount, before, me(), 0));
}

// A token goes round, blocking: each waits for the one before it.
TEST(Pairs, OneAfterTheOther) {
  if (ranks() == 1) GTEST_SKIP() << "a round takes two";
  for (int round = 0; round < 20; ++round) {
    std::vector<std::int64_t> token{round};
    if (me() > 0) group().recv(std::span(token), me() - 1);
    token[0] += me();
    group().send(std::span(token), (me() + 1) % ranks());
    if (me() > 0) continue;
    group().recv(std::span(token), ranks() - 1);
    EXPECT_EQ(token[0], round + ranks() * (ranks() - 1) / 2);
  }
}

// Collectives and transfers are under way at once, and neither waits for the other.
TEST(Pairs, BesideCollectives) {
  if (ranks() == 1) GTEST_SKIP() << "a transfer takes two";
  const auto arena = group().allocate(1 << 20);
  const auto numbers = arena->view<float>(0, 200'000);
  for (int round = 0; round < 5; ++round) {
    std::ranges::fill(numbers, static_cast<float>(me()));
    std::vector<float> mine(50'000, static_cast<float>(round)), theirs(mine.size());
    Transfer transfer;
    if (me() == 0) transfer = group().irecv(std::span(theirs), ranks() - 1);
    const Work work = group().all_reduce({arena.get(), 0, numbers.size(), DType::kF32}, ReduceOp::kSum);
    if (me() == ranks() - 1) transfer = group().isend(std::span(mine), 0);
    work.wait_host();
    transfer.wait();
    EXPECT_EQ(std::ranges::count(numbers, static_cast<float>(ranks() * (ranks() - 1) / 2)), 200'000);
    if (me() == 0) {
      EXPECT_EQ(theirs, mine);
    }
  }
}

// What is small leaves before the receiver has come, and is there afterwards.
TEST(Pairs, ASendBeforeItsReceive) {
  if (ranks() == 1) GTEST_SKIP() << "a transfer takes two";
  std::vector<std::int32_t> few{1, 2, 3};
  if (me() == 1) group().send(std::span<const std::int32_t>(few), 0);
  group().barrier().wait_host();
  if (me() == 0) {
    std::ranges::fill(few, 0);
    group().recv(std::span(few), 1);
    EXPECT_THAT(few, ::testing::ElementsAre(1, 2, 3));
  }
  group().barrier().wait_host();
}

// Until it is done, and no longer.
TEST(Pairs, WhatATransferKeeps) {
  if (ranks() == 1) GTEST_SKIP() << "a transfer takes two";
  constexpr std::size_t kCount = 100'003;
  const int next = (me() + 1) % ranks(), before = (me() + ranks() - 1) % ranks();
  auto mine = std::make_shared<std::vector<float>>(message<float>(kCount, me(), next, 4));
  auto theirs = std::make_shared<std::vector<float>>(kCount);
  const std::weak_ptr<void> of_send = mine, of_receive = theirs;
  const Transfer out = group().isend(mine->data(), kCount, DType::kF32, next, mine);
  mine.reset();
  const Transfer in = group().irecv(theirs->data(), kCount, DType::kF32, before, theirs);
  in.wait();
  out.wait();
  EXPECT_EQ(*theirs, message<float>(kCount, before, me(), 4));
  theirs.reset();
  EXPECT_TRUE(of_send.expired() && of_receive.expired());
}

TEST(Pairs, InPartsOfTheGroup) {
  if (group().name() == "mpi" && testing::group_options().progress == GroupOptions::Progress::kThread)
    GTEST_SKIP() << "a group whose own thread calls MPI is not divided";
  if (group().device().kind == DeviceKind::kCuda) GTEST_SKIP() << "groups of GPUs are not divided";
  const auto part = group().split(me() % 2, -me());
  if (part->size() > 1) {
    const int next = (part->rank() + 1) % part->size(), before = (part->rank() + part->size() - 1) % part->size();
    const std::vector<float> mine(100'000, static_cast<float>(me()));
    std::vector<float> theirs(mine.size());
    const Transfer out = part->isend(std::span(mine), next);
    part->recv(std::span(theirs), before);
    out.wait();
    EXPECT_EQ(std::ranges::count(theirs, static_cast<float>(part->job_rank(before))), 100'000);
  }
  part->shutdown();
}

TEST(AllToAll, PartsOfOneSize) {
  for (const std::size_t count : {0u, 1u, 5u, 30'000u}) {
    std::vector<float> mine, theirs(count * static_cast<std::size_t>(ranks()));
    for (int to = 0; to < ranks(); ++to)
      std::ranges::copy(message<float>(count, me(), to, 1), std::back_inserter(mine));
    group().all_to_all(std::span<const float>(mine), std::span(theirs));
    for (int from = 0; from < ranks(); ++from)
      EXPECT_TRUE(std::ranges::equal(std::span(theirs).subspan(count * static_cast<std::size_t>(from), count),
                                     message<float>(count, from, me(), 1)));
  }
}

TEST(AllToAll, PartsOfOtherSizesOrNone) {
  const auto count_of = [](int from, int to) { return static_cast<std::size_t>((from + 2 * to) % 3 * 40'000); };
  std::vector<std::size_t> out, in;
  std::vector<std::int32_t> mine, expected;
  for (int other = 0; other < ranks(); ++other) {
    out.push_back(count_of(me(), other));
    in.push_back(count_of(other, me()));
    std::ranges::copy(message<std::int32_t>(out.back(), me(), other, 2), std::back_inserter(mine));
    std::ranges::copy(message<std::int32_t>(in.back(), other, me(), 2), std::back_inserter(expected));
  }
  std::vector<std::int32_t> theirs(expected.size());
  group().all_to_all(std::span(mine), out, std::span(theirs), in);
  EXPECT_EQ(theirs, expected);
}

// Refused before anything is sent: the group works as before.
TEST(Pairs, Misuse) {
  std::vector<float> values(static_cast<std::size_t>(2 * ranks()));
  const std::vector<std::size_t> none, each(static_cast<std::size_t>(ranks()), 2);
  std::vector<std::size_t> uneven = each;
  uneven[static_cast<std::size_t>(me())] = 1;
  const std::span<float> all(values);
  const auto expect_refused = [](const auto& work, const char* text) {
    EXPECT_THAT(testing::refusal_of(work), ::testing::HasSubstr(text));
  };
  expect_refused([&] { group().isend(all, me()); }, "sends to rank");
  expect_refused([&] { group().irecv(all, ranks()); }, "receives from rank");
  expect_refused([&] { group().irecv(all, -1); }, "receives from rank -1");
  expect_refused([&] { group().all_to_all(all, all.first(values.size() - 1)); }, "into a buffer of");
  expect_refused([&] { group().all_to_all(all, none, all, each); }, "sends");
  expect_refused([&] { group().all_to_all(all, each, all, uneven); }, "receives");
  expect_refused([&] { group().all_to_all_host(values.data(), each, values.data(), uneven, DType::kF32); },
                 "for itself are 2 and 1");
  group().barrier().wait_host();
}

}  // namespace
}  // namespace lockstep::comm
