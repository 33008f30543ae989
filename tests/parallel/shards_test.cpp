// Steps in shards on several ranks: the bits of one process that computes all of them, and what is refused.
#include <gmock/gmock.h>

#include <numeric>

#include <cstring>
#include <set>

#include "base/error.h"
#include "base/splitmix.h"
#include "lockstep/comm/device_group.h"
#include "lockstep/comm/make_group.h"
#include "lockstep/nn/ops/transfer.h"
#include "lockstep/nn/optim/optimizers.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "lockstep/sampler/slice.h"
#include "tests/parallel/rank_backend.h"
#include "tests/support/ranks.h"
#include "tests/support/refusal.h"

namespace lockstep::parallel {
namespace {

using lockstep::testing::group;
using lockstep::testing::make_rank_backend;
using lockstep::testing::rank_backend;
using lockstep::testing::refusal_of;
using ::testing::HasSubstr;

constexpr std::int64_t kImageSide = 4, kImagePlanes = 2, kLabels = 3;

std::unique_ptr<nn::Module> model_with_norm(nn::Context& context) {
  return nn::build_from(context, [](nn::Context& with) -> std::unique_ptr<nn::Module> {
    auto model = std::make_unique<nn::Sequential>();
    model->then(std::make_unique<nn::Conv2d>(with, kImagePlanes, 5, nn::Window{.kernel = {3, 3}}))
        .then(std::make_unique<nn::BatchNorm>(with, 5))
        .then(std::make_unique<nn::ReLU>())
        .then(std::make_unique<nn::Flatten>())
        .then(std::make_unique<nn::Linear>(with, 5 * 2 * 2, kLabels));
    return model;
  });
}

std::unique_ptr<comm::ProcessGroup> make_self_group() {
  if (rank_backend().device().kind == DeviceKind::kCpu)
    return std::make_unique<comm::SelfGroup>(std::chrono::seconds(10));
  return comm::make_device_self_group({.producer = rank_backend().stream()});
}

/// A few steps of a model over `group`, each a global batch in `shards`.
class Training {
 public:
  Training(comm::ProcessGroup& over, std::size_t shards, DistributedDataParallel::Options options)
      : tree_(over.define_tree(shards)), model_(model_with_norm(context_)) {
    options.tree = &tree_;
    options.shard_backend = make_rank_backend;
    ddp_.emplace(*model_, over, options);
    ddp_->set_bucket_callback([this](std::span<const std::size_t> slots) { optimizer_->update(slots); });
    optimizer_ = nn::make_sgd(ddp_->parameters(), {.momentum = 0.9});
  }

  void step(std::uint64_t number, std::uint64_t samples) {
    optimizer_->zero_grad();
    optimizer_->begin_step(0.1);
    const auto part_of = [&](std::uint32_t shard) { return sampler::slice_of(samples, shard, tree_.leaves()); };
    rank_backend().pointwise().fill(ddp_->scalars(), 0.0f);
    rank_backend().pointwise().fill(ddp_->scalars().slice(3, 4), 1.0f);
    ddp_->run_shards(
        tape_, static_cast<std::int64_t>(samples),
        [&](std::uint32_t shard) { return static_cast<std::int64_t>(part_of(shard).count); },
        [&](const DistributedDataParallel::ShardPass& pass) {
          const sampler::Slice part = part_of(pass.shard);
          const nn::Var y = pass.module(pass.tape, pass.tape.input(rows(pass.backend, number, part)));
          const nn::Loss loss =
              nn::cross_entropy(pass.tape, y, labels(pass.backend, number, part), 1.0f / static_cast<float>(samples));
          pass.backend.pointwise().add_to(loss.totals(), 1.0f, pass.scalars.slice(0, 2));
          return loss.value;
        });
  }

  /// Parameters, buffers, and the sums of scalars but that of ranks.
  std::vector<std::byte> state() {
    std::vector<std::byte> all;
    const auto add = [&](const nn::Tensor& tensor) {
      const std::size_t at = all.size();
      all.resize(at + tensor.bytes());
      rank_backend().download(tensor, std::span(all).subspan(at));
    };
    for (const auto& [name, parameter] : model_->named_parameters()) add(parameter->value());
    for (const auto& buffer : model_->named_buffers()) add(*buffer.tensor);
    add(ddp_->summed_scalars().slice(0, 3));
    return all;
  }
  float ranks_that_were_counted() { return nn::values_of(rank_backend(), ddp_->summed_scalars())[3]; }
  /// The first rank has `first` shards, the others what is left; the last one most of it.
  void share_out(comm::ProcessGroup& over, std::uint32_t first) {
    std::vector<std::uint32_t> shares(static_cast<std::size_t>(over.size()), 1);
    shares.front() = over.size() == 1 ? static_cast<std::uint32_t>(tree_.leaves()) : first;
    shares.back() += static_cast<std::uint32_t>(tree_.leaves()) - std::accumulate(shares.begin(), shares.end(), 0u);
    optimizer_->zero_grad();
    ddp_->set_tree(over.define_tree(tree_.leaves(), shares));
  }
  DistributedDataParallel& ddp() { return *ddp_; }
  nn::Module& model() { return *model_; }
  nn::Tape& tape() { return tape_; }

