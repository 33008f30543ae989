// DistributedDataParallel on several ranks against one process: what a custom training loop computes, and what is
// refused.
#include "base/error.h"
#include "lockstep/parallel/distributed_data_parallel.h"

#include <gmock/gmock.h>

#include "base/splitmix.h"
#include "lockstep/sampler/slice.h"
#include "tests/parallel/trainee.h"
#include "tests/support/ranks.h"
#include "tests/support/refusal.h"

namespace lockstep::parallel {
namespace {

using fixture::Batch;
using fixture::branches;
using fixture::Branches;
using fixture::Branching;
using fixture::expect_near;
using fixture::expect_same_gradients;
using fixture::expect_same_parameters;
using fixture::kClasses;
using fixture::kFeatures;
using fixture::kTinyMib;
using fixture::ranks;
using fixture::Trainee;
using fixture::values_of;
using lockstep::testing::group;
using lockstep::testing::rank_backend;
using lockstep::testing::refusal_of;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Options = DistributedDataParallel::Options;

bool is_last() { return group().rank() + 1 == group().size(); }

// Normalisations after a convolution and after a linear layer, deep enough for gradients to go through both.
std::unique_ptr<nn::Module> normed_model(nn::Context& context) {
  auto model = std::make_unique<nn::Sequential>();
  model->then(std::make_unique<nn::Conv2d>(context, 2, 5, nn::Window{.kernel = {3, 3}}))
      .then(std::make_unique<nn::BatchNorm>(context, 5))
      .then(std::make_unique<nn::ReLU>())
      .then(std::make_unique<nn::Flatten>())
      .then(std::make_unique<nn::Linear>(context, 5 * 2 * 2, 7))
      .then(std::make_unique<nn::BatchNorm>(context, 7))
      .then(std::make_unique<nn::ReLU>())
      .then(std::make_unique<nn::Linear>(context, 7, kClasses));
  return model;
}

class Distributed : public fixture::BucketSizes {};

// Which layers rank `rank` takes in step `step`: all; another on each rank; none of them the right one; one alone on
// the last rank; all again.
void choose(Branches& module, int step, std::uint64_t rank) {
  module.left = module.right = true;
  module.dead_end = false;
  if (step == 2) (rank % 2 == 0 ? module.right : module.left) = false;
  if (step == 3 || step == 4) module.right = false;
  if (step == 4) module.left = rank + 1 == ranks();
  if (step == 5) {
    module.left = module.right = false;
    module.dead_end = rank == 0;
  }
}

TEST_P(Distributed, UnusedParametersOnSomeRanksOrAll) {
  Branching mine(branches, static_cast<std::uint64_t>(group().rank()) + 1), alone(branches);
  DistributedDataParallel ddp(*mine.module, group(), options({.find_unused_parameters = true}));
  // Momentum and decay would move what is to be left alone.
  const auto optimizer = nn::make_sgd(ddp.parameters(), {.momentum = 0.9, .weight_decay = 0.01});
  const auto reference = nn::make_sgd(alone.module->named_parameters(), {.momentum = 0.9, .weight_decay = 0.01});
  const std::uint64_t global_count = 3 * ranks() + 1;
  for (int step = 1; step <= 7; ++step) {
    reference->zero_grad();
    for (std::uint64_t rank = 0; rank < ranks(); ++rank) {
      const auto slice = sampler::slice_of(global_count, rank, ranks());
      Batch part(slice.begin, slice.count);
      choose(*alone.module, step, rank);
      alone.tape->backward(
          alone.loss_of(alone.module->forward(*alone.tape, alone.input(part)), part, global_count).value);
      alone.tape->reset();
    }
    const auto slice = sampler::slice_of(global_count, static_cast<std::uint64_t>(group().rank()), ranks());
    Batch part(slice.begin, slice.count);
    choose(*mine.module, step, static_cast<std::uint64_t>(group().rank()));
    const nn::Var y = ddp(*mine.tape, mine.input(part));
    const nn::Loss loss = mine.loss_of(y, part, global_count);
    optimizer->zero_grad();  // after the loss is as good as before the pass
    mine.tape->backward(loss.value);
    const std::string when = fmt::format(" in step {}", step);
    expect_same_gradients(*mine.module, *alone.module, when);
    optimizer->step(0.1);
    reference->step(0.1);
    expect_same_parameters(*mine.module, *alone.module, when);
    ddp.check();
    mine.tape->reset();
  }
}

TEST_P(Distributed, WithoutTheOptionAllRanksNameWhatHadNoGradient) {
  Branching mine(branches);
  DistributedDataParallel ddp(*mine.module, group(), options());
  const auto step = [&] {
    Batch part(0, 2);
    for (const auto& [name, parameter] : ddp.parameters()) parameter->clear_grad();
    const nn::Loss loss = mine.loss_of(ddp(*mine.tape, mine.input(part)), part, 2 * ranks());
    mine.tape->backward(loss.value);
  };
  step();
  mine.tape->reset();
  const int last = group().size() - 1;
  mine.module->left = group().rank() != last;  // one rank alone
  EXPECT_THAT(refusal_of(step),
              AllOf(HasSubstr("no gradient for left.weight, left.bias on"),
                    HasSubstr(last == 0 ? "on all ranks in step 2" : fmt::format("on rank {} in step 2", last)),
                    HasSubstr("find_unused_parameters")));
}

TEST_P(Distributed, GradientsMissingOnAllRanksAreNamed) {
  Branching mine(branches);
  DistributedDataParallel ddp(*mine.module, group(), options());
  mine.module->left = false;
  mine.module->dead_end = true;
  mine.module->right = false;
  Batch part(0, 2);
  const nn::Loss loss = mine.loss_of(ddp(*mine.tape, mine.input(part)), part, 2);
  EXPECT_THAT(refusal_of([&] { mine.tape->backward(loss.value); }),
              AllOf(HasSubstr("left.weight, left.bias, right.weight, right.bias on all ranks in step 1")));
}

TEST_P(Distributed, PartsOfABatchAddUp) {
  Branching mine(branches), alone(branches);
  DistributedDataParallel ddp(*mine.module, group(), options());
  const auto optimizer = nn::make_adamw(ddp.parameters(), {});
  const auto reference = nn::make_adamw(alone.module->named_parameters(), {});
  constexpr std::uint64_t kParts = 3;
  std::uint64_t cursor = 0;
  // The second is too small for every rank to have something, the fourth for every part.
  for (const std::uint64_t global_count : {24u, 1u, 17u, 5u}) {
    Batch whole(cursor, global_count);
    reference->zero_grad();
    alone.tape->backward(
        alone.loss_of(alone.module->forward(*alone.tape, alone.input(whole)), whole, global_count).value);
    optimizer->zero_grad();
    const auto slice = sampler::slice_of(global_count, static_cast<std::uint64_t>(group().rank()), ranks());
    for (std::uint64_t p = 0; p < kParts; ++p) {
      const auto part = sampler::slice_of(slice.count, p, kParts);
      Batch batch(cursor + slice.begin + part.begin, part.count);
      std::optional<DistributedDataParallel::NoSync> no_sync;
      const bool last = p + 1 == kParts;
      if (!last) no_sync.emplace(ddp);
      if (part.count > 0)
        mine.tape->backward(mine.loss_of(ddp(*mine.tape, mine.input(batch)), batch, global_count).value);
      else if (last)
        ddp.contribute_nothing();
      mine.tape->reset();
    }
    const std::string when = fmt::format(" with {} samples", global_count);
    expect_same_gradients(*mine.module, *alone.module, when);
    optimizer->step(0.01);
    reference->step(0.01);
    ddp.check();
    alone.tape->reset();
    cursor += global_count;
  }
}

TEST_P(Distributed, WithoutZeroGradGradientsAccumulateOnce) {
  Branching mine(branches), alone(branches);
  DistributedDataParallel ddp(*mine.module, group(), options());
  for (std::uint64_t pass = 0; pass < 3; ++pass) {
    const std::uint64_t global_count = 2 * ranks() + 1;
    Batch whole(100 * pass, global_count);
    alone.tape->backward(
        alone.loss_of(alone.module->forward(*alone.tape, alone.input(whole)), whole, global_count).value);
    const auto slice = sampler::slice_of(global_count, static_cast<std::uint64_t>(group().rank()), ranks());
    Batch part(100 * pass + slice.begin, slice.count);
    mine.tape->backward(mine.loss_of(ddp(*mine.tape, mine.input(part)), part, global_count).value);
    expect_same_gradients(*mine.module, *alone.module, fmt::format(" in pass {}", pass));
    mine.tape->reset();
    alone.tape->reset();
  }
}

using Normed = Trainee<nn::Module>;

TEST_P(Distributed, SyncBatchNormComputesWhatOneProcessDoes) {
  Normed mine(normed_model, static_cast<std::uint64_t>(group().rank()) + 1), alone(normed_model);
  EXPECT_EQ(convert_sync_batchnorm(*mine.module, group()), 2);
  DistributedDataParallel ddp(*mine.module, group(), options());
  const auto optimizer = nn::make_sgd(ddp.parameters(), {.momentum = 0.9});
  const auto reference = nn::make_sgd(alone.module->named_parameters(), {.momentum = 0.9});
  const nn::Shape shape = {0, 4, 4, 2};
  std::uint64_t cursor = 0;
  for (const std::uint64_t global_count : {4 * ranks() + 3, std::uint64_t{2}, std::uint64_t{31}}) {
    Batch whole(cursor, global_count, 32);
    reference->zero_grad();
    alone.tape->backward(
        alone.loss_of(alone.module->forward(*alone.tape, alone.input(whole, shape)), whole, global_count).value);
    const auto slice = sampler::slice_of(global_count, static_cast<std::uint64_t>(group().rank()), ranks());
    Batch part(cursor + slice.begin, slice.count, 32);  // of no rows on some ranks
    optimizer->zero_grad();
    mine.tape->backward(mine.loss_of(ddp(*mine.tape, mine.input(part, shape)), part, global_count).value);
    const std::string when = fmt::format(" with {} samples", global_count);
    // A bias before a normalisation has a gradient of zero, which is what rounding leaves of it: some roundings of
    // summands of about 0.1. Two values are normalised to 1 and -1 whatever they are, so there that is all gradients
    // before it, with the roundings of more layers.
    expect_same_gradients(*mine.module, *alone.module, when, 5e-5f, global_count == 2 ? 5e-2f : 1e-2f);
    const auto got = mine.module->named_buffers(), wanted = alone.module->named_buffers();
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (got[i].tensor->dtype() == DType::kI64)
        EXPECT_EQ(values_of<std::int64_t>(*got[i].tensor), values_of<std::int64_t>(*wanted[i].tensor));
      else
        expect_near(*got[i].tensor, *wanted[i].tensor, got[i].name + when, 1e-5f, 1e-2f);
    }
    optimizer->step(0.05);
    reference->step(0.05);
    ddp.check();
    mine.tape->reset();
    alone.tape->reset();
    cursor += global_count;
  }
}

// Sums in the middle of backward, and layers that some ranks leave out: the ranks' collectives stay in one order.
class NormedBranch final : public nn::Module {
 public:
  explicit NormedBranch(nn::Context& context)
      : first_(register_module("first", std::make_unique<nn::Linear>(context, kFeatures, 8))),
        norm_(register_module("norm", std::make_unique<nn::BatchNorm>(context, 8))),
        extra_(register_module("extra", std::make_unique<nn::Linear>(context, 8, 8))),
        last_(register_module("last", std::make_unique<nn::Linear>(context, 8, kClasses))) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override {
    x = norm_.forward(tape, first_.forward(tape, x), nn::Epilogue::kRelu);
    return last_.forward(tape, extra ? extra_.forward(tape, x) : x);
  }
  bool extra = true;

