// The C interface in one process: what it refuses, and how.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <array>
#include <cstring>
#include <limits>
#include <string>
#include <thread>

namespace lockstep::bindings {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// The text of a refusal, which must be the caller's fault and say what to do.
std::string refusal(int code) {
  EXPECT_EQ(code, LOCKSTEP_ERROR_USAGE);
  const std::string line = lockstep_last_error();
  EXPECT_THAT(line, HasSubstr(" → "));
  EXPECT_EQ(lockstep_last_error_is_of_peer(), 0);
  return line;
}

class CInterface : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(lockstep_group_make(nullptr, &group_), LOCKSTEP_OK) << lockstep_last_error(); }
  void TearDown() override { EXPECT_EQ(lockstep_group_destroy(group_), LOCKSTEP_OK); }
  lockstep_arena* allocate(std::size_t bytes) {
    lockstep_arena* arena = nullptr;
    EXPECT_EQ(lockstep_arena_allocate(group_, bytes, &arena), LOCKSTEP_OK);
    return arena;
  }

  lockstep_group* group_ = nullptr;
};

TEST_F(CInterface, AGroupOfOne) {
  EXPECT_EQ(lockstep_abi_version(), LOCKSTEP_ABI_VERSION);
  int rank = -1, size = -1, job_rank = -1;
  const char* backend = nullptr;
  EXPECT_EQ(lockstep_group_rank(group_, &rank), LOCKSTEP_OK);
  EXPECT_EQ(lockstep_group_size(group_, &size), LOCKSTEP_OK);
  EXPECT_EQ(lockstep_group_job_rank(group_, 0, &job_rank), LOCKSTEP_OK);
  EXPECT_EQ(lockstep_group_backend(group_, &backend), LOCKSTEP_OK);
  EXPECT_EQ(rank, 0);
  EXPECT_EQ(size, 1);
  EXPECT_EQ(job_rank, 0);
  EXPECT_STREQ(backend, "self");
  std::array<float, 3> values = {1, 2, 3}, gathered{}, reduced{};
  EXPECT_EQ(lockstep_all_reduce(group_, values.data(), 3, LOCKSTEP_F32, LOCKSTEP_PROD), LOCKSTEP_OK);
  EXPECT_EQ(lockstep_all_gather(group_, values.data(), 3, LOCKSTEP_F32, gathered.data()), LOCKSTEP_OK);
  EXPECT_EQ(lockstep_reduce_scatter(group_, values.data(), reduced.data(), 3, LOCKSTEP_F32, LOCKSTEP_MIN), LOCKSTEP_OK);
  EXPECT_EQ(gathered, values);
  EXPECT_EQ(reduced, values);
  EXPECT_EQ(lockstep_all_to_all(group_, values.data(), gathered.data(), 3, LOCKSTEP_F32), LOCKSTEP_OK);
  EXPECT_EQ(gathered, values);
  EXPECT_THAT(refusal(lockstep_send(group_, values.data(), 3, LOCKSTEP_F32, 0)), HasSubstr("rank 0 sends to rank 0"));
  EXPECT_THAT(refusal(lockstep_recv(group_, values.data(), 3, LOCKSTEP_F32, 1)), HasSubstr("receives from rank 1"));
  EXPECT_THAT(refusal(lockstep_transfer_wait({group_, 5})), HasSubstr("transfer 5, of which this group knows nothing"));
  EXPECT_EQ(lockstep_barrier(group_), LOCKSTEP_OK);
  EXPECT_EQ(lockstep_all_reduce(group_, nullptr, 0, LOCKSTEP_F32, LOCKSTEP_SUM), LOCKSTEP_OK);
}

