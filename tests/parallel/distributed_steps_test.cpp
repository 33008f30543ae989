// Features of PyTorch's DistributedDataParallel: inputs that end on some ranks before others, a static graph, gradients
// with memory of their own, and parameters and modules that a step uses several times.
#include <gmock/gmock.h>

#include "lockstep/parallel/distributed_data_parallel.h"
#include "lockstep/sampler/slice.h"
#include "tests/parallel/trainee.h"
#include "tests/support/refusal.h"

namespace lockstep::parallel {
namespace {

using fixture::Batch;
using fixture::branches;
using fixture::Branching;
using fixture::expect_same_gradients;
using fixture::expect_same_parameters;
using fixture::kClasses;
using fixture::kFeatures;
using fixture::kTinyMib;
using fixture::rank;
using fixture::ranks;
using fixture::Trainee;
using fixture::values_of;
using lockstep::testing::group;
using lockstep::testing::rank_backend;
using lockstep::testing::refusal_of;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Options = DistributedDataParallel::Options;

class DistributedSteps : public fixture::BucketSizes {};

/// This rank's pass over `batch` and one process's over those of all ranks, then both optimizers' steps.
class Pair {
 public:
  explicit Pair(const Options& options) : ddp(*mine.module, group(), options) {}

  void step(const std::vector<Batch>& batches, std::uint64_t samples, const std::string& when) {
    reference->zero_grad();
    for (Batch batch : batches) {
      if (batch.labels.empty()) continue;
      alone.tape->backward(alone.loss_of(alone.module->forward(*alone.tape, alone.input(batch)), batch, samples).value);
      alone.tape->reset();
    }
    optimizer->zero_grad();
    Batch own = batches[rank()];
    if (own.labels.empty()) {
      ddp.contribute_nothing();
    } else {
      mine.tape->backward(mine.loss_of(ddp(*mine.tape, mine.input(own)), own, samples).value);
      mine.tape->reset();
    }
    expect_same_gradients(*mine.module, *alone.module, when);
    optimizer->step(0.1);
    reference->step(0.1);
    expect_same_parameters(*mine.module, *alone.module, when);
    ddp.check();
  }

