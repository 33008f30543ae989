#include "lockstep/sampler/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/splitmix.h"
#include "tests/support/refusal.h"

namespace lockstep::sampler {
namespace {

using Values = std::vector<std::uint64_t>;

SamplerConfig config_of(std::uint64_t length, std::uint64_t global_batch, Tail tail = Tail::kExact) {
  SamplerConfig config;
  config.length = length;
  config.global_batch = global_batch;
  config.tail = tail;
  return config;
}

Values indices_of(const DistributedSampler& sampler) {
  const StepPlan plan = sampler.plan();
  Values values(plan.local_count);
  sampler.indices(plan, values);
  return values;
}

std::vector<DistributedSampler> world_of(const SamplerConfig& config, int world, SamplerState from = {}) {
  std::vector<DistributedSampler> ranks;
  for (int rank = 0; rank < world; ++rank) {
    ranks.emplace_back(config, rank, world);
    ranks.back().restore(from);
  }
  return ranks;
}

// Takes one step on all ranks, appends the samples in rank order, and checks that the ranks agree on the step.
void step(std::vector<DistributedSampler>& ranks, Values& samples) {
  const StepPlan first = ranks[0].plan();
  std::uint64_t at = first.global_begin;
  for (auto& rank : ranks) {
    const StepPlan plan = rank.plan();
    ASSERT_EQ(plan.epoch, first.epoch);
    ASSERT_EQ(plan.step_in_epoch, first.step_in_epoch);
    ASSERT_EQ(plan.global_begin, first.global_begin);
    ASSERT_EQ(plan.global_count, first.global_count);
    ASSERT_EQ(plan.last_of_epoch, first.last_of_epoch);
    ASSERT_GE(plan.global_count, 1u);
    ASSERT_EQ(plan.local_begin, at);
    ASSERT_LE(plan.local_count, rank.max_local_count());
    at += plan.local_count;
    const Values mine = indices_of(rank);
    samples.insert(samples.end(), mine.begin(), mine.end());
    rank.advance();
    ASSERT_EQ(rank.state(), ranks[0].state());
  }
  ASSERT_EQ(at, first.global_begin + first.global_count);
}

Values epoch_of(std::vector<DistributedSampler>& ranks) {
  Values samples;
  const std::uint64_t epoch = ranks[0].plan().epoch;
  while (ranks[0].plan().epoch == epoch) {
    step(ranks, samples);
    if (::testing::Test::HasFatalFailure()) break;
  }
  return samples;
}

Values all_of(std::uint64_t length) {
  Values all(length);
  std::iota(all.begin(), all.end(), std::uint64_t{0});
  return all;
}

Values sorted(Values values) {
  std::sort(values.begin(), values.end());
  return values;
}

TEST(Sampler, ExactSeesEachSampleOnceInEveryEpoch) {
  for (const std::uint64_t length : {1u, 2u, 3u, 5u, 6u, 7u, 29u, 64u, 100u, 4099u}) {
    for (const std::uint64_t batch : {1u, 2u, 3u, 5u, 7u, 32u, 101u}) {
      if (length / batch > 500) continue;
      Values of_one_rank;
      for (int world = 1; world <= 7; ++world) {
        auto ranks = world_of(config_of(length, batch), world);
        Values three_epochs;
        for (std::uint64_t epoch = 0; epoch < 3; ++epoch) {
          ASSERT_EQ(ranks[0].state(), (SamplerState{epoch, 0}));
          const Values samples = epoch_of(ranks);
          ASSERT_EQ(sorted(samples), all_of(length)) << length << " by " << batch << " on " << world;
          three_epochs.insert(three_epochs.end(), samples.begin(), samples.end());
        }
        // The order does not depend on the world size.
        if (world == 1) of_one_rank = three_epochs;
        ASSERT_EQ(three_epochs, of_one_rank) << length << " by " << batch << " on " << world;
      }
    }
  }
}

TEST(Sampler, CountsStepsAndMarksTheLast) {
  for (const Tail tail : {Tail::kExact, Tail::kPad, Tail::kDrop}) {
    for (std::uint64_t length = 12; length < 40; ++length) {
      DistributedSampler sampler(config_of(length, 6, tail), 1, 3);
      for (int epoch = 0; epoch < 2; ++epoch) {
        for (std::uint64_t s = 0; s < sampler.steps_per_epoch(); ++s) {
          const StepPlan plan = sampler.plan();
          ASSERT_EQ(plan.step_in_epoch, s);
          ASSERT_EQ(plan.last_of_epoch, s + 1 == sampler.steps_per_epoch());
          sampler.advance();
        }
      }
      ASSERT_EQ(sampler.state(), (SamplerState{2, 0}));
    }
  }
}

TEST(Sampler, ResumesAtAnotherWorldSizeWithoutRepeatOrSkip) {
  SplitMix64 random(2026);
  for (int round = 0; round < 2000; ++round) {
    const std::uint64_t length = 1 + random.below(200);
    const std::uint64_t batch_before = 1 + random.below(40), batch_after = 1 + random.below(40);
    const int world_before = 1 + static_cast<int>(random.below(7)), world_after = 1 + static_cast<int>(random.below(7));
    auto before = world_of(config_of(length, batch_before), world_before);
    const std::uint64_t stop = 1 + random.below(static_cast<std::uint32_t>(2 * before[0].steps_per_epoch()));
    Values samples;
    for (std::uint64_t s = 0; s < stop; ++s) step(before, samples);
    auto after = world_of(config_of(length, batch_after), world_after, before[0].state());
    while (samples.size() < 3 * length) step(after, samples);
    ASSERT_EQ(samples.size(), 3 * length);

    auto whole = world_of(config_of(length, length), 1);
    Values expected;
    for (int epoch = 0; epoch < 3; ++epoch) step(whole, expected);
    ASSERT_EQ(samples, expected) << "length " << length << ", " << batch_before << " on " << world_before << ", "
                                 << batch_after << " on " << world_after << " after " << stop << " steps";
  }
}

// What torch.utils.data.DistributedSampler(drop_last=False) hands to each rank: every N-th of the padded order.
TEST(Sampler, PadMatchesPyTorch) {
  for (const std::uint64_t length : {1u, 2u, 5u, 10u, 11u, 12u, 13u, 31u}) {
    for (int world = 1; world <= 7; ++world) {
      for (const std::uint64_t per_rank : {1u, 2u, 3u, 8u}) {
        auto config = config_of(length, per_rank * static_cast<std::uint64_t>(world), Tail::kPad);
        auto one_rank = world_of(config_of(length, length), 1);
        const Values order = epoch_of(one_rank);
        const std::uint64_t n = static_cast<std::uint64_t>(world);
        const std::uint64_t samples_of_a_rank = (length + n - 1) / n;
        Values padded;
        for (std::uint64_t i = 0; i < samples_of_a_rank * n; ++i) padded.push_back(order[i % length]);

        auto ranks = world_of(config, world);
        ASSERT_EQ(ranks[0].steps_per_epoch(), (samples_of_a_rank + per_rank - 1) / per_rank);
        for (std::uint64_t s = 0; s < ranks[0].steps_per_epoch(); ++s) {
          Values theirs, ours;
          for (std::uint64_t r = 0; r < n; ++r) {
            for (std::uint64_t j = s * per_rank; j < std::min((s + 1) * per_rank, samples_of_a_rank); ++j) {
              theirs.push_back(padded[r + n * j]);
            }
            ASSERT_EQ(ranks[r].plan().local_count, ranks[0].plan().local_count);
          }
          step(ranks, ours);
          ASSERT_EQ(sorted(ours), sorted(theirs)) << "the step's samples, over all ranks";
        }
        ASSERT_EQ(ranks[0].state(), (SamplerState{1, 0}));
      }
    }
  }
}

// With shards: whoever computes a shard, its samples are the same, and a rank's are those of its shards.
TEST(Sampler, ShardsHaveTheSameSamplesAtAnyNumberOfRanks) {
  for (const Tail tail : {Tail::kExact, Tail::kPad, Tail::kDrop})
    for (const std::uint64_t length : {13u, 30u, 47u}) {
      SamplerConfig config = config_of(length, 10, tail);
      config.shards = 5;
      std::vector<Values> shards;  // of three epochs, one after the other
      for (int world = 1; world <= 5; ++world) {
        SCOPED_TRACE(fmt::format("{} samples, {} ranks, tail {}", length, world, static_cast<int>(tail)));
        auto ranks = world_of(config, world);
        std::vector<Values> found;
        while (ranks[0].state().epoch < 3) {
          for (auto& rank : ranks) {
            const StepPlan plan = rank.plan();
            const Values mine = indices_of(rank);
            const Slice run = slice_of(5, static_cast<std::uint64_t>(rank.rank()), static_cast<std::uint64_t>(world));
            for (std::uint64_t shard = run.begin; shard < run.end(); ++shard) {
              const Slice part = shard_of(config, plan.global_count, shard);
              const auto begin =
                  mine.begin() + static_cast<std::ptrdiff_t>(part.begin + plan.global_begin - plan.local_begin);
              found.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(part.count));
            }
          }
          Values samples;
          step(ranks, samples);
        }
        if (world == 1) shards = found;
        ASSERT_EQ(found, shards);
      }
    }
  SamplerConfig config = config_of(30, 10);
  config.shards = 4;
  EXPECT_THROW(DistributedSampler(config, 0, 5), UsageError);
  config.shards = 11;
  EXPECT_THROW(DistributedSampler(config, 0, 1), UsageError);
  config.shards = 4;
  config.tail = Tail::kPad;
  EXPECT_THROW(DistributedSampler(config, 0, 2), UsageError);
  config.tail = Tail::kExact;
  config.order = Order::kColumns;
  EXPECT_THROW(DistributedSampler(config, 0, 2), UsageError);
}

TEST(Sampler, DropTakesWholeBatchesOnly) {
  for (std::uint64_t length = 5; length < 30; ++length) {
    for (int world = 1; world <= 4; ++world) {
      auto ranks = world_of(config_of(length, 5, Tail::kDrop), world);
      const Values samples = epoch_of(ranks);
      ASSERT_EQ(samples.size(), length / 5 * 5);
      const Values unique = sorted(samples);
      ASSERT_EQ(std::adjacent_find(unique.begin(), unique.end()), unique.end());
    }
  }
}

TEST(Sampler, ResumeWithAnotherBatchOrTailEndsTheEpochWhereNoStepIsLeft) {
  DistributedSampler drop(config_of(10, 4, Tail::kDrop), 0, 1);
  drop.restore({3, 6});  // 6 + 4 = 10: one more
  EXPECT_EQ(drop.state(), (SamplerState{3, 6}));
  EXPECT_TRUE(drop.plan().last_of_epoch);
  drop.restore({3, 7});
  EXPECT_EQ(drop.state(), (SamplerState{4, 0}));

  DistributedSampler exact(config_of(10, 4), 0, 1);
  exact.restore({3, 10});
  EXPECT_EQ(exact.state(), (SamplerState{4, 0}));

  DistributedSampler pad(config_of(5, 2, Tail::kPad), 0, 2);  // positions [0, 6)
  pad.restore({0, 7});                                        // from a world of 8
  EXPECT_EQ(pad.state(), (SamplerState{1, 0}));
}

TEST(Sampler, RestoreRefusesACursorOfOtherData) {
  DistributedSampler sampler(config_of(10, 4), 0, 1);
  EXPECT_THROW(sampler.restore({0, 11}), UsageError);
  EXPECT_EQ(sampler.state(), (SamplerState{0, 0}));
}

TEST(Sampler, WithoutShufflingTheOrderIsTheDataSets) {
  SamplerConfig config = config_of(7, 3);
  config.order = Order::kSequential;
  auto ranks = world_of(config, 2);
  EXPECT_EQ(epoch_of(ranks), all_of(7));
  EXPECT_EQ(epoch_of(ranks), all_of(7));
}

// Each place of the batch reads consecutive samples, at any number of ranks; every sample comes once, with the tail
// 'drop' all but the data set's last.
TEST(Sampler, ColumnsReadConsecutiveSamples) {
  for (const Tail tail : {Tail::kExact, Tail::kDrop})
    for (const std::uint64_t length : {1, 5, 7, 12, 13, 30, 31})
      for (const std::uint64_t batch : {1, 3, 4, 7, 12}) {
        if (tail == Tail::kDrop && batch > length) continue;
        SCOPED_TRACE(fmt::format("{} samples, batch {}, tail {}", length, batch, static_cast<int>(tail)));
        SamplerConfig config = config_of(length, batch, tail);
        config.order = Order::kColumns;
        std::vector<Values> alone;  // samples of each step, in the order of the places
        for (const int world : {1, 2, 3, 5}) {
          auto ranks = world_of(config, world);
          for (const std::uint64_t epoch : {0, 1}) {
            std::vector<Values> steps;
            do {
              steps.emplace_back();
              for (auto& rank : ranks) {
                const StepPlan plan = rank.plan();
                EXPECT_EQ(plan.epoch, epoch);
                EXPECT_LE(plan.local_count, rank.max_local_count());
                const Slice columns =
                    slice_of(batch, static_cast<std::uint64_t>(rank.rank()), static_cast<std::uint64_t>(world));
                if (plan.local_count > 0) {
                  EXPECT_EQ(plan.local_begin - plan.global_begin, columns.begin);
                }
                EXPECT_LE(plan.local_count, columns.count);
                const Values mine = indices_of(rank);
                steps.back().insert(steps.back().end(), mine.begin(), mine.end());
                rank.advance();
              }
            } while (ranks[0].state().epoch == epoch);
            EXPECT_EQ(steps.size(), ranks[0].steps_per_epoch());
            if (alone.empty()) alone = steps;
            EXPECT_EQ(steps, alone) << world << " ranks, epoch " << epoch;
          }
        }
        Values seen;
        for (std::size_t step = 0; step < alone.size(); ++step)
          for (std::size_t place = 0; place < alone[step].size(); ++place) {
            seen.push_back(alone[step][place]);
            if (step > 0) {
              EXPECT_EQ(alone[step][place], alone[step - 1][place] + 1);
            }
          }
        std::ranges::sort(seen);
        EXPECT_EQ(seen, all_of(tail == Tail::kDrop ? length / batch * batch : length));
      }
}

TEST(Sampler, ColumnsAreNotPadded) {
  SamplerConfig config = config_of(10, 4, Tail::kPad);
  config.order = Order::kColumns;
  EXPECT_THROW(DistributedSampler(config, 0, 2), UsageError);
}

// Whatever the shares are, a step has the same samples; with shards each is where its number says.
TEST(Sampler, RanksWithUnequalSharesHaveTheWholeStep) {
  const std::vector<std::vector<std::uint32_t>> all_shares = {{12},       {1, 11},   {7, 5},
                                                              {1, 1, 10}, {3, 4, 5}, {6, 1, 2, 3}};
  for (const std::uint64_t shards : {0, 12})
    for (const std::uint64_t batch : {12, 13, 29})
      for (const std::uint64_t length : {1, 12, 40, 59}) {
        Values alone;
        for (const auto& shares : all_shares) {
          SCOPED_TRACE(fmt::format("{} samples in batches of {}, {} shards, shares {}", length, batch, shards,
                                   fmt::join(shares, ", ")));
          SamplerConfig config = config_of(length, batch);
          config.shards = shards;
          config.shares = shares;
          auto ranks = world_of(config, static_cast<int>(shares.size()));
          if (shards > 0) {
            std::uint64_t shard = 0;
            for (std::size_t rank = 0; rank < shares.size(); ++rank) {
              const StepPlan plan = ranks[rank].plan();
              EXPECT_EQ(plan.local_begin, shard_of(config, plan.global_count, shard).begin);
              shard += shares[rank];
            }
          } else if (length >= batch) {
            for (std::size_t rank = 0; rank < shares.size(); ++rank)
              EXPECT_NEAR(static_cast<double>(ranks[rank].plan().local_count),
                          static_cast<double>(batch) * shares[rank] / 12.0, 1.0);
          }
          const Values samples = epoch_of(ranks);
          if (alone.empty()) alone = samples;
          EXPECT_EQ(samples, alone);
        }
      }
}

TEST(Sampler, SharesThatCannotBeAreRefused) {
  SamplerConfig config = config_of(40, 12);
  const auto refused = [&](const char* says, int world = 2) {
    EXPECT_REFUSED(says, DistributedSampler(config, 0, world));
  };
  config.shares = {3, 1};
  EXPECT_EQ(DistributedSampler(config, 0, 2).plan().local_count, 9U);
  refused("shares 3, 1 of a step for 3 ranks", 3);
  config.shards = 5;
  refused("shares 3, 1 of a step in 5 shards");
  config.shares = {5, 0};
  refused("shares 5, 0 of a step for 2 ranks");
  config.shards = 0;
  config.shares = {4'000'000'000, 4'000'000'000};
  refused("less than 2^32");
  config.shares = {3, 1};
  config.tail = Tail::kPad;
  refused("the tail 'pad'");
  config.tail = Tail::kExact;
  config.order = Order::kColumns;
  refused("consecutive samples");
}

TEST(Sampler, IndicesOfAnotherEpochsPlan) {
  DistributedSampler sampler(config_of(50, 10), 0, 2);
  const StepPlan plan = sampler.plan();
  const Values before = indices_of(sampler);
  for (int s = 0; s < 7; ++s) sampler.advance();
  ASSERT_EQ(sampler.state().epoch, 1u);
  Values again(plan.local_count);
  sampler.indices(plan, again);
  EXPECT_EQ(again, before);
  EXPECT_NE(indices_of(sampler), before);
  Values wrong(plan.local_count + 1);
  EXPECT_THROW(sampler.indices(plan, wrong), UsageError);
}

TEST(Sampler, InvalidWorlds) {
  const SamplerConfig config = config_of(10, 4);
  for (const auto& [rank, world] : {std::pair(0, 0), std::pair(0, -1), std::pair(2, 2), std::pair(-1, 2)}) {
    EXPECT_THROW(DistributedSampler(config, rank, world), UsageError);
    EXPECT_THROW(plan_step(config, {}, rank, world), UsageError);
    EXPECT_THROW(eval_slice(10, rank, world), UsageError);
  }
  EXPECT_THROW(plan_step(config_of(10, 0), {}, 0, 1), UsageError);
  EXPECT_THROW(plan_step(config, {0, 10}, 0, 1), UsageError);  // after the epoch's last step
}

TEST(Sampler, RanksWithoutSamplesStillStep) {
  auto ranks = world_of(config_of(2, 2), 5);
  int empty = 0;
  for (const auto& rank : ranks) empty += rank.plan().local_count == 0;
  EXPECT_EQ(empty, 3);
  EXPECT_EQ(sorted(epoch_of(ranks)), all_of(2));
}

TEST(Sampler, ABillionSamplesTakeNoMemory) {
  DistributedSampler sampler(config_of(1000000000, 1024), 3, 8);
  sampler.restore({2, 1000000000 - 100});
  const StepPlan plan = sampler.plan();
  EXPECT_EQ(plan.global_count, 100u);
  EXPECT_TRUE(plan.last_of_epoch);
  EXPECT_EQ(plan.local_begin, 1000000000u - 100 + 37);
  EXPECT_EQ(plan.local_count, 13u);
  for (const auto i : indices_of(sampler)) EXPECT_LT(i, 1000000000u);
  sampler.advance();
  EXPECT_EQ(sampler.state(), (SamplerState{3, 0}));
  EXPECT_LT(sizeof(DistributedSampler), 512u);
}

template <class E>
E caught(const SamplerConfig& config, int rank, int world) {
  return testing::thrown<E>([&] { DistributedSampler(config, rank, world); });
}

TEST(Sampler, InvalidSettingsAreRefused) {
  EXPECT_EQ(caught<IoError>(config_of(0, 4), 0, 1).line(),
            "empty data set: it has 0 samples → give data with at least one sample");
  EXPECT_EQ(caught<UsageError>(config_of(5, 8, Tail::kDrop), 0, 1).line(),
            "the tail 'drop' leaves no step: 5 samples do not fill a global batch of 8 → use --tail exact, or a "
            "global batch of at most 5");
  EXPECT_EQ(caught<UsageError>(config_of(5, 7, Tail::kPad), 0, 2).line(),
            "the tail 'pad' cannot make 2 ranks equal with a global batch of 7 → use --tail exact, or a global "
            "batch that is a multiple of 2");
  caught<UsageError>(config_of(5, 0), 0, 1);
  caught<UsageError>(config_of(5, 1), 2, 2);
  caught<UsageError>(config_of(5, 1), -1, 2);
  caught<UsageError>(config_of(5, 1), 0, 0);
  caught<UsageError>(config_of(~std::uint64_t{0}, 1), 0, 1);
}

}  // namespace
}  // namespace lockstep::sampler
