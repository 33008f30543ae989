// Sharded updates (Note [ZeRO]) on several ranks: the bits of updates that every rank does by itself, what each rank
// remembers, and what is refused.
#include <gmock/gmock.h>

#include <chrono>
#include <cstring>

#include "base/error.h"
#include "base/splitmix.h"
#include "lockstep/base/deadline.h"
#include "lockstep/ddp/sharded_update.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/ops/transfer.h"
#include "lockstep/nn/optim/optimizers.h"
#include "lockstep/parallel/data_parallel.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "tests/parallel/rank_backend.h"
#include "tests/support/ranks.h"
#include "tests/support/refusal.h"

namespace lockstep::parallel {
namespace {

using lockstep::testing::group;
using lockstep::testing::rank_backend;

constexpr std::int64_t kIn = 41, kHidden = 301, kOutputs = 7;  // 12,341 weights: blocks are cut by their end

using Options = DistributedDataParallel::Options;
using Bytes = std::vector<std::vector<std::byte>>;

std::vector<std::byte> bytes_of(const nn::Tensor& tensor) {
  std::vector<std::byte> bytes(tensor.bytes());
  rank_backend().download(tensor, bytes);
  return bytes;
}

/// Two branches, of which a pass may leave out one.
class TwoBranches final : public nn::Module {
 public:
  explicit TwoBranches(nn::Context& context)
      : first_(register_module<nn::Linear>("first", context, kIn, kHidden)),
        left_(register_module<nn::Linear>("left", context, kHidden, kOutputs)),
        right_(register_module<nn::Linear>("right", context, kHidden, kOutputs)) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override {
    const nn::Var hidden = nn::relu(tape, first_.forward(tape, x));
    if (leaves_out_right) return left_.forward(tape, hidden);
    return nn::add(tape, left_.forward(tape, hidden), right_.forward(tape, hidden));
  }
  bool leaves_out_right = false;

 private:
  nn::Linear &first_, &left_, &right_;
};

class ZeroTraining {
 public:
  ZeroTraining(const std::string& optimizer, const Options& options) : unused_(options.find_unused_parameters) {
    ddp_.emplace(model_, group(), options);
    optimizer_ = nn::make_optimizer(optimizer, ddp_->parameters(), {}, 0.01,
                                    {{.patterns = {"*.bias"}, .weight_decay = 0.0}}, ddp_->share());
  }

  void step(std::uint64_t number, double clip_norm = 0, int parts = 1) {
    optimizer_->zero_grad();
    // A parameter that no rank has in one step, and that some have not in another one.
    model_.leaves_out_right = unused_ && (number % 3 == 1 || (number % 3 == 2 && group().rank() > 0));
    for (int part = 0; part < parts; ++part) {
      std::optional<DistributedDataParallel::NoSync> no_sync;
      if (part + 1 < parts) no_sync.emplace(*ddp_);
      pass(number * 10 + static_cast<std::uint64_t>(part));
    }
    optimizer_->step({.lr = 0.1, .clip_norm = clip_norm});
  }

  void pass(std::uint64_t seed) {
    constexpr std::int64_t kRows = 3;
    const auto rank = static_cast<std::uint64_t>(group().rank());
    std::vector<float> values;
    for (std::int64_t i = 0; i < kRows * kIn; ++i)
      values.push_back(
          static_cast<float>(SplitMix64::word(seed * 100 + rank, static_cast<std::uint64_t>(i)) % 1000) / 500 - 1);
    const nn::Tensor labels = rank_backend().empty({kRows}, DType::kI32);
    const std::vector<std::int32_t> classes = {static_cast<std::int32_t>(seed % kOutputs), 1, 2};
    rank_backend().upload(std::as_bytes(std::span(classes)), labels);
    tape_.reset();
    const nn::Var y = (*ddp_)(tape_, tape_.input(nn::tensor_of(rank_backend(), {kRows, kIn}, values)));
    tape_.backward(nn::cross_entropy(tape_, y, labels, 1.0f / static_cast<float>(kRows * group().size())).value);
    tape_.reset();
  }

  Bytes parameters() const {
    Bytes all;
    for (const auto& [name, parameter] : model_.named_parameters()) all.push_back(bytes_of(parameter->value()));
    return all;
  }
  Bytes moments() const {
    Bytes all;
    for (const auto& moment : optimizer_->moments()) all.push_back(bytes_of(moment.value));
    return all;
  }
  nn::Optimizer& optimizer() { return *optimizer_; }
  DistributedDataParallel& ddp() { return *ddp_; }
  TwoBranches& model() { return model_; }
  void end() { ddp_.reset(); }

