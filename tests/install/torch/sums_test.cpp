// Sums of gradients, of whatever type and in whatever loop.
#include "support.h"

namespace adapter {
namespace {

TEST(Sums, AreTheGradientsOfTheGlobalBatch) {
  const auto net = two_layers();
  DistributedDataParallel ddp(net, group());
  ASSERT_EQ(ddp.parameter_names(), (std::vector<std::string>{"0.weight", "0.bias", "2.weight", "2.bias"}));
  torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 4; ++step) {
    const auto wanted = gradients_of_one_process(net);
    optimizer.zero_grad();
    loss_of(ddp(own_samples())).backward();
    expect_close(gradients_of(ddp.parameters()), wanted);
    optimizer.step();
    ddp.check();
  }
}

TEST(Sums, RanksStartWithRankZerosParametersAndBuffers) {
  torch::manual_seed(static_cast<std::uint64_t>(rank()));
  torch::nn::Sequential net(torch::nn::Conv2d(1, 3, 3), torch::nn::BatchNorm2d(3));
  net[1]->as<torch::nn::BatchNorm2d>()->running_mean.fill_(rank() + 5);
  net[0]->as<torch::nn::Conv2d>()->weight.requires_grad_(false);  // those that are not trained, too
  DistributedDataParallel ddp(net, group());
  ddp.check_with_buffers();
  EXPECT_EQ(net[1]->as<torch::nn::BatchNorm2d>()->running_mean[0].item<float>(), 5.0f);
}

TEST(Sums, AveragesAreThoseOfTheRanksMeans) {
  const auto net = two_layers();
  const auto wanted = [&] {
    std::vector<torch::Tensor> sums;
    std::int64_t begin = 0;
    for (int r = 0; r < ranks(); begin += ++r) {
      const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
      copy->forward(all_samples().narrow(0, begin, r + 1)).square().mean().backward();
      const auto mine = gradients_of(copy->parameters());
      for (std::size_t i = 0; i < mine.size(); ++i)
        i < sums.size() ? sums[i] += mine[i] : (sums.push_back(mine[i]), mine[i]);
    }
    return sums;
  }();
  for (const auto type : {torch::kFloat64, torch::kFloat32, torch::kBFloat16}) {
    const auto other = two_layers();
    other->to(type);
    DistributedDataParallel ddp(other, group(), {.average_gradients = true});
    const auto pass = [&] { ddp(own_samples(type)).square().mean().backward(); };
    pass();
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const auto mean = wanted[i] / ranks();
      const double close = type == torch::kFloat64 ? 1e-12 : (type == torch::kFloat32 ? 1e-5 : 5e-2);
      EXPECT_TRUE(torch::allclose(ddp.parameters()[i].grad().to(torch::kFloat64), mean, close, close)) << i;
    }
    pass();  // is added
    EXPECT_TRUE(torch::allclose(ddp.parameters()[0].grad().to(torch::kFloat64), 2 * wanted[0] / ranks(), 5e-2, 5e-2));
  }
}

struct OneWeight : torch::nn::Module {
  explicit OneWeight(torch::Dtype type) : weight(register_parameter("weight", torch::zeros({70}, type))) {}
  torch::Tensor forward(double gradient) { return (weight * gradient).sum(); }
  torch::Tensor weight;
};

TEST(Types, F64KeepsItsDigits) {
  constexpr double kTiny = 0x1p-40;
  const auto net = std::make_shared<OneWeight>(torch::kFloat64);
  DistributedDataParallel ddp(net, group());
  ddp(rank() == 0 ? 1 + kTiny : kTiny).backward();
  EXPECT_EQ(net->weight.grad()[69].item<double>(), 1 + ranks() * kTiny);
  EXPECT_EQ(net->weight.grad().scalar_type(), torch::kFloat64);
}

// Two halves of a unit in the last place, which sums of that type drop one by one.
TEST(Types, HalvesAreSummedInF32AndRoundedOnce) {
  for (const auto& [type, one_and] : {std::pair(torch::kBFloat16, 256.0), std::pair(torch::kFloat16, 2048.0)}) {
    const auto net = std::make_shared<OneWeight>(type);
    DistributedDataParallel ddp(net, group());
    ddp(rank() == 0 ? one_and : 1.0).backward();
    const double wanted = torch::tensor(one_and + ranks() - 1).to(type).item<double>();
    EXPECT_EQ(net->weight.grad()[0].item<double>(), wanted);
    EXPECT_EQ(wanted, one_and + (ranks() == 3 ? 2 : 0));
    EXPECT_EQ(net->weight.grad().scalar_type(), type);
  }
}

