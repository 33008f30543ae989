// DistributedDataParallel of a module with several inputs and outputs, against one process on the global batch.
#include <gmock/gmock.h>

#include "base/splitmix.h"
#include "lockstep/nn/ops/transfer.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "lockstep/sampler/slice.h"
#include "tests/parallel/rank_backend.h"
#include "tests/support/models.h"
#include "tests/support/ranks.h"
#include "tests/support/refusal.h"

namespace lockstep::parallel {
namespace {

using lockstep::testing::Fusion;
using lockstep::testing::group;
using lockstep::testing::joint_loss;
using lockstep::testing::rank_backend;

constexpr std::uint64_t kSamples = 11;

class DistributedValues : public ::testing::Test {
 protected:
  // Rows [first, first + count) of an array that all ranks know.
  nn::Tensor rows(const sampler::Slice& part, std::int64_t columns, std::uint64_t seed) {
    std::vector<float> values;
    for (std::uint64_t i = part.begin; i < part.end(); ++i)
      for (std::int64_t k = 0; k < columns; ++k)
        values.push_back(static_cast<float>(SplitMix64::word(seed + i, static_cast<std::uint64_t>(k)) % 1000) / 500 -
                         1);
    return nn::tensor_of(backend, {static_cast<std::int64_t>(part.count), columns}, values);
  }
  nn::Vars inputs(nn::Tape& on, const sampler::Slice& part) {
    return {on.input(rows(part, Fusion::kFeatures, 1)), on.input(rows(part, Fusion::kHidden, 100))};
  }
  nn::Tensor labels(const sampler::Slice& part) {
    const nn::Tensor made = backend.empty({static_cast<std::int64_t>(part.count)}, DType::kI32);
    std::vector<std::int32_t> values;
    for (std::uint64_t i = part.begin; i < part.end(); ++i)
      values.push_back(static_cast<std::int32_t>(i % Fusion::kClasses));
    backend.upload(std::as_bytes(std::span(values)), made);
    return made;
  }
  void expect_gradients_of(const nn::Module& wanted) {
    const auto got = net.named_parameters(), other = wanted.named_parameters();
    for (std::size_t i = 0; i < got.size(); ++i) {
      const auto a = nn::values_of(backend, got[i].parameter->gradient());
      const auto b = nn::values_of(backend, other[i].parameter->gradient());
      for (std::size_t k = 0; k < b.size(); ++k) EXPECT_NEAR(a[k], b[k], 1e-5f) << got[i].name;
    }
  }

  nn::Backend& backend = rank_backend();
  nn::Generator generator{1}, same{1};
  nn::Context context{backend, generator}, same_context{backend, same};
  Fusion net{context}, alone{same_context};
  nn::Tape tape{backend};
  sampler::Slice all{0, kSamples};
  sampler::Slice mine = sampler::slice_of(kSamples, static_cast<std::uint64_t>(group().rank()),
                                          static_cast<std::uint64_t>(group().size()));
};

TEST_F(DistributedValues, SumsToTheGradientOfTheGlobalBatch) {
  constexpr float kScale = 1.0f / static_cast<float>(kSamples);
  tape.backward(joint_loss(tape, alone(tape, inputs(tape, all)), labels(all), kScale).value);
  tape.reset();
  DistributedDataParallel ddp(net, group());
  for (int step = 0; step < 3; ++step)
    for (const bool by_module : {false, true}) {
      for (const auto& [name, parameter] : net.named_parameters()) parameter->clear_grad();
      const nn::Vars given = inputs(tape, mine);
      const nn::Loss loss = by_module ? ddp.forward_loss(tape, given, labels(mine), joint_loss, kScale)
                                      : joint_loss(tape, ddp(tape, given), labels(mine), kScale);
      tape.backward(loss.value);
      tape.reset();
      expect_gradients_of(alone);
    }
  ddp.check();
}

// The layer of the other output is a parameter that is not used.
TEST_F(DistributedValues, AnOutputThatNobodyUses) {
  const auto pass = [&](DistributedDataParallel& ddp) {
    const auto [logits, numbers] = ddp(tape, inputs(tape, mine)).as<2>();
    tape.backward(nn::sum(tape, nn::square(tape, numbers), 1.0f).value);
  };
  {
    DistributedDataParallel ddp(net, group());
    EXPECT_REFUSED("classes.weight", pass(ddp));
    tape.reset();
  }
  Fusion other(context);
  DistributedDataParallel ddp(other, group(), {.find_unused_parameters = true});
  pass(ddp);
  EXPECT_TRUE(other.named_parameters()[4].parameter->has_gradient());
  EXPECT_FALSE(other.named_parameters()[2].parameter->has_gradient());
}

// Nothing has been sent: it is no matter of the other ranks.
TEST_F(DistributedValues, WrongNumbersOfThem) {
  DistributedDataParallel ddp(net, group());
  EXPECT_REFUSED("Fusion takes 2 inputs, and was given 1", ddp(tape, inputs(tape, mine)[0]));
  tape.reset();
  tape.backward(joint_loss(tape, ddp(tape, inputs(tape, mine)), labels(mine), 0.1f).value);
}

}  // namespace
}  // namespace lockstep::parallel
