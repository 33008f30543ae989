// The C interface on several ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::bindings {
namespace {

using ::testing::HasSubstr;

class CRanks : public ::testing::Test {
 protected:
  void start(double timeout_seconds = 30) {
    lockstep_group_options options;
    check(lockstep_group_options_init(&options, sizeof options));
    options.timeout_seconds = timeout_seconds;
    check(lockstep_group_make(&options, &group_));
    check(lockstep_group_rank(group_, &rank_));
    check(lockstep_group_size(group_, &size_));
  }
  static void check(int code) { ASSERT_EQ(code, LOCKSTEP_OK) << lockstep_last_error(); }
  void end() {
    check(lockstep_group_shutdown(group_));
    check(lockstep_group_destroy(group_));
  }

  lockstep_group* group_ = nullptr;
  int rank_ = 0, size_ = 0;
};

TEST_F(CRanks, Everything) {
  start();
  const auto ranks = static_cast<std::size_t>(size_), own = static_cast<std::size_t>(rank_);
  // Over the edges of what is copied at a time.
  for (const std::size_t count : {0u, 1u, 7u, 1'000u, 700'001u}) {
    std::vector<std::int32_t> values(count), all(count * ranks, -1), part(count, -1);
    for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<std::int32_t>(i % 1000) + rank_;
    check(lockstep_all_gather(group_, values.data(), count, LOCKSTEP_I32, all.data()));
    std::size_t wrong = 0;
    for (std::size_t r = 0; r < ranks; ++r)
      for (std::size_t i = 0; i < count; ++i)
        wrong += all[r * count + i] != static_cast<std::int32_t>(i % 1000 + r) ? 1 : 0;
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int32_t>(i) + rank_;
    check(lockstep_reduce_scatter(group_, all.data(), part.data(), count, LOCKSTEP_I32, LOCKSTEP_MAX));
    for (std::size_t i = 0; i < count; ++i)
      wrong += part[i] != static_cast<std::int32_t>(own * count + i + ranks - 1) ? 1 : 0;
    check(lockstep_all_reduce(group_, values.data(), count, LOCKSTEP_I32, LOCKSTEP_SUM));
    for (std::size_t i = 0; i < count; ++i)
      wrong += values[i] != static_cast<std::int32_t>(i % 1000 * ranks + ranks * (ranks - 1) / 2) ? 1 : 0;
    values.assign(count, rank_ + 1);
    check(lockstep_reduce(group_, values.data(), count, LOCKSTEP_I32, LOCKSTEP_MAX, 0));
    for (const auto value : values) wrong += value != (rank_ == 0 ? size_ : rank_ + 1) ? 1 : 0;
    values.assign(count, rank_);
    check(lockstep_broadcast(group_, values.data(), count, LOCKSTEP_I32, size_ - 1));
    for (const auto value : values) wrong += value != size_ - 1 ? 1 : 0;
    EXPECT_EQ(wrong, 0u) << count;
  }

  // A part for each rank, of one size and of others; and a ring.
  std::vector<std::int32_t> out(3 * ranks), in(3 * ranks, -1);
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = 100 * rank_ + static_cast<std::int32_t>(i);
  check(lockstep_all_to_all(group_, out.data(), in.data(), 3, LOCKSTEP_I32));
  for (std::size_t i = 0; i < in.size(); ++i)
    EXPECT_EQ(in[i], static_cast<std::int32_t>(100 * (i / 3) + 3 * own + i % 3));
  std::vector<std::size_t> out_counts(ranks, 2), in_counts(ranks, own == 0 ? 0 : 2);
  out_counts[0] = 0;
  std::ranges::fill(in, -1);
  check(lockstep_all_to_all_v(group_, out.data(), out_counts.data(), in.data(), in_counts.data(), LOCKSTEP_I32));
  for (std::size_t i = 0; own > 0 && i < 2 * ranks; ++i)
    EXPECT_EQ(in[i], static_cast<std::int32_t>(100 * (i / 2) + 2 * (own - 1) + i % 2));
  const int next = (rank_ + 1) % size_, before = (rank_ + size_ - 1) % size_;
  lockstep_transfer sent{}, received{};
  check(lockstep_isend(group_, out.data(), 3, LOCKSTEP_I32, next, &sent));
  check(lockstep_irecv(group_, in.data(), 3, LOCKSTEP_I32, before, &received));
  check(lockstep_transfer_wait(received));
  int is_done = 0;
  while (is_done == 0) check(lockstep_transfer_done(sent, &is_done));
  check(lockstep_transfer_wait(sent));
  EXPECT_EQ(in[2], 100 * before + 2);
  EXPECT_EQ(lockstep_transfer_wait(sent), LOCKSTEP_ERROR_USAGE);
  if (rank_ == 0) check(lockstep_send(group_, out.data(), 1, LOCKSTEP_I32, 1));
  if (rank_ == 1) check(lockstep_recv(group_, in.data(), 1, LOCKSTEP_I32, 0));

  lockstep_arena* arena = nullptr;
  check(lockstep_arena_allocate(group_, 8192, &arena));
  void* data = nullptr;
  check(lockstep_arena_data(arena, &data));
  auto* const floats = static_cast<float*>(data);
  for (int i = 0; i < 2000; ++i) floats[i] = 2;
  lockstep_work first{}, second{};
  check(lockstep_arena_all_reduce(arena, 0, 1000, LOCKSTEP_F32, LOCKSTEP_PROD, &first));
  check(lockstep_arena_all_reduce(arena, 4000, 1000, LOCKSTEP_F32, LOCKSTEP_SUM, &second));
  check(lockstep_work_wait(second));
  int done = 0;
  check(lockstep_work_done(first, &done));
  EXPECT_EQ(done, 1);
  EXPECT_EQ(floats[999], static_cast<float>(1 << size_));
  EXPECT_EQ(floats[1999], static_cast<float>(2 * size_));
  check(lockstep_arena_destroy(arena));

  lockstep_group* part = nullptr;
  check(lockstep_group_split(group_, rank_ == 0 ? -1 : 0, -rank_, &part));
  if (rank_ == 0) {
    EXPECT_EQ(part, nullptr);
  } else {
    int job_rank = 0;
    check(lockstep_group_job_rank(part, 0, &job_rank));
    EXPECT_EQ(job_rank, size_ - 1);
    double sum = 1;
    check(lockstep_all_reduce(part, &sum, 1, LOCKSTEP_F64, LOCKSTEP_SUM));
    EXPECT_EQ(sum, size_ - 1);
    check(lockstep_group_shutdown(part));
    check(lockstep_group_destroy(part));
  }
  check(lockstep_barrier(group_));
  end();
}

TEST_F(CRanks, TheReducer) {
  start();
  const lockstep_slot slots[] = {{"a", 3}, {"b", 100'000}, {"c", 1}};
  lockstep_reducer_options options;
  check(lockstep_reducer_options_init(&options, sizeof options));
  options.bucket_bytes = options.first_bucket_bytes = 1024;
  options.find_unused = 1;
  lockstep_reducer* reducer = nullptr;
  check(lockstep_reducer_make(group_, slots, 3, &options, &reducer));
  for (int step = 0; step < 3; ++step) {
    check(lockstep_reducer_begin_step(reducer, step));
    std::vector<float*> gradients(3);
    for (std::size_t slot = 3; slot-- > 0;) {
      std::size_t count = 0;
      check(lockstep_reducer_gradient(reducer, slot, &gradients[slot], &count));
      ASSERT_EQ(count, slots[slot].count);
      for (std::size_t i = 0; i < count; ++i) gradients[slot][i] = static_cast<float>(rank_ + step);
      // The first rank has no "b", and nobody has "c".
      if (slot == 2 || (slot == 1 && rank_ == 0))
        check(lockstep_reducer_mark_unused(reducer, slot));
      else
        check(lockstep_reducer_mark_ready(reducer, slot));
    }
    std::vector<std::size_t> seen;
    const auto note = [](void* user, const std::size_t* some, std::size_t count) {
      static_cast<std::vector<std::size_t>*>(user)->insert(static_cast<std::vector<std::size_t>*>(user)->end(), some,
                                                           some + count);
      return 0;
    };
    check(lockstep_reducer_finish(reducer, note, &seen));
    EXPECT_THAT(seen, ::testing::UnorderedElementsAre(0u, 1u));
    const int sum = size_ * (size_ - 1) / 2;
    EXPECT_EQ(gradients[0][2], static_cast<float>(sum + size_ * step));
    EXPECT_EQ(gradients[1][99'999], static_cast<float>(sum + (size_ - 1) * step));
  }
  check(lockstep_reducer_destroy(reducer));
  end();
}

// One rank is in another operation: every rank learns of it, with the code of ranks that do not agree.
TEST_F(CRanks, OutOfStep) {
  start();
  float values[2] = {1, 1};
  EXPECT_EQ(lockstep_all_reduce(group_, values, rank_ == 0 ? 1 : 2, LOCKSTEP_F32, LOCKSTEP_SUM),
            LOCKSTEP_ERROR_TIMEOUT);
  const std::string first = lockstep_last_error();
  EXPECT_THAT(first, HasSubstr("out of step"));
  EXPECT_EQ(lockstep_barrier(group_), LOCKSTEP_ERROR_TIMEOUT);
  EXPECT_EQ(lockstep_last_error(), first);
  EXPECT_EQ(lockstep_group_destroy(group_), LOCKSTEP_OK);
}

}  // namespace
}  // namespace lockstep::bindings