 private:
  bool unused_;
  nn::Generator generator_{1};
  nn::Context context_{rank_backend(), generator_};
  TwoBranches model_{context_};
  nn::Tape tape_{rank_backend()};
  std::optional<DistributedDataParallel> ddp_;
  std::unique_ptr<nn::Optimizer> optimizer_;
};

// NCCL sums a bucket's allreduce and its reduce-scatter in orders of its own.
bool sums_in_rank_order() { return group().device().kind == DeviceKind::kCpu || group().size() <= 2; }

std::vector<std::string> optimizers_of_slices() {
  auto names = nn::optimizer_names();
  std::erase_if(names, [](const std::string& name) { return nn::optimizer_family(name).whole_matrices; });
  return names;
}

TEST(Zero, HasTheBitsOfUpdatesOnEveryRank) {
  if (!sums_in_rank_order()) GTEST_SKIP() << "NCCL chooses the order of sums";
  struct Case {
    Options options;
    double clip_norm = 0;
    int parts = 1;
  };
  Case cases[5];
  cases[1] = {.options = {.bucket_mb = 0.001, .first_bucket_mb = 0.001}};
  cases[2] = {.options = {.bucket_mb = 0.03, .first_bucket_mb = 0.001}, .clip_norm = 0.3};
  cases[3] = {.options = {.find_unused_parameters = true, .bucket_mb = 0.001, .first_bucket_mb = 0.001},
              .clip_norm = 0.3};
  cases[4] = {.options = {.first_bucket_mb = 0.03}, .parts = 3};
  for (const std::string& name : optimizers_of_slices())
    for (std::size_t i = 0; i < std::size(cases); ++i) {
      SCOPED_TRACE(name + ", case " + std::to_string(i));
      ZeroTraining without(name, cases[i].options);
      Options options = cases[i].options;
      options.zero = 1;
      ZeroTraining with(name, options);
      for (std::uint64_t step = 1; step <= 4; ++step) {
        without.step(step, cases[i].clip_norm, cases[i].parts);
        with.step(step, cases[i].clip_norm, cases[i].parts);
        ASSERT_TRUE(with.parameters() == without.parameters()) << "step " << step;
      }
      with.ddp().check();
    }
}

// On GPUs with NCCL too: all ranks have the same.
TEST(Zero, AllRanksHaveTheSameParameters) {
  for (const std::string& name : optimizers_of_slices()) {
    ZeroTraining training(name, {.first_bucket_mb = 0.03, .zero = 1});
    const Bytes before = training.parameters();
    for (std::uint64_t step = 1; step <= 3; ++step) training.step(step, 0.5);
    EXPECT_FALSE(training.parameters() == before);
    EXPECT_NO_THROW(training.ddp().check()) << name;
  }
}

TEST(Zero, EachRankRemembersItsShare) {
  ZeroTraining without("adamw", {}), with("adamw", {.zero = 1});
  std::int64_t mine = 0, most = 0, whole = 0;
  for (const auto& moment : with.optimizer().moments()) mine += moment.value.count();
  for (const auto& moment : without.optimizer().moments()) whole += moment.value.count();
  std::int64_t all = 0;
  for (const std::int64_t theirs : group().all_gather_numbers(mine)) {
    all += theirs;
    most = std::max(most, theirs);
  }
  EXPECT_EQ(all, whole) << "nothing twice, nothing not at all";
  const std::int64_t blocks =
      2 * 2 * nn::kNormBlock;  // of both moments: what a slot's and a bucket's padding can shift
  EXPECT_LE(most, whole / group().size() + 6 * blocks);
}

TEST(Zero, MomentsAreGatheredAndScattered) {
  if (!sums_in_rank_order()) GTEST_SKIP() << "NCCL chooses the order of sums";
  ZeroTraining without("adamw", {}), with("adamw", {.bucket_mb = 0.03, .first_bucket_mb = 0.001, .zero = 1});
  for (std::uint64_t step = 1; step <= 3; ++step) {
    without.step(step);
    with.step(step);
  }
  const Bytes mine = with.moments();
  for (int root = 0; root < group().size(); ++root) {
    const Bytes whole = with.ddp().gather_moments(with.optimizer(), root);
    if (group().rank() == root)
      EXPECT_TRUE(whole == without.moments());
    else
      EXPECT_TRUE(whole.empty());
    // In other buckets, other ranks have other slices.
    ZeroTraining other("adamw", {.zero = 1});
    other.ddp().scatter_moments(other.optimizer(), whole, root);
    const Bytes again = other.ddp().gather_moments(other.optimizer(), root);
    EXPECT_TRUE(again == whole);
  }
  EXPECT_TRUE(with.moments() == mine);
}

/// A loop that moves parameters bucket by bucket, and does not wait for those of other ranks.
class ZeroLoop {
 public:
  explicit ZeroLoop(int zero, const std::string& optimizer = "adamw")
      : training(optimizer, {.bucket_mb = 0.01, .first_bucket_mb = 0.001, .zero = zero}) {
    training.ddp().set_bucket_callback(
        [this](std::span<const std::size_t> slots) { training.optimizer().update(slots); });
  }
  ~ZeroLoop() {
    if (!ended) training.ddp().set_bucket_callback(nullptr);
  }
  void step(std::uint64_t number) {
    training.optimizer().zero_grad();
    training.optimizer().begin_step(0.1);
    training.pass(number);
    training.ddp().start_gathering_parameters();
  }
  void end() {
    training.end();
    ended = true;
  }
  ZeroTraining training;
  bool ended = false;
};

TEST(Zero, ReadersWaitForTheParameter) {
  if (!sums_in_rank_order()) GTEST_SKIP() << "NCCL chooses the order of sums";
  for (const char* optimizer : {"adamw", "lamb"}) {
    ZeroLoop without(0, optimizer), with(1, optimizer);
    const auto expected = without.training.model().named_parameters();
    const auto parameters = with.training.model().named_parameters();
    const std::size_t count = parameters.size();
    for (std::uint64_t step = 1; step <= 5; ++step) {
      without.step(step);
      with.step(step);
      // Each rank in another order, and in one step a single one: waiting is nothing that ranks do together.
      const std::size_t first = static_cast<std::size_t>(group().rank()) + step;
      for (std::size_t i = 0; i < (step == 2 ? 1 : count); ++i) {
        const std::size_t p = (first + i * (count - 1)) % count;
        ASSERT_EQ(bytes_of(parameters[p].parameter->value()), bytes_of(expected[p].parameter->value()))
            << optimizer << " step " << step << " " << parameters[p].name;
      }
    }
    without.step(6);
    with.step(6);
    ASSERT_EQ(nn::parameters_sha256(with.training.model()), nn::parameters_sha256(without.training.model()));
    // Tensors that were taken before.
    std::vector<nn::Tensor> taken;
    for (const auto& [name, parameter] : parameters) taken.push_back(parameter->value());
    without.step(7);
    with.step(7);
    with.training.ddp().wait_for_parameters();
    for (std::size_t p = 0; p < count; ++p)
      EXPECT_EQ(bytes_of(taken[p]), bytes_of(expected[p].parameter->value())) << parameters[p].name;
    without.step(8);
    with.step(8);
    EXPECT_NO_THROW(with.training.ddp().check());
    for (std::size_t p = 0; p < count; ++p)
      EXPECT_EQ(bytes_of(taken[p]), bytes_of(expected[p].parameter->value())) << "check() leaves nothing under way";
  }
}

/// Whether owners write into the parameters of all ranks (parallel: Note [Direct writes]).
bool writes_directly() { return group().size() > 1 && group().name() == "shm"; }

TEST(Zero, NothingIsGatheredWhereRanksShareMemory) {
  ZeroLoop loop(1);
  const std::size_t buckets = loop.training.ddp().reducer().plan().buckets.size();
  ASSERT_GE(buckets, 3u);
  loop.step(1);
  const auto before = group().barrier().sequence();
  loop.step(2);
  const std::size_t operations = group().barrier().sequence() - before - 1;
  // Scalars, counts, buckets; and two barriers, or as many gathers as buckets.
  if (writes_directly()) {
    EXPECT_EQ(operations, 2 + buckets + 2);
  } else if (group().size() > 1 && rank_backend().device().kind == DeviceKind::kCpu) {
    EXPECT_EQ(operations, 2 + buckets + buckets);
  }
  loop.training.ddp().check();
}

/// Whether this rank's parameters stay what they are while the others have time to change them.
bool parameters_stay(const ZeroTraining& training) {
  const Bytes before = training.parameters();
  const auto until = Clock::now() + std::chrono::milliseconds(50);
  while (Clock::now() < until) group().poll();
  return training.parameters() == before;
}

// A loop may read its parameters until it comes to the update, however far the other ranks are.
TEST(Zero, NoWriteWhileARankReads) {
  for (int late = 0; late < group().size(); ++late) {
    ZeroTraining training("adamw", {.bucket_mb = 0.01, .first_bucket_mb = 0.001, .zero = 1});
    for (std::uint64_t step = 1; step <= 2; ++step) {
      training.optimizer().zero_grad();
      training.pass(step);
      if (group().rank() == late) {
        EXPECT_TRUE(parameters_stay(training)) << "between backward and step()";
      }
      training.optimizer().step(0.1);
      if (group().rank() == late) {
        EXPECT_TRUE(parameters_stay(training)) << "between two steps by the same gradients";
      }
      training.optimizer().step(0.1);
    }
    training.ddp().check();
  }
}

// A layer's gradients are on their way before it has multiplied by its weights.
TEST(Zero, NoWriteBeforeALayersBackwardEnds) {
  for (int late = 0; late < group().size(); ++late) {
    ZeroLoop loop(1);
    loop.step(1);
    int layers = 0;
    for (const auto& [name, parameter] : loop.training.model().named_parameters()) {
      if (!name.ends_with("bias")) continue;  // a layer's last one
      parameter->on_ready = [&loop, &layers, late, handed_over = parameter->on_ready] {
        handed_over();
        if (group().rank() != late) return;
        ++layers;
        EXPECT_TRUE(parameters_stay(loop.training));
      };
    }
    loop.step(2);
    EXPECT_EQ(layers, group().rank() == late ? 3 : 0);
    loop.training.ddp().check();
  }
}

TEST(Zero, DestroyedWhileParametersAreInFlight) {
  if (!sums_in_rank_order()) GTEST_SKIP() << "NCCL chooses the order of sums";
  ZeroLoop without(0), with(1);
  without.step(1);
  with.step(1);
  with.end();
  EXPECT_TRUE(with.training.parameters() == without.training.parameters());
}

TEST(Zero, ParametersStayWhenItEnds) {
  ZeroTraining training("sgd", {.zero = 1});
  training.step(1);
  const Bytes before = training.parameters();
  const auto version = training.model().named_parameters().front().parameter->version();
  training.end();
  EXPECT_TRUE(training.parameters() == before);
  EXPECT_NE(training.model().named_parameters().front().parameter->version(), version);
  // Gradients have gone with the memory of the group.
  EXPECT_REFUSED("none of its parameters has a gradient", training.optimizer().step(0.1));
  for (const auto& [name, parameter] : training.model().named_parameters()) {
    parameter->bind_gradient(rank_backend().zeros(parameter->value().shape()));
    parameter->mark_grad_valid();
  }
  EXPECT_REFUSED("an optimizer of slices whose DistributedDataParallel is gone", training.optimizer().step(0.1));
}

TEST(Zero, IsRefusedWhereItCannotBe) {
  ZeroTraining training("sgd", {.zero = 1});
  {
    const auto whole = nn::make_sgd(training.ddp().parameters(), {});
    training.pass(1);
    EXPECT_REFUSED("make the optimizer with the DistributedDataParallel's share()", whole->step(0.1));
  }
  EXPECT_REFUSED("call zero_grad() before each step", training.pass(2));
}

TEST(Zero, OptionsThatContradictAreRefused) {
  nn::Generator generator(1);
  nn::Context context{rank_backend(), generator};
  TwoBranches model(context);
  for (const int zero : {-1, 2, 3})
    EXPECT_REFUSED("give 1, which shards updates and the optimizers' state",
                   DistributedDataParallel ddp(model, group(), {.zero = zero}));
  DistributedDataParallel ddp(model, group(), {.zero = 1});
  EXPECT_REFUSED("a communication hook with zero", ddp.register_comm_hook(std::make_shared<ddp::ReduceScatterHook>()));
  EXPECT_TRUE(ddp.bucket_order().empty());
  const auto other = nn::make_sgd(ddp.parameters(), {.momentum = 0.9});
  EXPECT_REFUSED("make it of parameters() and share()", ddp.gather_moments(*other, 0));
}

}  // namespace
}  // namespace lockstep::parallel