TEST_F(CInterface, Null) {
  int number = 7;
  float value = 0;
  EXPECT_THAT(refusal(lockstep_group_make(nullptr, nullptr)), HasSubstr("group is NULL"));
  EXPECT_THAT(refusal(lockstep_group_rank(nullptr, &number)), HasSubstr("the group is NULL"));
  EXPECT_THAT(refusal(lockstep_group_rank(group_, nullptr)), HasSubstr("rank is NULL"));
  EXPECT_THAT(refusal(lockstep_all_reduce(nullptr, &value, 1, LOCKSTEP_F32, LOCKSTEP_SUM)), HasSubstr("NULL"));
  EXPECT_THAT(refusal(lockstep_all_reduce(group_, nullptr, 1, LOCKSTEP_F32, LOCKSTEP_SUM)),
              HasSubstr("values is NULL"));
  EXPECT_THAT(refusal(lockstep_all_gather(group_, &value, 1, LOCKSTEP_F32, nullptr)), HasSubstr("all is NULL"));
  EXPECT_THAT(refusal(lockstep_arena_allocate(group_, 64, nullptr)), HasSubstr("arena is NULL"));
  EXPECT_THAT(refusal(lockstep_arena_data(nullptr, nullptr)), HasSubstr("the arena is NULL"));
  EXPECT_THAT(refusal(lockstep_work_wait({nullptr, 1})), HasSubstr("the group is NULL"));
  EXPECT_THAT(refusal(lockstep_group_options_init(nullptr, 8)), HasSubstr("options is NULL"));
  lockstep_transfer transfer{};
  const std::size_t one = 1;
  EXPECT_THAT(refusal(lockstep_send(group_, nullptr, 1, LOCKSTEP_F32, 1)), HasSubstr("values is NULL"));
  EXPECT_THAT(refusal(lockstep_isend(group_, &value, 1, LOCKSTEP_F32, 1, nullptr)), HasSubstr("transfer is NULL"));
  EXPECT_THAT(refusal(lockstep_transfer_wait(transfer)), HasSubstr("the group is NULL"));
  EXPECT_THAT(refusal(lockstep_all_to_all(group_, &value, nullptr, 1, LOCKSTEP_F32)), HasSubstr("to is NULL"));
  EXPECT_THAT(refusal(lockstep_all_to_all_v(group_, &value, nullptr, &value, &one, LOCKSTEP_F32)),
              HasSubstr("from_counts is NULL"));
  lockstep_reducer* reducer = nullptr;
  EXPECT_THAT(refusal(lockstep_reducer_make(group_, nullptr, 1, nullptr, &reducer)), HasSubstr("slots is NULL"));
  const lockstep_slot nameless = {nullptr, 4};
  EXPECT_THAT(refusal(lockstep_reducer_make(group_, &nameless, 1, nullptr, &reducer)), HasSubstr("name is NULL"));
  EXPECT_THAT(refusal(lockstep_reducer_finish(nullptr, nullptr, nullptr)), HasSubstr("the reducer is NULL"));
  EXPECT_EQ(reducer, nullptr);
  EXPECT_EQ(number, 7);
  EXPECT_EQ(lockstep_group_destroy(nullptr), LOCKSTEP_OK);
  EXPECT_EQ(lockstep_arena_destroy(nullptr), LOCKSTEP_OK);
  EXPECT_EQ(lockstep_reducer_destroy(nullptr), LOCKSTEP_OK);
}

TEST_F(CInterface, UseAfterDestroy) {
  lockstep_group* other = nullptr;
  ASSERT_EQ(lockstep_group_split(group_, 0, 0, &other), LOCKSTEP_OK);
  lockstep_arena* arena = nullptr;
  ASSERT_EQ(lockstep_arena_allocate(other, 64, &arena), LOCKSTEP_OK);
  const lockstep_slot slot = {"w", 4};
  lockstep_reducer* reducer = nullptr;
  ASSERT_EQ(lockstep_reducer_make(other, &slot, 1, nullptr, &reducer), LOCKSTEP_OK);
  lockstep_work work{};
  ASSERT_EQ(lockstep_arena_all_reduce(arena, 0, 4, LOCKSTEP_F32, LOCKSTEP_SUM, &work), LOCKSTEP_OK);
  EXPECT_EQ(lockstep_work_wait(work), LOCKSTEP_OK);
  ASSERT_EQ(lockstep_group_destroy(other), LOCKSTEP_OK);

  int rank = 0;
  EXPECT_THAT(refusal(lockstep_group_destroy(other)), HasSubstr("a group that has been destroyed"));
  EXPECT_THAT(refusal(lockstep_group_rank(other, &rank)), HasSubstr("a group that has been destroyed"));
  EXPECT_THAT(refusal(lockstep_work_wait(work)), HasSubstr("a group that has been destroyed"));
  EXPECT_THAT(refusal(lockstep_arena_all_reduce(arena, 0, 4, LOCKSTEP_F32, LOCKSTEP_SUM, &work)),
              HasSubstr("a group that has been destroyed"));
  EXPECT_THAT(refusal(lockstep_reducer_begin_step(reducer, 0)), HasSubstr("a group that has been destroyed"));
  // What outlives its group is destroyed all the same; and no new handle is taken for an old one.
  EXPECT_EQ(lockstep_reducer_destroy(reducer), LOCKSTEP_OK);
  EXPECT_EQ(lockstep_arena_destroy(arena), LOCKSTEP_OK);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(lockstep_arena_destroy(allocate(64)), LOCKSTEP_OK);
  void* data = nullptr;
  EXPECT_THAT(refusal(lockstep_arena_data(arena, &data)), HasSubstr("an arena that has been destroyed"));
  EXPECT_THAT(refusal(lockstep_reducer_begin_step(reducer, 0)), HasSubstr("a reducer that has been destroyed"));
  EXPECT_EQ(data, nullptr);
}