struct ManyTypes : torch::nn::Module {
  ManyTypes() {
    for (const auto type : {torch::kFloat32, torch::kFloat64, torch::kBFloat16, torch::kFloat16, torch::kFloat64})
      register_parameter("p" + std::to_string(parameters().size()), torch::ones({3, 5}, type));
    register_parameter("scalar", torch::ones({}));
    register_parameter("empty", torch::ones({0, 4}));
    register_parameter("frozen", torch::ones({2}, torch::kInt64), false);
  }
  torch::Tensor forward(double gradient) {
    torch::Tensor sum = torch::zeros({}, torch::kFloat64);
    for (const auto& parameter : parameters())
      if (parameter.requires_grad()) sum = sum + (parameter.to(torch::kFloat64) * gradient).sum();
    return sum;
  }
};

TEST(Types, InOneModule) {
  const auto net = std::make_shared<ManyTypes>();
  for (const double mib : {1.0, 1e-5}) {
    DistributedDataParallel ddp(net, group(), {.bucket_cap_mb = mib, .first_bucket_mb = mib});
    for (int step = 1; step <= 3; ++step) {
      for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
      ddp(step * (rank() + 1)).backward();
      for (const auto& parameter : ddp.parameters())
        EXPECT_TRUE(parameter.grad().eq(step * ranks() * (ranks() + 1) / 2).all().item<bool>());
    }
    ddp.check();
  }
}

TEST(Layouts, OfParametersAndGradients) {
  torch::manual_seed(1);
  auto conv = torch::nn::Conv2d(2, 6, 3);
  conv->weight.set_data(conv->weight.detach().contiguous(torch::MemoryFormat::ChannelsLast));
  torch::nn::Sequential net(conv, torch::nn::Flatten(), torch::nn::Linear(6 * 4, 2));
  auto& linear = *net[2]->as<torch::nn::Linear>();
  linear.weight.set_data(torch::randn({24, 4}).slice(1, 0, 4, 2).t());  // with gaps
  const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
  DistributedDataParallel ddp(net, group());
  ddp.check();
  torch::manual_seed(7 + rank());
  const auto x = torch::randn({2, 2, 4, 4});
  ddp(x.contiguous(torch::MemoryFormat::ChannelsLast)).square().sum().backward();
  copy->forward(x).square().sum().backward();
  for (std::size_t i = 0; i < ddp.parameters().size(); ++i) {
    auto wanted = copy->parameters()[i].grad().contiguous();
    group().all_reduce(std::span(wanted.data_ptr<float>(), static_cast<std::size_t>(wanted.numel())));
    EXPECT_TRUE(torch::allclose(ddp.parameters()[i].grad(), wanted, 1e-5, 1e-5)) << ddp.parameter_names()[i];
  }
}

TEST(Buckets, TakeTheOrderOfTheFirstStep) {
  const auto net = two_layers();
  DistributedDataParallel ddp(net, group(), {.bucket_cap_mb = 1e-5, .first_bucket_mb = 1e-5});
  EXPECT_EQ(ddp.reducer().plan().buckets.size(), 4u);
  EXPECT_TRUE(ddp.bucket_order().empty());
  for (int step = 0; step < 3; ++step) {
    const auto wanted = gradients_of_one_process(net);
    for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
    loss_of(ddp(own_samples())).backward();
    expect_close(gradients_of(ddp.parameters()), wanted);
  }
  auto order = ddp.bucket_order();
  ASSERT_EQ(order.size(), 4u);
  EXPECT_EQ(order.front().substr(0, 2), "2.");
  EXPECT_EQ(order.back().substr(0, 2), "0.");
}