  Branching mine{branches}, alone{branches};
  DistributedDataParallel ddp;
  std::unique_ptr<nn::Optimizer> optimizer = nn::make_sgd(ddp.parameters(), {.momentum = 0.9});
  std::unique_ptr<nn::Optimizer> reference = nn::make_sgd(alone.module->named_parameters(), {.momentum = 0.9});
};

// Rank 0 has inputs for six steps, rank 1 for five, rank 2 for one, rank 3 for none; the last ones are smaller.
std::uint64_t samples_of(std::uint64_t rank, int step) {
  constexpr int kSteps[] = {6, 5, 1, 0};
  const int steps = kSteps[rank % 4];
  return step > steps ? 0 : (step == steps ? 1 : 3);
}

TEST_P(DistributedSteps, JoinEndsWithTheLastRankThatHasInputs) {
  Pair pair(options());
  int steps = 0;
  while (const auto joined = pair.ddp.join(static_cast<std::int64_t>(samples_of(rank(), steps + 1)))) {
    ++steps;
    std::vector<Batch> batches;
    std::uint64_t all = 0;
    int having = 0;
    for (std::uint64_t r = 0; r < ranks(); ++r) {
      batches.emplace_back(static_cast<std::uint64_t>(steps) * 100 + r * 10, samples_of(r, steps));
      all += samples_of(r, steps);
      having += samples_of(r, steps) > 0 ? 1 : 0;
    }
    ASSERT_EQ(joined.samples, static_cast<std::int64_t>(all));
    ASSERT_EQ(joined.ranks, having);
    pair.step(batches, all, fmt::format(" in step {}", steps));
  }
  EXPECT_EQ(steps, 6);
}

TEST(DistributedJoin, FewerThanNoSamples) {
  Branching mine(branches);
  DistributedDataParallel ddp(*mine.module, group());
  const int last = group().size() - 1;
  EXPECT_REFUSED(fmt::format("rank {} has -3 samples in a step", last), ddp.join(group().rank() == last ? -3 : 2));
  EXPECT_EQ(ddp.join(2).samples, 2 * group().size());
}

std::vector<Batch> equal_batches(int step) {
  std::vector<Batch> batches;
  for (std::uint64_t r = 0; r < ranks(); ++r) batches.emplace_back(static_cast<std::uint64_t>(step) * 100 + r * 10, 2);
  return batches;
}

TEST_P(DistributedSteps, AStaticGraphLeavesOutWhatItsFirstStepDid) {
  Pair pair(options({.static_graph = true}));
  pair.mine.module->left = pair.alone.module->left = false;
  for (int step = 1; step <= 4; ++step) pair.step(equal_batches(step), 2 * ranks(), fmt::format(" in step {}", step));
  EXPECT_FALSE(pair.mine.module->named_parameters()[2].parameter->has_gradient());
  // A step without samples is none of another graph.
  auto batches = equal_batches(5);
  batches[ranks() - 1] = Batch(0, 0);
  if (ranks() > 1) pair.step(batches, 2 * ranks() - 2, " where a rank has nothing");
}

// Ranks whose graphs differ, and stay as they are: the first sum that has everything comes of the first step.
TEST_P(DistributedSteps, AStaticGraphMayBeAnotherOneOnEachRank) {
  Branching mine(branches), alone(branches);
  DistributedDataParallel ddp(*mine.module, group(), options({.static_graph = true}));
  for (int step = 1; step <= 4; ++step) {
    for (const auto& [name, parameter] : alone.module->named_parameters()) parameter->clear_grad();
    for (std::uint64_t r = 0; r < ranks(); ++r) {
      Batch part(static_cast<std::uint64_t>(step) * 100 + r * 10, 2);
      alone.module->left = r % 2 == 0;
      alone.tape->backward(
          alone.loss_of(alone.module->forward(*alone.tape, alone.input(part)), part, 2 * ranks()).value);
      alone.tape->reset();
    }
    for (const auto& [name, parameter] : mine.module->named_parameters()) parameter->clear_grad();
    Batch own(static_cast<std::uint64_t>(step) * 100 + rank() * 10, 2);
    mine.module->left = rank() % 2 == 0;
    mine.tape->backward(mine.loss_of(ddp(*mine.tape, mine.input(own)), own, 2 * ranks()).value);
    mine.tape->reset();
    expect_same_gradients(*mine.module, *alone.module, fmt::format(" in step {}", step));
  }
}

TEST_P(DistributedSteps, AGraphThatChangesIsNamedOnEveryRank) {
  for (const bool appears : {true, false}) {
    Branching mine(branches);
    DistributedDataParallel ddp(*mine.module, group(), options({.static_graph = true}));
    const auto step = [&](bool left) {
      for (const auto& [name, parameter] : ddp.parameters()) parameter->clear_grad();
      mine.module->left = left;
      Batch part(0, 2);
      mine.tape->backward(mine.loss_of(ddp(*mine.tape, mine.input(part)), part, 2 * ranks()).value);
      mine.tape->reset();
    };
    step(!appears);
    step(!appears);
    const int last = group().size() - 1;
    const std::string where = last == 0 ? "on all ranks" : fmt::format("on rank {}", last);
    EXPECT_THAT(refusal_of([&] { step(group().rank() == last ? appears : !appears); }),
                AllOf(HasSubstr("the graph is not static: step 3 has "),
                      HasSubstr(fmt::format("{} gradient for left.weight, left.bias {}, other than the first step",
                                            appears ? "a" : "no", where)),
                      HasSubstr("find_unused_parameters"), Not(HasSubstr("right"))));
  }
}

// A rank that had no samples in the first step may use what others did, and nothing that nobody did.
TEST_P(DistributedSteps, AStaticGraphOfARankThatComesLate) {
  if (ranks() == 1) GTEST_SKIP() << "one rank is not late";
  for (const bool more : {false, true}) {
    Branching mine(branches);
    DistributedDataParallel ddp(*mine.module, group(), options({.static_graph = true}));
    const bool is_late = group().rank() + 1 == group().size();
    const auto step = [&](int number) {
      for (const auto& [name, parameter] : ddp.parameters()) parameter->clear_grad();
      if (is_late && number < 3) return ddp.contribute_nothing();
      mine.module->right = is_late && more;
      Batch part(0, 2);
      mine.tape->backward(mine.loss_of(ddp(*mine.tape, mine.input(part)), part, 2 * ranks()).value);
      mine.tape->reset();
    };
    step(1);
    step(2);
    if (more) {
      EXPECT_REFUSED(fmt::format("a gradient for right.weight, right.bias on rank {}", ranks() - 1), step(3));
    } else {
      step(3);
      step(4);
    }
  }
}

TEST(DistributedStaticGraph, ExcludesFindUnusedParameters) {
  Branching mine(branches);
  EXPECT_REFUSED(
      "static_graph with find_unused_parameters",
      DistributedDataParallel(*mine.module, group(), {.find_unused_parameters = true, .static_graph = true}));
}

TEST_P(DistributedSteps, GradientsWithMemoryOfTheirOwnNeverMove) {
  Pair pair(options({.find_unused_parameters = true, .gradient_as_bucket_view = false}));
  std::vector<const void*> places;
  for (int step = 1; step <= 4; ++step) {
    pair.mine.module->left = pair.alone.module->left = step != 3;
    auto batches = equal_batches(step);
    if (step == 2 && ranks() > 1) batches[0] = Batch(0, 0);
    std::uint64_t samples = 0;
    for (const Batch& batch : batches) samples += batch.labels.size();
    pair.step(batches, samples, fmt::format(" in step {}", step));
    std::vector<const void*> now;
    for (const auto& [name, parameter] : pair.ddp.parameters()) now.push_back(parameter->gradient().raw());
    if (step == 1) places = now;
    EXPECT_EQ(now, places);
  }
  // Nor are they in a bucket: the next step's sums leave them alone until they are there.
  for (const auto& [name, parameter] : pair.ddp.parameters())
    for (std::size_t slot = 0; slot < pair.ddp.reducer().slots(); ++slot)
      EXPECT_NE(parameter->gradient().raw(), static_cast<const void*>(pair.ddp.reducer().storage(slot).data()));
}

TEST_P(DistributedSteps, GradientsWithMemoryOfTheirOwnAddUpOverParts) {
  Branching mine(branches), alone(branches);
  DistributedDataParallel ddp(*mine.module, group(), options({.gradient_as_bucket_view = false}));
  for (int step = 1; step <= 3; ++step) {
    for (const auto& [name, parameter] : mine.module->named_parameters()) parameter->clear_grad();
    for (const auto& [name, parameter] : alone.module->named_parameters()) parameter->clear_grad();
    Batch whole(static_cast<std::uint64_t>(step) * 100, 4 * ranks());
    alone.tape->backward(
        alone.loss_of(alone.module->forward(*alone.tape, alone.input(whole)), whole, 4 * ranks()).value);
    alone.tape->reset();
    for (std::uint64_t part = 0; part < 2; ++part) {
      std::optional<DistributedDataParallel::NoSync> no_sync;
      if (part == 0) no_sync.emplace(ddp);
      Batch own(static_cast<std::uint64_t>(step) * 100 + 4 * rank() + 2 * part, 2);
      mine.tape->backward(mine.loss_of(ddp(*mine.tape, mine.input(own)), own, 4 * ranks()).value);
      mine.tape->reset();
    }
    expect_same_gradients(*mine.module, *alone.module, fmt::format(" in step {}", step));
  }
}

// One layer in two places, as an embedding that is tied to the output's.
class Twice final : public nn::Module {
 public:
  explicit Twice(nn::Context& context)
      : first_(register_module("first", std::make_unique<nn::Linear>(context, kFeatures, 8))),
        shared_(register_module("shared", std::make_unique<nn::Linear>(context, 8, 8))),
        last_(register_module("last", std::make_unique<nn::Linear>(context, 8, kClasses))) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override {
    x = first_.forward(tape, x, nn::Epilogue::kRelu);
    x = shared_.forward(tape, x, nn::Epilogue::kRelu);
    return last_.forward(tape, shared_.forward(tape, x));
  }