TEST_F(CInterface, AfterTheEnd) {
  ASSERT_EQ(lockstep_group_shutdown(group_), LOCKSTEP_OK);
  EXPECT_THAT(refusal(lockstep_barrier(group_)), HasSubstr("a group that has been shut down"));
  EXPECT_THAT(refusal(lockstep_group_shutdown(group_)), HasSubstr("a group that has been shut down"));
}

TEST_F(CInterface, InvalidNumbers) {
  float value = 1;
  EXPECT_THAT(refusal(lockstep_all_reduce(group_, &value, 1, 7, LOCKSTEP_SUM)),
              HasSubstr("dtype 7, where 0 to 6 are known"));
  EXPECT_THAT(refusal(lockstep_all_reduce(group_, &value, 1, -1, LOCKSTEP_SUM)), HasSubstr("dtype -1"));
  EXPECT_THAT(refusal(lockstep_all_reduce(group_, &value, 1, LOCKSTEP_F32, 4)), HasSubstr("op 4, where 0 to 3"));
  EXPECT_THAT(refusal(lockstep_broadcast(group_, &value, 1, LOCKSTEP_F32, 1)), HasSubstr("as its root"));
  EXPECT_THAT(refusal(lockstep_all_reduce(group_, &value, std::numeric_limits<std::size_t>::max() / 2, LOCKSTEP_F32,
                                          LOCKSTEP_SUM)),
              HasSubstr("values of f32"));
  lockstep_arena* arena = allocate(64);
  EXPECT_THAT(refusal(lockstep_arena_all_reduce(arena, 4, 16, LOCKSTEP_F32, LOCKSTEP_SUM, nullptr)),
              HasSubstr("does not fit an arena of 64 bytes"));
  EXPECT_THAT(refusal(lockstep_work_wait({group_, 1000})), HasSubstr("work 1000"));
  EXPECT_THAT(refusal(lockstep_work_wait({group_, 0})), HasSubstr("work 0"));
  std::size_t first = 0, count = 0;
  EXPECT_THAT(refusal(lockstep_slice(group_, 10, LOCKSTEP_F32, 1, &first, &count)),
              HasSubstr("rank 1 of a group of 1"));
  EXPECT_EQ(lockstep_slice(group_, 10, LOCKSTEP_F32, 0, &first, &count), LOCKSTEP_OK);
  EXPECT_EQ(count, 10u);
  EXPECT_EQ(lockstep_arena_destroy(arena), LOCKSTEP_OK);
}

TEST_F(CInterface, Options) {
  lockstep_group_options options;
  std::memset(&options, 0xee, sizeof options);
  ASSERT_EQ(lockstep_group_options_init(&options, sizeof options), LOCKSTEP_OK);
  EXPECT_EQ(options.size, sizeof options);
  EXPECT_EQ(options.timeout_seconds, 300);
  EXPECT_STREQ(options.backend, "auto");
  lockstep_group* other = nullptr;
  const auto make = [&] { return lockstep_group_make(&options, &other); };
  options.backend = "trumpets";
  EXPECT_THAT(refusal(make()), HasSubstr("trumpets"));
  options.backend = nullptr;
  EXPECT_THAT(refusal(make()), HasSubstr("options.backend is NULL"));
  // A program of an older version, which knows no more than the first fields: the rest are the defaults.
  options.size = offsetof(lockstep_group_options, backend);
  EXPECT_EQ(make(), LOCKSTEP_OK) << lockstep_last_error();
  EXPECT_EQ(lockstep_group_destroy(other), LOCKSTEP_OK);
  options.size = 0;
  EXPECT_THAT(refusal(make()), HasSubstr("lockstep_group_options_init"));
  options.size = sizeof options;
  options.backend = "auto";
  options.progress = 3;
  EXPECT_THAT(refusal(make()), HasSubstr("options.progress 3"));
}