 private:
  static nn::Tensor rows(nn::Backend& backend, std::uint64_t step, const sampler::Slice& part) {
    std::vector<float> values;
    for (std::uint64_t i = part.begin; i < part.end(); ++i)
      for (std::uint64_t k = 0; k < static_cast<std::uint64_t>(kImageSide * kImageSide * kImagePlanes); ++k)
        values.push_back(static_cast<float>(SplitMix64::word(step * 1000 + i, k) % 1000) / 500 - 1);
    return nn::tensor_of(backend, {static_cast<std::int64_t>(part.count), kImageSide, kImageSide, kImagePlanes},
                         values);
  }
  static nn::Tensor labels(nn::Backend& backend, std::uint64_t step, const sampler::Slice& part) {
    const nn::Tensor made = backend.empty({static_cast<std::int64_t>(part.count)}, DType::kI32);
    std::vector<std::int32_t> values;
    for (std::uint64_t i = part.begin; i < part.end(); ++i)
      values.push_back(static_cast<std::int32_t>((i + step) % kLabels));
    backend.upload(std::as_bytes(std::span(values)), made);
    return made;
  }

  const comm::ReductionTree& tree_;
  nn::Generator generator_{1};
  nn::Context context_{rank_backend(), generator_};
  std::unique_ptr<nn::Module> model_;
  std::optional<DistributedDataParallel> ddp_;
  std::unique_ptr<nn::Optimizer> optimizer_;
  nn::Tape tape_{rank_backend()};
};

// The last steps leave shards without samples.
const std::vector<std::uint64_t> kStepSamples = {37, 37, 37, 5, 1, 37};

std::vector<std::byte> state_of_one_process(std::size_t shards) {
  const auto alone = make_self_group();
  Training training(*alone, shards, {});
  for (std::size_t i = 0; i < kStepSamples.size(); ++i) training.step(i + 1, kStepSamples[i]);
  return training.state();
}

TEST(Shards, HaveTheBitsOfOneProcess) {
  const auto ranks = static_cast<std::size_t>(group().size());
  for (const std::size_t shards : {ranks, ranks + 1, std::size_t{8}, std::size_t{11}}) {
    const auto expected = state_of_one_process(shards);
    for (const double mib : {1e-5, 25.0})
      for (const int at_once : {1, 2, 3}) {
        if (at_once > 1 && rank_backend().device().kind != DeviceKind::kCpu) continue;
        SCOPED_TRACE(fmt::format("{} shards, {} at once, buckets of {} MiB", shards, at_once, mib));
        Training training(group(), shards, {.bucket_mb = mib, .first_bucket_mb = mib, .shards_at_once = at_once});
        for (std::size_t i = 0; i < kStepSamples.size(); ++i) training.step(i + 1, kStepSamples[i]);
        ASSERT_TRUE(training.state() == expected);
        EXPECT_EQ(training.ranks_that_were_counted(), static_cast<float>(group().size()));
        training.ddp().check_with_buffers();
      }
  }
}

TEST(Shards, ThatMoveBetweenRanksLeaveTheBits) {
  constexpr std::size_t kShards = 11;
  if (static_cast<std::size_t>(group().size()) + 4 > kShards) GTEST_SKIP() << "too few shards to move";
  const auto expected = state_of_one_process(kShards);
  for (const int at_once : {1, 3}) {
    if (at_once > 1 && rank_backend().device().kind != DeviceKind::kCpu) continue;
    Training training(group(), kShards, {.shards_at_once = at_once});
    for (std::size_t i = 0; i < kStepSamples.size(); ++i) {
      training.step(i + 1, kStepSamples[i]);
      if (i == 1) {
        EXPECT_REFUSED("gradients of the last step are there", training.ddp().set_tree(group().define_tree(kShards)));
      }
      if (i % 2 == 1 && i + 1 < kStepSamples.size()) training.share_out(group(), i == 1 ? 5 : 2);
    }
    ASSERT_TRUE(training.state() == expected) << at_once << " at once";
    training.ddp().check_with_buffers();
  }
}

// A shard's gradients have one hash, whoever computes them, and with how many others.
TEST(Shards, HaveHashesOfTheirOwn) {
  constexpr std::size_t kShards = 11;
  if (rank_backend().device().kind != DeviceKind::kCpu) {
    Training training(group(), kShards, {});
    EXPECT_REFUSED("a device that is not the CPU", training.ddp().hash_shards(true));
    return;
  }
  if (static_cast<std::size_t>(group().size()) > kShards) GTEST_SKIP() << "more ranks than shards";
  const auto alone = make_self_group();
  for (const int at_once : {1, 3}) {
    Training training(group(), kShards, {.shards_at_once = at_once});
    training.ddp().hash_shards(true);
    Training again(*alone, kShards, {});
    again.ddp().hash_shards(true);
    for (const std::uint64_t samples : {37u, 5u}) {
      again.step(1, samples);
      training.step(1, samples);
      const auto expected = again.ddp().shard_hashes(), got = training.ddp().shard_hashes();
      const comm::TreeNode run = group().define_tree(kShards).run_of(group().rank());
      ASSERT_EQ(got.size(), run.count);
      for (std::size_t i = 0; i < got.size(); ++i) {
        EXPECT_EQ(got[i], expected[run.first + i]);
        EXPECT_EQ(got[i] == 0, sampler::slice_of(samples, run.first + i, kShards).count == 0);
      }
      // No two are alike but those without samples.
      const std::set<std::uint64_t> different(expected.begin(), expected.end());
      EXPECT_EQ(different.size(), samples >= kShards ? kShards : samples + 1);
    }
    training.ddp().hash_shards(false);
    training.step(2, 37);
    for (const std::uint64_t hash : training.ddp().shard_hashes()) EXPECT_EQ(hash, 0u);
  }
}

// A shard is as good as a rank: with as many of both, gradients are those of the global batch within rounding.
TEST(Shards, SumToTheGradientOfTheGlobalBatch) {
  const auto alone = make_self_group();
  Training whole(*alone, 1, {});
  Training training(group(), static_cast<std::size_t>(group().size()) + 2, {});
  // Without training mode normalisation does not depend on which samples are together.
  for (auto* one : {&whole, &training}) {
    one->model().train(false);
    one->step(1, 24);
  }
  const auto a = whole.model().named_parameters(), b = training.model().named_parameters();
  for (std::size_t i = 0; i < a.size(); ++i) {
    const auto expected = nn::values_of(rank_backend(), a[i].parameter->gradient());
    const auto got = nn::values_of(rank_backend(), b[i].parameter->gradient());
    for (std::size_t k = 0; k < expected.size(); ++k) ASSERT_NEAR(got[k], expected[k], 1e-6f) << a[i].name;
  }
}

TEST(Shards, RefuseWhatTheyCannotDo) {
  const auto ranks = static_cast<std::size_t>(group().size());
  const comm::ReductionTree& tree = group().define_tree(ranks + 1);
  nn::Generator generator{1};
  nn::Context context{rank_backend(), generator};
  const auto model = model_with_norm(context);
  EXPECT_THAT(
      refusal_of([&] { DistributedDataParallel(*model, group(), {.broadcast_buffers = false, .tree = &tree}); }),
      HasSubstr("buffers of its own"));
  EXPECT_REFUSED("no shard at a time", DistributedDataParallel(*model, group(), {.tree = &tree, .shards_at_once = 0}));
  if (rank_backend().device().kind == DeviceKind::kCpu) {
    EXPECT_REFUSED("nothing to compute them with",
                   DistributedDataParallel(*model, group(), {.tree = &tree, .shards_at_once = 2}));
    nn::Linear nobody_knows(context, 2, 2);
    EXPECT_REFUSED("knows how to build again",
                   DistributedDataParallel(nobody_knows, group(),
                                           {.tree = &tree, .shards_at_once = 2, .shard_backend = make_rank_backend}));
  }
  DistributedDataParallel plain(*model, group());
  nn::Tape tape(rank_backend());
  const auto none = [](std::uint32_t) { return std::int64_t{0}; };
  const auto loss = [](const DistributedDataParallel::ShardPass&) { return nn::Var(); };
  EXPECT_REFUSED("where ranks are summed", plain.run_shards(tape, 1, none, loss));
  EXPECT_REFUSED("hash_shards() without Options::tree", plain.hash_shards(true));

  Training training(group(), ranks + 1, {});
  EXPECT_REFUSED("in a step in shards", training.ddp().contribute_nothing());
  EXPECT_REFUSED("outside of run_shards()",
                 training.ddp()(training.tape(), training.tape().input(
                                                     rank_backend().zeros({1, kImageSide, kImageSide, kImagePlanes}))));
  training.step(1, 9);
  EXPECT_REFUSED("gradients of the last one are there", training.ddp().run_shards(training.tape(), 9, none, loss));
}

TEST(Shards, RefuseSynchronisedNormalisation) {
  const comm::ReductionTree& tree = group().define_tree(static_cast<std::size_t>(group().size()));
  nn::Generator generator{1};
  nn::Context context{rank_backend(), generator};
  const auto model = model_with_norm(context);
  convert_sync_batchnorm(*model, group());
  EXPECT_REFUSED("synchronised batch normalisation", DistributedDataParallel(*model, group(), {.tree = &tree}));
}

}  // namespace
}  // namespace lockstep::parallel