 private:
  nn::Linear &first_, &shared_, &last_;
};

std::unique_ptr<nn::Module> twice(nn::Context& context) { return std::make_unique<Twice>(context); }

TEST_P(DistributedSteps, AParameterThatIsUsedTwiceIsSummedOnce) {
  Trainee<Twice> mine(twice, rank() + 1), alone(twice);
  DistributedDataParallel ddp(*mine.module, group(), options());
  for (int step = 1; step <= 3; ++step) {
    for (const auto& [name, parameter] : mine.module->named_parameters()) parameter->clear_grad();
    for (const auto& [name, parameter] : alone.module->named_parameters()) parameter->clear_grad();
    Batch whole(static_cast<std::uint64_t>(step) * 100, 3 * ranks());
    alone.tape->backward(
        alone.loss_of(alone.module->forward(*alone.tape, alone.input(whole)), whole, 3 * ranks()).value);
    alone.tape->reset();
    Batch own(static_cast<std::uint64_t>(step) * 100 + 3 * rank(), 3);
    mine.tape->backward(mine.loss_of(ddp(*mine.tape, mine.input(own)), own, 3 * ranks()).value);
    mine.tape->reset();
    expect_same_gradients(*mine.module, *alone.module, fmt::format(" in step {}", step));
  }
}

// Two losses of a step, each with a backward pass of its own, whose gradients add up; the update comes after both.
TEST_P(DistributedSteps, SeveralBackwardPassesOfAStepAddUp) {
  Branching mine(branches), alone(branches);
  DistributedDataParallel ddp(*mine.module, group(), options());
  const auto optimizer = nn::make_sgd(ddp.parameters(), {.momentum = 0.9});
  const auto reference = nn::make_sgd(alone.module->named_parameters(), {.momentum = 0.9});
  for (int step = 1; step <= 3; ++step) {
    optimizer->zero_grad();
    reference->zero_grad();
    for (std::uint64_t loss = 0; loss < 3; ++loss) {
      const std::uint64_t first = static_cast<std::uint64_t>(step) * 1000 + loss * 100;
      Batch whole(first, 2 * ranks());
      alone.tape->backward(
          alone.loss_of(alone.module->forward(*alone.tape, alone.input(whole)), whole, 2 * ranks()).value);
      alone.tape->reset();
      Batch own(first + 2 * rank(), 2);
      mine.tape->backward(mine.loss_of(ddp(*mine.tape, mine.input(own)), own, 2 * ranks()).value);
      mine.tape->reset();
    }
    const std::string when = fmt::format(" in step {}", step);
    expect_same_gradients(*mine.module, *alone.module, when);
    optimizer->step(0.1);
    reference->step(0.1);
    expect_same_parameters(*mine.module, *alone.module, when);
    ddp.check();
  }
}

INSTANTIATE_TEST_SUITE_P(Buckets, DistributedSteps, ::testing::Values(std::optional<double>(), kTinyMib),
                         [](const auto& buckets) { return buckets.param ? "Tiny" : "Default"; });

}  // namespace
}  // namespace lockstep::parallel
