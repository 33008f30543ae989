// Local SGD on several ranks against one process that takes each rank's steps in its turn.
#include "lockstep/parallel/model_averaging.h"

#include <gmock/gmock.h>

#include "lockstep/nn/optim/optimizer.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "tests/parallel/trainee.h"
#include "tests/support/refusal.h"

namespace lockstep::parallel {
namespace {

using fixture::Batch;
using fixture::branches;
using fixture::Branching;
using fixture::expect_near;
using fixture::rank;
using fixture::ranks;
using fixture::values_of;
using lockstep::testing::group;
using lockstep::testing::rank_backend;

std::vector<nn::Tensor> state_of(const std::vector<nn::NamedParameter>& parameters, const nn::Optimizer& optimizer) {
  std::vector<nn::Tensor> tensors;
  for (const auto& [name, parameter] : parameters) tensors.push_back(parameter->value());
  for (const auto& moment : optimizer.moments()) tensors.push_back(moment.value);
  return tensors;
}

Batch batch_of(int step, std::uint64_t of_rank) {
  return {static_cast<std::uint64_t>(step) * 100 + of_rank * 10, 2 + of_rank % 2};
}

std::uint64_t samples_of(int step) {
  std::uint64_t all = 0;
  for (std::uint64_t r = 0; r < ranks(); ++r) all += batch_of(step, r).labels.size();
  return all;
}

nn::Loss loss_of(Branching& of, nn::Var y, Batch& batch, int step) {
  const auto n = static_cast<std::int64_t>(batch.labels.size());
  return nn::cross_entropy(*of.tape, y, of.backend->from_host(batch.labels.data(), {n}, DType::kI32),
                           static_cast<float>(ranks()) / static_cast<float>(samples_of(step)));
}

TEST(LocalSgd, RanksStepAloneAndAverage) {
  constexpr int kSteps = 7, kPeriod = 3;
  Branching mine(branches);
  DistributedDataParallel ddp(*mine.module, group());
  ddp.register_comm_hook(make_local_hook());
  const auto optimizer = nn::make_adamw(ddp.parameters(), {});
  ModelAverager averager(group(), rank_backend(), state_of(ddp.parameters(), *optimizer));

  std::vector<std::unique_ptr<Branching>> alone;
  std::vector<std::unique_ptr<nn::Optimizer>> optimizers;
  for (std::uint64_t r = 0; r < ranks(); ++r) {
    alone.push_back(std::make_unique<Branching>(branches));
    optimizers.push_back(nn::make_adamw(alone.back()->module->named_parameters(), {}));
  }
  std::vector<std::vector<nn::Tensor>> states;
  for (std::uint64_t r = 0; r < ranks(); ++r)
    states.push_back(state_of(alone[r]->module->named_parameters(), *optimizers[r]));

  nn::PointwiseKernels& kernels = rank_backend().pointwise();
  for (int step = 1; step <= kSteps; ++step) {
    for (std::uint64_t r = 0; r < ranks(); ++r) {
      Branching& one = *alone[r];
      Batch batch = batch_of(step, r);
      optimizers[r]->zero_grad();
      one.tape->backward(loss_of(one, one.module->forward(*one.tape, one.input(batch)), batch, step).value);
      one.tape->reset();
      optimizers[r]->step(0.01);
    }
    Batch own = batch_of(step, rank());
    kernels.fill(ddp.scalars().slice(0, 1), 1.0f);
    optimizer->zero_grad();
    mine.tape->backward(loss_of(mine, ddp(*mine.tape, mine.input(own)), own, step).value);
    mine.tape->reset();
    EXPECT_EQ(values_of<float>(ddp.summed_scalars())[0], static_cast<float>(ranks()));
    optimizer->step(0.01);
    if (step % kPeriod == 0) {
      averager.average();
      for (const auto& [name, parameter] : ddp.parameters()) parameter->changed();
      ddp.check();
      for (std::size_t t = 0; t < states[0].size(); ++t) {
        const nn::Tensor mean = rank_backend().zeros(states[0][t].shape());
        for (const auto& state : states) kernels.add_to(state[t], 1.0f / static_cast<float>(ranks()), mean);
        for (const auto& state : states) kernels.copy(mean, state[t]);
      }
      for (const auto& one : alone)
        for (const auto& [name, parameter] : one->module->named_parameters()) parameter->changed();
    }
    const auto got = state_of(ddp.parameters(), *optimizer);
    for (std::size_t t = 0; t < got.size(); ++t)
      expect_near(got[t], states[rank()][t], fmt::format("tensor {} after step {}", t, step), 1e-5f, 1e-6f);
  }
  if (ranks() > 1) {
    EXPECT_REFUSED("rank", ddp.check());  // the last step was each rank's own
  }
}

TEST(LocalSgd, AveragesTensorsOfAnySize) {
  // None, one, and more than travels at once.
  std::vector<nn::Tensor> tensors;
  for (const std::int64_t count : std::vector<std::int64_t>{0, 1, (4 << 20) + 5, 3}) {
    std::vector<float> values;
    for (std::int64_t i = 0; i < count; ++i) values.push_back(static_cast<float>(i % 1000 + group().rank()));
    tensors.push_back(rank_backend().empty({count}));
    if (count > 0)
      rank_backend().pointwise().copy(rank_backend().from_host(values.data(), {count}, DType::kF32), tensors.back());
  }
  ModelAverager averager(group(), rank_backend(), tensors);
  EXPECT_EQ(averager.bytes(), 4 * ((std::size_t{4} << 20) + 9));
  averager.average();
  const float mean_rank = static_cast<float>(ranks() - 1) / 2;
  for (const nn::Tensor& tensor : tensors) {
    const auto values = values_of<float>(tensor);
    for (std::size_t i = 0; i < values.size(); ++i)
      ASSERT_NEAR(values[i], static_cast<float>(i % 1000) + mean_rank, 1e-3f) << i;
  }
}

TEST(LocalSgd, RefusesWhatItCannotAverage) {
  EXPECT_REFUSED("not f32", ModelAverager(group(), rank_backend(), {rank_backend().empty({2}, DType::kI64)}));
  if (ranks() == 1) return;
  EXPECT_REFUSED("averaged tensor 0=[2]",
                 ModelAverager(group(), rank_backend(), {rank_backend().empty({2 + group().rank()})}));
}

}  // namespace
}  // namespace lockstep::parallel
