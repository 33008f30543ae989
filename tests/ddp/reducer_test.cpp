// The reducer on several ranks: sums, orders, uneven contributions, and what it refuses.
#include "lockstep/ddp/reducer.h"
#include "base/error.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <random>

#include "tests/support/ranks.h"
#include "tests/support/refusal.h"

namespace lockstep::ddp {
namespace {

using lockstep::testing::group;
using lockstep::testing::refusal_of;
using ::testing::HasSubstr;

std::vector<SlotSpec> some_slots() {
  return {{"conv.weight", 288}, {"conv.bias", 32}, {"fc.weight", 5000}, {"one", 1}, {"fc.bias", 10}};
}

// What rank `rank` contributes to element i of slot s at step t: small whole numbers, so that sums are exact.
float contribution(int rank, std::size_t slot, std::size_t i, int step) {
  return static_cast<float>(rank + 1) * static_cast<float>((slot + 1) * 7 + i % 13) + static_cast<float>(step);
}

void write(Reducer& reducer, std::size_t slot, int step) {
  const auto bytes = reducer.storage(slot);
  auto* values = reinterpret_cast<float*>(bytes.data());
  for (std::size_t i = 0; i < bytes.size() / sizeof(float); ++i)
    values[i] = contribution(group().rank(), slot, i, step);
}

// Checks the sums over `ranks` contributing ranks.
void expect_sums(const Reducer& reducer, std::size_t slot, int step, const std::vector<int>& ranks) {
  const auto bytes = reducer.storage(slot);
  const auto* values = reinterpret_cast<const float*>(bytes.data());
  for (std::size_t i = 0; i < bytes.size() / sizeof(float); ++i) {
    float wanted = 0;
    for (const int rank : ranks) wanted += contribution(rank, slot, i, step);
    ASSERT_EQ(values[i], wanted) << "slot " << slot << " element " << i << " step " << step;
  }
}

std::vector<int> all_ranks() {
  std::vector<int> ranks(static_cast<std::size_t>(group().size()));
  for (std::size_t r = 0; r < ranks.size(); ++r) ranks[r] = static_cast<int>(r);
  return ranks;
}

std::span<float> tail_of(const Reducer& reducer) {
  return {reinterpret_cast<float*>(reducer.tail().data()), Reducer::kTailFloats};
}

class ReducerLimits : public ::testing::TestWithParam<std::size_t> {};

TEST_P(ReducerLimits, SumsWhateverOrderTheGradientsComeIn) {
  const auto slots = some_slots();
  Reducer reducer(group(), slots, {.first_bucket_bytes = GetParam(), .bucket_bytes = GetParam()});
  std::mt19937 random(static_cast<unsigned>(7 + group().rank()));  // each rank its own order
  for (int step = 1; step <= 6; ++step) {
    reducer.begin_step(step);
    tail_of(reducer)[0] = static_cast<float>(group().rank() + step);
    std::vector<std::size_t> order = {0, 1, 2, 3, 4};
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t slot : order) {
      write(reducer, slot, step);
      reducer.mark_ready(slot);
      reducer.poll();
    }
    std::vector<std::size_t> seen;
    reducer.finish({}, [&](std::span<const std::size_t> done) {
      // A bucket's sums are there when it is handed over, not only at the end.
      for (const std::size_t slot : done) {
        expect_sums(reducer, slot, step, all_ranks());
        seen.push_back(slot);
      }
    });
    std::sort(seen.begin(), seen.end());
    ASSERT_EQ(seen, (std::vector<std::size_t>{0, 1, 2, 3, 4}));
    const int n = group().size();
    ASSERT_EQ(tail_of(reducer)[0], static_cast<float>(n * (n - 1) / 2 + n * step));
    ASSERT_EQ(tail_of(reducer)[1], 0.0f);
    if (step == 2) reducer.rebuild_buckets(reducer.observed_order());
  }
}

TEST_P(ReducerLimits, RanksWithoutSamplesContributeZeros) {
  Reducer reducer(group(), some_slots(), {.first_bucket_bytes = GetParam(), .bucket_bytes = GetParam()});
  for (int step = 1; step <= group().size(); ++step) {
    // In step s the ranks below s have samples.
    reducer.begin_step(step);
    if (group().rank() < step) {
      for (std::size_t slot = 0; slot < reducer.slots(); ++slot) {
        write(reducer, slot, step);
        reducer.mark_ready(slot);
      }
    } else {
      reducer.contribute_nothing();
    }
    auto contributors = all_ranks();
    contributors.resize(static_cast<std::size_t>(step));
    reducer.finish({}, [&](std::span<const std::size_t> done) {
      for (const std::size_t slot : done) expect_sums(reducer, slot, step, contributors);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Limits, ReducerLimits, ::testing::Values(1, 300, 4096, std::size_t{1} << 20));

// In step s rank r lacks slot (r + s) mod 5, and nobody has slot 3 in even steps.
TEST_P(ReducerLimits, UnusedSlotsAreZeroAndSkippedWhereUnusedEverywhere) {
  for (const bool late : {false, true}) {
    Reducer reducer(group(), some_slots(), {.first_bucket_bytes = GetParam(), .bucket_bytes = GetParam()},
                    {.find_unused = true, .start_late = late});
    const auto lacks = [](int rank, std::size_t slot, int step) {
      return static_cast<int>(slot) == (rank + step) % 5 || (slot == 3 && step % 2 == 0);
    };
    for (int step = 1; step <= 6; ++step) {
      reducer.begin_step(step);
      const bool nothing = step == 5 && group().rank() == 0;  // no samples
      if (nothing) reducer.contribute_nothing();
      for (std::size_t slot = 0; slot < reducer.slots() && !nothing; ++slot) {
        write(reducer, slot, step);  // also what does not count
        if (!lacks(group().rank(), slot, step))
          reducer.mark_ready(slot);
        else if (step % 3 != 0)
          reducer.mark_slot_unused(slot);  // else finish() finds out
      }
      std::vector<std::size_t> seen, wanted;
      for (std::size_t slot = 0; slot < reducer.slots(); ++slot)
        for (const int rank : all_ranks())
          if (!lacks(rank, slot, step) && !(step == 5 && rank == 0)) {
            wanted.push_back(slot);
            break;
          }
      reducer.finish({}, [&](std::span<const std::size_t> slots) {
        for (const std::size_t slot : slots) {
          seen.push_back(slot);
          std::vector<int> contributors;
          for (const int rank : all_ranks())
            if (!lacks(rank, slot, step) && !(step == 5 && rank == 0)) contributors.push_back(rank);
          expect_sums(reducer, slot, step, contributors);
        }
      });
      std::ranges::sort(seen);
      EXPECT_EQ(seen, wanted) << "step " << step;
      if (step == 1) reducer.rebuild_buckets(reducer.observed_order());
    }
  }
}

TEST_P(ReducerLimits, GradientMissingOnOneRankIsNamedByAllAndRecoverable) {
  Reducer reducer(group(), some_slots(), {.first_bucket_bytes = GetParam(), .bucket_bytes = GetParam()});
  reducer.begin_step(7);
  const int last = group().size() - 1;
  for (const std::size_t slot : {4u, 2u, 1u, 0u, 3u})
    if (group().rank() != last || (slot != 2 && slot != 0)) reducer.mark_ready(slot);
  try {
    reducer.finish({}, [](auto) {});
    FAIL() << "accepted";
  } catch (const UsageError& error) {
    const std::string wanted = last == 0 ? "conv.weight, fc.weight on all ranks in step 7"
                                         : fmt::format("conv.weight, fc.weight on rank {} in step 7", last);
    EXPECT_NE(std::string(error.what()).find(wanted), std::string::npos) << error.what();
  }
}

// In f32 the sum would be 1 whatever is added: 2^-40 gets lost.
TEST_P(ReducerLimits, F64KeepsItsDigitsBesideF32) {
  constexpr double kTiny = 0x1p-40;
  const auto ranks = static_cast<double>(group().size());
  // The first bucket, which has the tail beside it, the last one, which has the counts, both or neither are f64.
  for (const std::vector<DType>& types : std::vector<std::vector<DType>>{{DType::kF64, DType::kF32},
                                                                         {DType::kF32, DType::kF64},
                                                                         {DType::kF64, DType::kF64},
                                                                         {DType::kF64, DType::kF32, DType::kF64},
                                                                         {DType::kF32, DType::kF64, DType::kF32}}) {
    std::vector<SlotSpec> slots;
    for (const DType type : types) slots.push_back({fmt::format("w{}", slots.size()), 100, type});
    Reducer reducer(group(), slots, {.first_bucket_bytes = GetParam(), .bucket_bytes = GetParam()},
                    {.find_unused = true});
    for (int step = 1; step <= 3; ++step) {
      reducer.begin_step(step);
      tail_of(reducer)[1] = static_cast<float>(group().rank() + 1);
      for (std::size_t slot = 0; slot < slots.size(); ++slot) {
        if (step == 2 && slot == 0) continue;  // nobody has it
        if (types[slot] == DType::kF64)
          std::ranges::fill(reducer.gradient<double>(slot), group().rank() == 0 ? 1.0 + kTiny : kTiny);
        else
          write(reducer, slot, step);
        reducer.mark_ready(slot);
      }
      std::size_t handed = 0;
      reducer.finish({}, [&](std::span<const std::size_t> done) {
        for (const std::size_t slot : done) {
          ++handed;
          if (types[slot] == DType::kF32) {
            expect_sums(reducer, slot, step, all_ranks());
          } else {
            for (const double value : reducer.gradient<double>(slot)) ASSERT_EQ(value, 1.0 + ranks * kTiny);
          }
        }
      });
      EXPECT_EQ(handed, slots.size() - (step == 2 ? 1 : 0));
      EXPECT_EQ(tail_of(reducer)[1], static_cast<float>(ranks * (ranks + 1) / 2));
      if (step == 1) reducer.rebuild_buckets(reducer.observed_order());
    }
  }
}

TEST(Reducer, RebuildsBucketsAsTheFirstRankWithSamples) {
  Reducer reducer(group(), some_slots(), {.first_bucket_bytes = 1, .bucket_bytes = 1});
  const int first = group().size() - 1;  // the only rank with samples
  reducer.begin_step(1);
  if (group().rank() == first) {
    for (const std::size_t slot : {3u, 0u, 4u, 1u, 2u}) {
      write(reducer, slot, 1);
      reducer.mark_ready(slot);
    }
  } else {
    reducer.contribute_nothing();
  }
  reducer.finish({}, [](auto) {});
  EXPECT_TRUE(reducer.rebuild_buckets(reducer.observed_order()));
  ASSERT_EQ(reducer.plan().buckets.size(), 5u);
  std::vector<std::size_t> order;
  for (const auto& bucket : reducer.plan().buckets) order.push_back(bucket.slots.at(0));
  EXPECT_EQ(order, (std::vector<std::size_t>{3, 0, 4, 1, 2}));

  // And the new layout sums as the old one did.
  reducer.begin_step(2);
  for (std::size_t slot = 0; slot < reducer.slots(); ++slot) {
    write(reducer, slot, 2);
    reducer.mark_ready(slot);
  }
  reducer.finish({}, [](auto) {});
  for (std::size_t slot = 0; slot < reducer.slots(); ++slot) expect_sums(reducer, slot, 2, all_ranks());
}

/// Carries a bucket as bytes of an arena of its own and halves each element. An allreduce does not, so tests see that
/// the hook ran.
class HalvingHook final : public CommHook {
 public:
  explicit HalvingHook(std::string name = "halving") : name_(std::move(name)) {}
  std::string name() const override { return name_; }
  comm::Work start(const GradBucket& bucket, comm::ProcessGroup& group) override {
    seen_.push_back(bucket.index);
    slots_ += bucket.slots.size();
    last_ = bucket.last;
    if (arenas_.size() <= bucket.index) arenas_.resize(bucket.index + 1);
    auto& arena = arenas_[bucket.index];
    if (arena == nullptr) arena = group.allocate(bucket.gradients.bytes());
    const auto from = floats_of(bucket), to = arena->view<float>(0, from.size());
    for (std::size_t i = 0; i < from.size(); ++i) to[i] = 0.5f * from[i];
    return group.all_reduce({.arena = arena.get(), .count = from.size(), .dtype = DType::kF32}, comm::ReduceOp::kSum,
                            static_cast<std::int32_t>(bucket.index));
  }
  void finish(const GradBucket& bucket, StreamView /*stream*/) override {
    const auto to = floats_of(bucket);
    std::ranges::copy(arenas_[bucket.index]->view<float>(0, to.size()), to.begin());
  }
  const std::vector<std::size_t>& seen() const { return seen_; }
  std::size_t slots() const { return slots_; }
  bool last() const { return last_; }

 private:
  static std::span<float> floats_of(const GradBucket& bucket) {
    return bucket.gradients.arena->view<float>(bucket.gradients.offset_bytes, bucket.gradients.count);
  }
  std::string name_;
  std::vector<std::unique_ptr<comm::Arena>> arenas_;
  std::vector<std::size_t> seen_;
  std::size_t slots_ = 0;
  bool last_ = false;
};

// Buckets go through the hook; the tail and the counts of unused slots do not.
TEST_P(ReducerLimits, AHookCarriesTheBucketsAndNothingElse) {
  Reducer reducer(group(), some_slots(), {.first_bucket_bytes = GetParam(), .bucket_bytes = GetParam()},
                  {.find_unused = true});
  const auto hook = std::make_shared<HalvingHook>();
  reducer.register_comm_hook(hook);
  for (int step = 1; step <= 3; ++step) {
    reducer.begin_step(step);
    tail_of(reducer)[3] = static_cast<float>(2 * group().rank() + 1);
    for (const std::size_t slot : {4u, 3u, 2u, 0u}) {  // slot 1 is nobody's
      write(reducer, slot, step);
      reducer.mark_ready(slot);
      reducer.poll();
    }
    std::vector<std::size_t> seen;
    reducer.finish({}, [&](std::span<const std::size_t> done) {
      EXPECT_EQ(tail_of(reducer)[3], static_cast<float>(group().size() * group().size()));
      for (const std::size_t slot : done) {
        seen.push_back(slot);
        const auto bytes = reducer.storage(slot);
        float wanted = 0;
        for (const int rank : all_ranks()) wanted += 0.5f * contribution(rank, slot, 0, step);
        EXPECT_EQ(*reinterpret_cast<const float*>(bytes.data()), wanted) << "slot " << slot << " step " << step;
      }
    });
    std::ranges::sort(seen);
    EXPECT_EQ(seen, (std::vector<std::size_t>{0, 2, 3, 4}));
    EXPECT_EQ(*reinterpret_cast<const float*>(reducer.unused_count().data()), static_cast<float>(group().size()));
  }
  std::vector<std::size_t> wanted;
  for (int step = 0; step < 3; ++step)
    for (std::size_t b = 0; b < reducer.plan().buckets.size(); ++b) wanted.push_back(b);
  EXPECT_EQ(hook->seen(), wanted);
  EXPECT_EQ(hook->slots(), 3 * reducer.slots());
  EXPECT_TRUE(hook->last());
}

TEST(Reducer, HooksAreComparedAndRegisteredOnce) {
  Reducer reducer(group(), some_slots(), {});
  EXPECT_THROW(reducer.register_comm_hook(nullptr), Error);
  if (group().size() > 1) {
    const std::string name = group().rank() == 0 ? "powersgd:4" : "powersgd:2";
    EXPECT_THROW(reducer.register_comm_hook(std::make_shared<HalvingHook>(name)), Error);
  }
  reducer.register_comm_hook(std::make_shared<HalvingHook>());
  EXPECT_THROW(reducer.register_comm_hook(std::make_shared<HalvingHook>()), Error);
  const auto taken = std::make_shared<HalvingHook>();
  Reducer first(group(), some_slots(), {}), second(group(), some_slots(), {});
  first.register_comm_hook(taken);
  EXPECT_REFUSED("that another reducer has already", second.register_comm_hook(taken));
  Reducer late(group(), some_slots(), {});
  late.begin_step(1);
  late.contribute_nothing();
  late.finish({}, [](auto) {});
  EXPECT_THROW(late.register_comm_hook(std::make_shared<HalvingHook>()), Error);
}

TEST(Reducer, AHookSeesNoBucketOfAModelWithoutParameters) {
  Reducer reducer(group(), {}, {});
  const auto hook = std::make_shared<HalvingHook>();
  reducer.register_comm_hook(hook);
  reducer.begin_step(1);
  tail_of(reducer)[0] = 1;
  reducer.contribute_nothing();
  reducer.finish({}, [](auto) {});
  EXPECT_EQ(tail_of(reducer)[0], static_cast<float>(group().size()));
  EXPECT_TRUE(hook->seen().empty());
}

TEST(Reducer, StepWithoutGradientsHasNoOrder) {
  Reducer reducer(group(), some_slots(), {});
  reducer.begin_step(1);
  reducer.contribute_nothing();
  reducer.finish({}, [](auto) {});
  EXPECT_TRUE(reducer.observed_order().empty());
}

TEST(Reducer, AModelWithoutParametersStillSumsItsTail) {
  Reducer reducer(group(), {}, {});
  reducer.begin_step(1);
  tail_of(reducer)[2] = 1.0f;
  reducer.finish({}, [](auto) {});
  EXPECT_EQ(tail_of(reducer)[2], static_cast<float>(group().size()));
}

TEST(Reducer, OtherTypesAreRefusedAndHooksCarryF32Alone) {
  EXPECT_THAT(refusal_of([] {
                Reducer reducer(group(), {{"w", 4, DType::kBF16}}, {});
              }),
              ::testing::AnyOf(HasSubstr("the gradient of w is bf16 → gradients are summed in f32 or f64"),
                               HasSubstr("no UsageError: rank 0")));
  Reducer reducer(group(), {{"v", 4, DType::kF32}, {"w", 4, DType::kF64}}, {});
  EXPECT_THAT(refusal_of([&] { reducer.register_comm_hook(std::make_shared<HalvingHook>()); }),
              ::testing::AnyOf(HasSubstr("a communication hook where the gradient of w is f64"),
                               HasSubstr("no UsageError: rank 0")));
}

TEST(Reducer, RefusesAGradientThatIsReadyTwice) {
  Reducer reducer(group(), some_slots(), {});
  reducer.begin_step(1);
  reducer.mark_ready(3);
  try {
    reducer.mark_ready(3);
    FAIL() << "accepted";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("one"), std::string::npos) << error.what();
  }
}

// Three numbers and four fill the same 64 bytes.
TEST(Reducer, RanksWithOtherSlotsAreNamed) {
  const bool alone = group().size() == 1;  // which agrees with itself
  const bool odd = !alone && group().rank() + 1 == group().size();
  try {
    Reducer reducer(group(), {{.name = "w", .count = odd ? 4u : 3u}}, {});
    EXPECT_TRUE(alone);
  } catch (const OutOfStepError& error) {
    EXPECT_TRUE(odd);
    EXPECT_NE(std::string(error.what()).find("gradient 0 (w)"), std::string::npos) << error.what();
  } catch (const PeerError&) {
    EXPECT_FALSE(odd || alone);
  }
}

// Each mistake is the caller's, is named, and leaves the reducer as it was: the step that follows works.
TEST(Reducer, CallsOutOfOrderAreRefused) {
  Reducer reducer(group(), some_slots(), {});
  const auto expect_mistake = [](auto&& call, const char* words) {
    try {
      call();
      ADD_FAILURE() << "accepted: " << words;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  };
  const auto finish = [&] { reducer.finish({}, [](auto) {}); };
  expect_mistake([&] { reducer.mark_ready(0); }, "outside of a step");
  expect_mistake([&] { reducer.mark_slot_unused(0); }, "outside of a step");
  expect_mistake([&] { reducer.contribute_nothing(); }, "outside of a step");
  expect_mistake(finish, "finish() outside of a step");
  const std::size_t count = reducer.slots();
  expect_mistake([&] { reducer.storage(count); }, "slot 5, where there are 5");
  expect_mistake([&] { reducer.gradient<double>(0); }, "is f32, and f64 was asked for");
  reducer.begin_step(1);
  expect_mistake([&] { reducer.mark_ready(count); }, "slot 5, where there are 5");
  reducer.mark_ready(0);
  expect_mistake([&] { reducer.mark_slot_unused(0); }, "marked unused after");
  expect_mistake([&] { reducer.contribute_nothing(); }, "after gradients of the same step");
  for (std::size_t slot = 0; slot < count; ++slot) {
    auto gradient = reducer.gradient<float>(slot);
    std::fill(gradient.begin(), gradient.end(), 1.0f);
  }
  for (std::size_t slot = 1; slot < count; ++slot) reducer.mark_ready(slot);
  expect_mistake([&] { reducer.begin_step(2); }, "step 2 begins while 1 buckets of step 1 are under way");
  finish();
  for (std::size_t slot = 0; slot < count; ++slot)
    for (const float sum : reducer.gradient<float>(slot)) EXPECT_EQ(sum, static_cast<float>(group().size()));
  expect_mistake(finish, "finish() outside of a step");
}

TEST(Reducer, NamesGradientsThatNeverCame) {
  // One bucket, so that nothing has been issued when finish refuses, and the ranks stay in step.
  Reducer reducer(group(), some_slots(), {});
  reducer.begin_step(1);
  for (const std::size_t slot : {0u, 1u, 3u}) reducer.mark_ready(slot);
  try {
    reducer.finish({}, [](auto) {});
    FAIL() << "accepted";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("fc.weight, fc.bias"), std::string::npos) << error.what();
  }
}

TEST(Reducer, KeepsTimesInOrder) {
  Reducer reducer(group(), some_slots(), {.first_bucket_bytes = 1, .bucket_bytes = 1});
  reducer.begin_step(1);
  for (const std::size_t slot : {4u, 3u, 2u, 1u, 0u}) {
    write(reducer, slot, 1);
    reducer.mark_ready(slot);
  }
  reducer.finish({}, [](auto) {});
  const auto& timeline = reducer.timeline();
  ASSERT_EQ(timeline.buckets.size(), 5u);
  for (const auto& bucket : timeline.buckets) {
    EXPECT_LE(timeline.begin, bucket.ready);
    EXPECT_LE(bucket.ready, bucket.start);
    EXPECT_LE(bucket.start, bucket.end);
  }
  EXPECT_EQ(timeline.last_ready, timeline.buckets.back().ready);
  EXPECT_NE(describe(timeline).find("bucket 4"), std::string::npos);
}

}  // namespace
}  // namespace lockstep::ddp