// As one process does: with gradients that are none, zero, or those of the step before.
TEST(Loops, ClearGradientsOrNot) {
  for (const int way : {0, 1, 2}) {
    const auto net = two_layers();
    DistributedDataParallel ddp(net, group());
    torch::optim::SGD optimizer(ddp.parameters(), 0.0);
    const auto wanted = gradients_of_one_process(net);
    for (int step = 1; step <= 3; ++step) {
      if (way < 2) optimizer.zero_grad(way == 0);
      loss_of(ddp(own_samples())).backward();
      expect_close(gradients_of(ddp.parameters()), wanted, way == 2 ? step : 1);
    }
  }
}

TEST(Loops, GlobalBatchesInParts) {
  const auto net = two_layers();
  DistributedDataParallel ddp(net, group());
  const auto wanted = gradients_of_one_process(net);
  for (const bool clear : {true, false}) {
    if (clear)
      for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
    for (const auto& row : own_samples().slice(0, 0, rank()).split(1)) {  // all but the last one
      const auto guard = ddp.no_sync();
      if (row.size(0) > 0) loss_of(ddp(row)).backward();
    }
    loss_of(ddp(own_samples().slice(0, rank()))).backward();
    expect_close(gradients_of(ddp.parameters()), wanted, clear ? 1 : 2);
    ddp.check();
  }
}

TEST(Loops, NoSyncsMayEndInAnyOrderAndOutliveIt) {
  const auto net = two_layers();
  std::optional<DistributedDataParallel<torch::nn::SequentialImpl>> ddp(std::in_place, net, group());
  std::optional<lockstep::torch::DistributedDataParallelBase::NoSync> first(std::in_place, *ddp),
      second(std::in_place, *ddp);
  const auto is_own = [&] {
    for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
    const auto before = ddp->reducer().timeline().begin;
    loss_of((*ddp)(own_samples())).backward();
    return ddp->reducer().timeline().begin == before;
  };
  EXPECT_TRUE(is_own());
  first.reset();
  EXPECT_TRUE(is_own());
  // A module's own pass is this rank's affair meanwhile.
  net->forward(own_samples()).sum().backward();
  second.reset();
  EXPECT_FALSE(is_own());
  first.emplace(*ddp);
  ddp.reset();
  first.reset();
}

TEST(Loops, RanksWithoutSamples) {
  const auto net = two_layers();
  DistributedDataParallel ddp(net, group());
  torch::optim::SGD optimizer(ddp.parameters(), 0.1);
  for (int step = 0; step < 2 * ranks(); ++step) {
    const int alone = step % ranks();
    ddp.set_step(step);
    optimizer.zero_grad();
    if (rank() == alone)
      loss_of(ddp(torch::ones({1, 4}, torch::kFloat64))).backward();
    else
      ddp.contribute_nothing();
    for (const auto& parameter : ddp.parameters()) ASSERT_TRUE(parameter.grad().defined());
    optimizer.step();
    ddp.check();
  }
  // Nor for the last part of a batch.
  const auto wanted = gradients_of_one_process(net);
  optimizer.zero_grad();
  {
    const auto guard = ddp.no_sync();
    loss_of(ddp(own_samples())).backward();
  }
  ddp.contribute_nothing();
  expect_close(gradients_of(ddp.parameters()), wanted);
}

TEST(Loops, ScalarsAreSummedAlongWithGradients) {
  const auto net = two_layers();
  DistributedDataParallel ddp(net, group());
  EXPECT_EQ(ddp.summed_scalars().abs().sum().item<float>(), 0.0f);
  for (int step = 1; step <= 2; ++step) {
    ddp.scalars()[0] = rank() + step;
    ddp.scalars()[15] = 1;
    loss_of(ddp(own_samples())).backward();
    const auto sums = ddp.summed_scalars();
    EXPECT_EQ(sums[0].item<float>(), static_cast<float>(ranks() * (ranks() - 1) / 2 + ranks() * step));
    EXPECT_EQ(sums[15].item<float>(), static_cast<float>(ranks()));
    EXPECT_EQ(sums[7].item<float>(), 0.0f);
    const auto loss = loss_of(ddp(own_samples()));
    ddp.scalars()[0] = loss;  // not its graph
    EXPECT_FALSE(ddp.scalars().requires_grad());
    EXPECT_TRUE(ddp.summed_scalars().equal(sums));  // till the next step ends
  }
}