 private:
  nn::Linear& first_;
  nn::BatchNorm& norm_;
  nn::Linear &extra_, &last_;
};

TEST_P(Distributed, SyncBatchNormBesideUnusedParameters) {
  Trainee<NormedBranch> mine(
      [](nn::Context& context) -> std::unique_ptr<nn::Module> { return std::make_unique<NormedBranch>(context); });
  convert_sync_batchnorm(*mine.module, group());
  DistributedDataParallel ddp(*mine.module, group(), options({.find_unused_parameters = true}));
  const auto optimizer = nn::make_sgd(ddp.parameters(), {});
  for (int step = 1; step <= 4; ++step) {
    Batch part(static_cast<std::uint64_t>(10 * group().rank()), 3);
    mine.module->extra = step != 4 && (group().rank() + step) % 2 == 0;
    optimizer->zero_grad();
    mine.tape->backward(mine.loss_of(ddp(*mine.tape, mine.input(part)), part, 3 * ranks()).value);
    EXPECT_EQ(mine.module->named_parameters()[4].parameter->has_gradient(),
              step != 4 && (ranks() > 1 || step % 2 == 0));
    optimizer->step(0.1);
    ddp.check();
    mine.tape->reset();
  }
}

INSTANTIATE_TEST_SUITE_P(Buckets, Distributed, ::testing::Values(std::nullopt, kTinyMib),
                         [](const auto& test) { return test.param ? "tiny" : "of_default_size"; });

TEST(DistributedBuffers, AreBroadcastFromRankZeroUnlessDisabled) {
  for (const bool broadcast : {true, false}) {
    Normed mine(normed_model);
    DistributedDataParallel ddp(*mine.module, group(), {.broadcast_buffers = broadcast});
    const auto running_mean = [&] { return values_of<float>(*mine.module->named_buffers()[0].tensor)[0]; };
    const auto of_all = [&] { return group().all_gather_text(fmt::format("{}", running_mean())); };
    for (int step = 0; step < 2; ++step) {
      Batch part(static_cast<std::uint64_t>(10 * group().rank()), 4, 32);  // other samples on each rank
      const nn::Loss loss = mine.loss_of(ddp(*mine.tape, mine.input(part, {0, 4, 4, 2})), part, 4 * ranks());
      mine.tape->backward(loss.value);
      mine.tape->reset();
    }
    const auto before = of_all();
    if (group().size() > 1) {
      EXPECT_NE(before[0], before[1]);
    }
    // An evaluating pass after one that has summed sends them too, and the next one does not.
    ddp.train(false);
    EXPECT_FALSE(mine.module->training());
    mine.tape->set_recording(false);
    Batch one(0, 1, 32);
    ddp(*mine.tape, mine.input(one, {0, 4, 4, 2}));
    if (broadcast) {
      EXPECT_THAT(of_all(), ::testing::Each(before[0]));
    } else {
      EXPECT_EQ(of_all(), before);
    }
    ddp(*mine.tape, mine.input(one, {0, 4, 4, 2}));  // collective on no rank: what follows finds the ranks in step
    group().barrier().wait_host();
  }
}

TEST(DistributedModule, IsOneWithNamesAsPyTorchHasThem) {
  Branching mine(branches);
  DistributedDataParallel ddp(*mine.module, group());
  EXPECT_EQ(ddp.named_parameters()[0].name, "module.first.weight");
  EXPECT_EQ(&ddp.module(), mine.module.get());
}

TEST(DistributedRefuses, InvalidDeviceIds) {
  Branching mine(branches);
  const auto refusal = [&](const Options& options) {
    return refusal_of([&] { DistributedDataParallel ddp(*mine.module, group(), options); });
  };
  EXPECT_THAT(refusal({.device_ids = {0, 0}}), HasSubstr("device_ids names 2 devices (0, 0), and a rank has one"));
  const std::string place = to_string(rank_backend().device());
  EXPECT_THAT(refusal({.device_ids = {7}}), HasSubstr("device_ids is 7, and the module is on " + place));
  EXPECT_THAT(refusal({.device_ids = {-1}}), HasSubstr("device_ids is -1"));
  EXPECT_THAT(refusal({.output_device = 2}), HasSubstr("output_device is 2, and the module is on " + place));
  EXPECT_THAT(refusal({.bucket_mb = -1.0}), HasSubstr("a bucket of no size"));
  EXPECT_EQ(refusal({.device_ids = {0}, .output_device = 0}), "");
  // And on one rank alone: all end, the others with its text.
  EXPECT_THAT(refusal({.device_ids = is_last() ? std::vector<int>{5} : std::vector<int>{}}),
              HasSubstr("device_ids is 5"));
}

TEST(DistributedRefuses, ModuleOnSeveralDevicesOrWithoutParameters) {
  Branching mine(branches);
  const auto other = testing::make_rank_backend();
  nn::Context elsewhere{*other, mine.generator};
  nn::Sequential split;
  split.then(std::make_unique<nn::Linear>(mine.context, 2, 2)).then(std::make_unique<nn::Linear>(elsewhere, 2, 2));
  EXPECT_REFUSED(fmt::format("1.weight is on {}, and", to_string(rank_backend().device())),
                 DistributedDataParallel ddp(split, group()));
  for (const auto& [name, parameter] : mine.module->named_parameters()) parameter->set_requires_grad(false);
  EXPECT_REFUSED("no parameters to train", DistributedDataParallel ddp(*mine.module, group()));
}

// Every rank but the last has Linear(6 → 3) and default options; what the last one has instead, and what all say.
struct Difference {
  const char* name;
  std::unique_ptr<nn::Module> (*make)(nn::Context&);
  Options options;
  std::vector<std::string> says;
};

std::unique_ptr<nn::Module> two_linear(nn::Context& context) {
  auto model = std::make_unique<nn::Sequential>();
  model->then(std::make_unique<nn::Linear>(context, 4, 4)).then(std::make_unique<nn::BatchNorm>(context, 4));
  return model;
}
std::unique_ptr<nn::Module> wider(nn::Context& context) {
  auto model = std::make_unique<nn::Sequential>();
  model->then(std::make_unique<nn::Linear>(context, 5, 4)).then(std::make_unique<nn::BatchNorm>(context, 4));
  return model;
}
std::unique_ptr<nn::Module> other_order(nn::Context& context) {
  auto model = std::make_unique<nn::Sequential>();
  model->then(std::make_unique<nn::BatchNorm>(context, 4)).then(std::make_unique<nn::Linear>(context, 4, 4));
  return model;
}
std::unique_ptr<nn::Module> shorter(nn::Context& context) {
  auto model = std::make_unique<nn::Sequential>();
  model->then(std::make_unique<nn::Linear>(context, 4, 4));
  return model;
}
std::unique_ptr<nn::Module> frozen(nn::Context& context) {
  auto model = two_linear(context);
  model->named_parameters()[1].parameter->set_requires_grad(false);
  return model;
}

// Beside what is trained, a number that some count in whole steps.
template <DType kType>
std::unique_ptr<nn::Module> counting(nn::Context& context) {
  class Counting final : public nn::Module {
   public:
    explicit Counting(nn::Context& c) : fc_(register_module("fc", std::make_unique<nn::Linear>(c, 4, 4))) {
      register_buffer("count", c.backend, c.backend.empty({2}, kType));
    }
    nn::Var forward(nn::Tape& tape, nn::Var x) override { return fc_.forward(tape, x); }

   private:
    nn::Linear& fc_;
  };
  return std::make_unique<Counting>(context);
}

TEST(DistributedRefuses, RanksWhoseStateIsOfOtherTypes) {
  if (group().size() == 1) GTEST_SKIP() << "takes two";
  Normed trainee(is_last() ? counting<DType::kF32> : counting<DType::kI64>);
  EXPECT_THAT(refusal_of([&] { DistributedDataParallel ddp(*trainee.module, group()); }),
              AllOf(HasSubstr(fmt::format("rank {} (host ", group().size() - 1)),
                    HasSubstr("has state 0=count f32 [2]"), HasSubstr("has state 0=count i64 [2]")));
}

TEST(DistributedRefuses, RanksThatDiffer) {
  if (group().size() == 1) GTEST_SKIP() << "takes two";
  const std::vector<Difference> differences = {
      {"shape", wider, {}, {"parameter 0=0.weight f32 [4, 5]", "parameter 0=0.weight f32 [4, 4]"}},
      {"order",
       other_order,
       {},
       {"parameter 0=0.weight f32 [4], parameter 2=1.weight f32 [4, 4], state 0=0.running_mean"}},
      {"number", shorter, {}, {"number of parameters=2", "number of parameters=4", "number of buffers=0"}},
      {"frozen", frozen, {}, {"parameter 1=0.bias f32 [4], not trained"}},
      {"bucket", two_linear, {.bucket_mb = 2.0}, {"bytes of a bucket=2097152"}},
      {"first bucket", two_linear, {.first_bucket_mb = 0.5}, {"bytes of the first bucket=524288"}},
      {"buffers", two_linear, {.broadcast_buffers = false}, {"broadcast_buffers=false", "broadcast_buffers=true"}},
      {"unused", two_linear, {.find_unused_parameters = true}, {"find_unused_parameters=true"}},
  };
  const std::string who = fmt::format("rank {} (host ", group().size() - 1);
  for (const Difference& difference : differences) {
    SCOPED_TRACE(difference.name);
    Normed trainee(is_last() ? difference.make : two_linear);
    const std::string said = refusal_of(
        [&] { DistributedDataParallel ddp(*trainee.module, group(), is_last() ? difference.options : Options()); });
    EXPECT_THAT(said, AllOf(HasSubstr(who), HasSubstr("rank 0 (host ")));
    for (const std::string& part : difference.says) EXPECT_THAT(said, HasSubstr(part));
  }
}

TEST(DistributedRefuses, NormalisationsThatAreSynchronisedOnSomeRanksAlone) {
  if (group().size() == 1) GTEST_SKIP() << "takes two";
  Normed trainee(is_last() ? shorter : two_linear);
  EXPECT_REFUSED("batch normalisations=0", convert_sync_batchnorm(*trainee.module, group()));
}

}  // namespace
}  // namespace lockstep::parallel