TEST_F(CInterface, OrderOfReducerCalls) {
  const lockstep_slot slots[] = {{"a", 4}, {"b", 100}};
  lockstep_reducer* reducer = nullptr;
  ASSERT_EQ(lockstep_reducer_make(group_, slots, 2, nullptr, &reducer), LOCKSTEP_OK);
  EXPECT_THAT(refusal(lockstep_reducer_mark_ready(reducer, 0)), HasSubstr("begin_step"));
  ASSERT_EQ(lockstep_reducer_begin_step(reducer, 3), LOCKSTEP_OK);
  EXPECT_THAT(refusal(lockstep_reducer_mark_ready(reducer, 2)), HasSubstr("slot"));
  float* values = nullptr;
  std::size_t count = 0;
  ASSERT_EQ(lockstep_reducer_gradient(reducer, 1, &values, &count), LOCKSTEP_OK);
  ASSERT_EQ(count, 100u);
  values[99] = 5;
  EXPECT_EQ(lockstep_reducer_mark_ready(reducer, 1), LOCKSTEP_OK);
  EXPECT_EQ(lockstep_reducer_poll(reducer), LOCKSTEP_OK);
  EXPECT_EQ(lockstep_reducer_mark_ready(reducer, 0), LOCKSTEP_OK);
  const auto answers = [](void* user, const std::size_t*, std::size_t) { return *static_cast<int*>(user); };
  int answer = 0;
  EXPECT_EQ(lockstep_reducer_finish(reducer, answers, &answer), LOCKSTEP_OK);
  EXPECT_EQ(values[99], 5);
  answer = 9;
  ASSERT_EQ(lockstep_reducer_begin_step(reducer, 4), LOCKSTEP_OK);
  for (const std::size_t slot : {0u, 1u}) EXPECT_EQ(lockstep_reducer_mark_ready(reducer, slot), LOCKSTEP_OK);
  EXPECT_THAT(refusal(lockstep_reducer_finish(reducer, answers, &answer)), HasSubstr("on_bucket returned 9"));
  EXPECT_EQ(lockstep_reducer_destroy(reducer), LOCKSTEP_OK);
}

TEST_F(CInterface, ACallbackThatDestroysTheGroup) {
  const lockstep_slot slots[] = {{"a", 4}, {"b", 100}};
  lockstep_group* group = nullptr;
  lockstep_reducer* reducer = nullptr;
  ASSERT_EQ(lockstep_group_make(nullptr, &group), LOCKSTEP_OK);
  ASSERT_EQ(lockstep_reducer_make(group, slots, 2, nullptr, &reducer), LOCKSTEP_OK);
  ASSERT_EQ(lockstep_reducer_begin_step(reducer, 0), LOCKSTEP_OK);
  for (const std::size_t slot : {0u, 1u}) EXPECT_EQ(lockstep_reducer_mark_ready(reducer, slot), LOCKSTEP_OK);
  const auto destroys = [](void* user, const std::size_t*, std::size_t) {
    return lockstep_group_destroy(static_cast<lockstep_group*>(user));
  };
  EXPECT_EQ(lockstep_reducer_finish(reducer, destroys, group), LOCKSTEP_OK);
  EXPECT_THAT(refusal(lockstep_reducer_begin_step(reducer, 1)), HasSubstr("group"));
  EXPECT_EQ(lockstep_reducer_destroy(reducer), LOCKSTEP_OK);
}

TEST_F(CInterface, LastErrorIsPerThread) {
  refusal(lockstep_group_rank(nullptr, nullptr));
  std::thread([] { EXPECT_STREQ(lockstep_last_error(), ""); }).join();
  int rank = 0;
  EXPECT_EQ(lockstep_group_rank(group_, &rank), LOCKSTEP_OK);
  EXPECT_THAT(lockstep_last_error(), HasSubstr("the group is NULL"));  // of the last function that failed
}

}  // namespace
}  // namespace lockstep::bindings