// The same sums, where gradients are the reducer's memory.
class Views : public ::testing::TestWithParam<bool> {
 protected:
  lockstep::torch::DistributedDataParallelOptions options() const {
    return {.average_gradients = GetParam(),
            .gradient_as_bucket_view = true,
            .bucket_cap_mb = 1e-5,
            .first_bucket_mb = 1e-5};
  }
  double share() const { return GetParam() ? 1.0 / ranks() : 1.0; }
  template <class Ddp>
  static bool all_are_slots(const Ddp& ddp) {
    for (std::size_t slot = 0; slot < ddp.parameters().size(); ++slot)
      if (ddp.parameters()[slot].grad().data_ptr() != ddp.reducer().storage(slot).data()) return false;
    return true;
  }
};
INSTANTIATE_TEST_SUITE_P(Sums, Views, ::testing::Bool());

TEST_P(Views, ClearedOrNot) {
  for (const int way : {0, 1, 2}) {
    const auto net = two_layers();
    DistributedDataParallel ddp(net, group(), options());
    torch::optim::SGD optimizer(ddp.parameters(), 0.0);
    const auto wanted = gradients_of_one_process(net);
    for (int step = 1; step <= 4; ++step) {  // buckets move before the second one
      if (way < 2) optimizer.zero_grad(way == 0);
      loss_of(ddp(own_samples())).backward();
      EXPECT_TRUE(all_are_slots(ddp));
      expect_close(gradients_of(ddp.parameters()), wanted, share() * (way == 2 ? step : 1));
    }
  }
}

TEST_P(Views, InPartsAndWithoutSamples) {
  const auto net = two_layers();
  DistributedDataParallel ddp(net, group(), options());
  const auto wanted = gradients_of_one_process(net);
  for (const int way : {0, 1, 2, 3}) {
    if (way != 2)
      for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
    if (way > 0) {
      const auto guard = ddp.no_sync();
      loss_of(ddp(own_samples())).backward();
    }
    if (way == 3)
      ddp.contribute_nothing();
    else
      loss_of(ddp(own_samples())).backward();
    EXPECT_TRUE(all_are_slots(ddp));
    expect_close(gradients_of(ddp.parameters()), wanted,
                 share() * std::vector{1, 2, 4, 1}.at(static_cast<std::size_t>(way)));
  }
}

TEST_P(Views, OutliveWhatTheyAreViewsOf) {
  const auto net = two_layers();
  const auto wanted = gradients_of_one_process(net);
  std::optional<DistributedDataParallel<torch::nn::SequentialImpl>> ddp(std::in_place, net, group(), options());
  loss_of((*ddp)(own_samples())).backward();
  ddp.reset();
  expect_close(gradients_of(net->parameters()), wanted, share());
  for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
}

TEST_P(Views, OfTheirOwnTypeAlone) {
  const auto net = std::make_shared<OneWeight>(torch::kBFloat16);
  DistributedDataParallel ddp(net, group(), options());
  for (int step = 0; step < 2; ++step) {
    net->zero_grad();
    ddp(2.0).backward();
    EXPECT_EQ(net->weight.grad().scalar_type(), torch::kBFloat16);
    EXPECT_EQ(net->weight.grad()[9].item<double>(), 2 * ranks() * share());
  }
}

// As carried by an allreduce of half of each gradient.
class HalvingHook final : public lockstep::ddp::CommHook {
 public:
  std::string name() const override { return "halving"; }
  lockstep::comm::Work start(const lockstep::ddp::GradBucket& bucket, lockstep::comm::ProcessGroup& on) override {
    for (float& value : bucket.gradients.arena->view<float>(bucket.gradients.offset_bytes, bucket.gradients.count))
      value *= 0.5f;
    return on.all_reduce(bucket.gradients, lockstep::comm::ReduceOp::kSum);
  }
  void finish(const lockstep::ddp::GradBucket&, lockstep::StreamView) override {}
};

TEST(Loops, ACommunicationHookCarriesTheBuckets) {
  const auto net = std::make_shared<OneWeight>(torch::kFloat32);
  DistributedDataParallel ddp(net, group());
  ddp.register_comm_hook(std::make_shared<HalvingHook>());
  ddp(2.0).backward();
  EXPECT_EQ(net->weight.grad()[3].item<float>(), static_cast<float>(ranks()));
}

}  // namespace
}  // namespace adapter
