// Passes of all kinds: what begins a step, and what does not.
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "support.h"

namespace adapter {
namespace {

namespace autograd = torch::autograd;

/// Layers by name, and what forward() makes of them.
struct Layers : torch::nn::Module {
  Layers() {
    torch::manual_seed(1);
    for (const char* name : {"left", "right"}) register_module(name, torch::nn::Linear(4, 3))->to(torch::kFloat64);
  }
  torch::Tensor layer(const char* name, const torch::Tensor& x) {
    return named_children()[name]->as<torch::nn::Linear>()->forward(x);
  }
  torch::Tensor weight(const char* name) { return named_children()[name]->as<torch::nn::Linear>()->weight; }
  void clear() {
    for (auto& parameter : parameters()) parameter.mutable_grad().reset();
  }
};

struct Branches : Layers {
  torch::Tensor forward(const torch::Tensor& x, bool left, bool right) {
    torch::Tensor y = torch::zeros({x.size(0), 3}, torch::kFloat64);
    if (left) y = y + layer("left", x);
    if (right) y = y + layer("right", x);
    return y;
  }
};

// In step s rank r uses no layer, the left, the right or both ones; which is (r + s) mod 4.
TEST(Unused, ParametersOnSomeRanksOrOnAll) {
  const auto net = std::make_shared<Branches>();
  DistributedDataParallel ddp(net, group(),
                              {.find_unused_parameters = true, .bucket_cap_mb = 1e-5, .first_bucket_mb = 1e-5});
  for (int step = 0; step < 8; ++step) {
    net->clear();
    const auto uses = [&](int r) { return std::pair((r + step) % 4 & 1, (r + step) % 4 & 2); };
    const auto [left, right] = uses(rank());
    auto y = ddp(torch::ones({2, 4}, torch::kFloat64), left, right);
    y.sum().backward();
    double lefts = 0, rights = 0;
    for (int r = 0; r < ranks(); ++r) lefts += uses(r).first != 0, rights += uses(r).second != 0;
    for (const auto& [name, users] : {std::pair("left", lefts), std::pair("right", rights)}) {
      const auto& gradient = net->weight(name).grad();
      ASSERT_EQ(gradient.defined(), users > 0) << name << " in step " << step;
      if (users > 0) {
        EXPECT_EQ(gradient[0][0].item<double>(), 2 * users) << name << " in step " << step;
      }
    }
  }
}

TEST(Unused, AllRanksNameWhatOneOfThemLacks) {
  const auto net = std::make_shared<Branches>();
  const int last = ranks() - 1;
  for (const bool any : {true, false}) {  // nor does any of that rank's outputs depend on a parameter
    DistributedDataParallel ddp(net, group());
    net->clear();
    const auto y = ddp(torch::ones({1, 4}, torch::kFloat64), rank() != last || any, rank() != last);
    const std::string where = last == 0 ? "all ranks" : "rank " + std::to_string(last);
    EXPECT_THAT(
        refusal_of([&] { y.sum().backward(); }),
        AllOf(HasSubstr(any ? "no gradient for right.weight, right.bias on " + where : "no gradient for left.weight"),
              HasSubstr("find_unused_parameters")));
  }
}

// A function that gives no gradient back: no parameter gets one.
struct Cut : autograd::Function<Cut> {
  static torch::Tensor forward(autograd::AutogradContext*, const torch::Tensor& x) { return x.clone(); }
  static autograd::variable_list backward(autograd::AutogradContext*, autograd::variable_list) {
    return {torch::Tensor()};
  }
};

TEST(Unused, ARankWhoseBackwardBringsNoGradientDelaysNobody) {
  const auto net = std::make_shared<Branches>();
  DistributedDataParallel ddp(net, group(), {.find_unused_parameters = true});
  const auto y = ddp(torch::ones({1, 4}, torch::kFloat64), true, true);
  (rank() == 0 ? Cut::apply(y).sum() : y.sum()).backward();
  EXPECT_EQ(net->weight("left").grad().defined(), ranks() > 1);
  ddp.check();
}

struct Tied : torch::nn::Module {
  Tied() {
    torch::manual_seed(1);
    weight = register_parameter("weight", torch::randn({4, 4}, torch::kFloat64));
    register_parameter("same", weight);
    child = register_module("child", torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false)));
    child->weight = child->register_parameter("weight2", weight);
    child->to(torch::kFloat64);
  }
  torch::Tensor forward(const torch::Tensor& x) { return x.matmul(weight).tanh().matmul(weight.t()); }
  torch::Tensor weight;
  torch::nn::Linear child{nullptr};
};

TEST(Passes, SharedWeightsAreOneGradient) {
  const auto net = std::make_shared<Tied>();
  ASSERT_GE(net->named_parameters().size(), 3u);
  DistributedDataParallel ddp(net, group(), {.find_unused_parameters = true});
  ASSERT_EQ(ddp.parameter_names().front(), "weight");
  EXPECT_EQ(std::count_if(ddp.parameters().begin(), ddp.parameters().end(),
                          [&](const auto& parameter) { return parameter.is_same(net->weight); }),
            1);
  const auto alone = net->weight.detach().clone().requires_grad_();
  loss_of(all_samples().matmul(alone).tanh().matmul(alone.t())).backward();
  for (int step = 0; step < 2; ++step) {
    net->weight.mutable_grad().reset();
    loss_of(ddp(own_samples())).backward();
    expect_close({net->weight.grad()}, {alone.grad()});
  }
}

TEST(Passes, EachOfTwoBackwardsIsAStep) {
  const auto net = two_layers();
  DistributedDataParallel ddp(net, group());
  const auto wanted = gradients_of_one_process(net);
  const auto a = ddp(own_samples()), b = ddp(own_samples());
  loss_of(a).backward();
  expect_close(gradients_of(ddp.parameters()), wanted);
  loss_of(b).backward();
  expect_close(gradients_of(ddp.parameters()), wanted, 2);
  // And one of two passes together.
  net->zero_grad();
  const auto c = ddp(own_samples()), d = ddp(own_samples());
  (loss_of(c) + loss_of(d)).backward();
  expect_close(gradients_of(ddp.parameters()), wanted, 2);
  // One of them begun under a NoSync.
  net->zero_grad();
  torch::Tensor e;
  {
    const auto guard = ddp.no_sync();
    e = ddp(own_samples());
  }
  const auto f = ddp(own_samples());
  (loss_of(e) + loss_of(f)).backward();
  expect_close(gradients_of(ddp.parameters()), wanted, 2);
}

// When a pass was begun counts, not when it is walked.
TEST(Passes, WalkedWhileANoSyncIsThere) {
  const auto net = two_layers();
  DistributedDataParallel ddp(net, group());
  const auto y = ddp(own_samples());
  const auto guard = ddp.no_sync();
  loss_of(y).backward();
  expect_close(gradients_of(ddp.parameters()), gradients_of_one_process(net));
}

/// Layers whose activations are computed again in backward, by a backward of its own.
struct Recomputed : autograd::Function<Recomputed> {
  static torch::Tensor forward(autograd::AutogradContext* context, const torch::Tensor& x, const torch::Tensor& one,
                               torch::nn::SequentialImpl* layers) {
    context->save_for_backward({x});
    layers_ = layers;
    return layers->forward(x) * one.detach();
  }
  static autograd::variable_list backward(autograd::AutogradContext* context, autograd::variable_list gradients) {
    const torch::AutoGradMode enable(true);
    const auto x = context->get_saved_variables()[0].detach().requires_grad_();
    autograd::backward({layers_->forward(x)}, {gradients[0]});
    return {x.grad(), torch::Tensor(), torch::Tensor()};
  }
  inline static torch::nn::SequentialImpl* layers_ = nullptr;
};

TEST(Passes, BackwardInBackward) {
  const auto net = two_layers();
  DistributedDataParallel ddp(net, group(), {.bucket_cap_mb = 1e-5, .first_bucket_mb = 1e-5});
  const auto wanted = gradients_of_one_process(net);
  for (int step = 0; step < 3; ++step) {
    for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
    const auto one = torch::ones({}, torch::dtype(torch::kFloat64).requires_grad(true));
    loss_of(ddp.run([&](auto& layers) { return Recomputed::apply(own_samples(), one, &layers); })).backward();
    expect_close(gradients_of(ddp.parameters()), wanted);
  }
}

TEST(Passes, RequestedGradientsStartNoStep) {
  const auto net = two_layers();
  DistributedDataParallel ddp(net, group());
  const auto before = ddp.reducer().timeline().begin;
  auto x = own_samples().requires_grad_();
  const auto y = ddp(x);
  if (rank() == 0) {  // on one rank alone
    autograd::grad({loss_of(y)}, {x}, {}, true);
    autograd::grad({loss_of(y)}, ddp.parameters(), {}, true);
    autograd::grad({loss_of(y)}, {y}, {}, true);
  }
  EXPECT_EQ(ddp.reducer().timeline().begin, before);
  EXPECT_FALSE(net->parameters()[0].grad().defined());
  // A penalty on gradients is differentiated twice, and summed once.
  const auto slope = autograd::grad({loss_of(y)}, {x}, {}, true, true).front();
  (loss_of(y) + slope.square().sum()).backward();
  const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
  for (auto& parameter : copy->parameters()) parameter.mutable_grad().reset();
  auto all = all_samples().requires_grad_();
  const auto z = copy->forward(all);
  const auto slopes = autograd::grad({loss_of(z)}, {all}, {}, true, true).front();
  (loss_of(z) + slopes.square().sum()).backward();
  expect_close(gradients_of(ddp.parameters()), gradients_of(copy->parameters()));
}

TEST(Passes, BackwardToChosenParameters) {
  const auto net = std::make_shared<Branches>();
  DistributedDataParallel ddp(net, group(), {.find_unused_parameters = true});
  ddp(torch::ones({1, 4}, torch::kFloat64), true, true)
      .sum()
      .backward({}, false, false, std::vector{net->weight("left")});
  EXPECT_EQ(net->weight("left").grad()[0][0].item<double>(), ranks());
  EXPECT_FALSE(net->weight("right").grad().defined());
}

// Evaluation that forgets NoGradGuard, and passes whose loss nobody needs.
TEST(Passes, WithoutBackward) {
  const auto net = two_layers();
  DistributedDataParallel ddp(net, group());
  const auto wanted = gradients_of_one_process(net);
  ddp(own_samples());
  if (rank() == 0) ddp(own_samples());
  {
    const torch::NoGradGuard guard;
    EXPECT_FALSE(ddp(own_samples()).requires_grad());
    EXPECT_FALSE(ddp.module().forward(own_samples()).requires_grad());
  }
  loss_of(ddp(own_samples())).backward();
  expect_close(gradients_of(ddp.parameters()), wanted);
}

struct Results {
  torch::Tensor y;
  int rows;
};

}  // namespace
}  // namespace adapter

template <>
struct lockstep::torch::TensorsOf<adapter::Results> {
  static void visit(adapter::Results& results, auto&& see) { see(results.y); }
};

namespace adapter {
namespace {

struct AllResults : Layers {
  std::tuple<torch::Tensor, std::optional<std::vector<torch::Tensor>>, std::map<std::string, torch::Tensor>,
             std::array<std::pair<Results, int>, 1>, torch::Tensor, std::vector<bool>, std::string>
  forward(const torch::Tensor& x) {
    return {layer("left", x),
            std::vector{layer("right", x), x},
            {{"right", layer("right", x)}},
            {{{{layer("left", x), 1}, 2}}},
            weight("left"),
            {true},
            "text"};
  }
};

TEST(Outputs, OfAllKinds) {
  const auto net = std::make_shared<AllResults>();
  DistributedDataParallel ddp(net, group(), {.find_unused_parameters = true});
  const auto x = torch::ones({1, 4}, torch::kFloat64);
  for (int which = 0; which < 5; ++which) {
    net->clear();
    const auto before = ddp.reducer().timeline().begin;
    auto [y, list, map, results, weight, bits, text] = ddp(x);
    EXPECT_EQ(weight.is_leaf(), false);
    // Nothing comes back from Cut: only an output that is known begins the step.
    Cut::apply(std::vector{y, list->at(0), map.at("right"), results[0].first.y, weight}.at(which)).sum().backward();
    EXPECT_NE(ddp.reducer().timeline().begin, before) << which;
  }
}

TEST(Outputs, OfARecurrentLayer) {
  torch::manual_seed(1);
  torch::nn::LSTM net(torch::nn::LSTMOptions(4, 3));
  DistributedDataParallel ddp(net, group());
  const auto [y, state] = ddp(torch::ones({2, 1, 4}));
  (y.sum() + std::get<0>(state).sum() + std::get<1>(state).sum()).backward();
  ddp.check();
}

TEST(Outputs, MayBeChangedInPlace) {
  const auto net = two_layers();
  DistributedDataParallel ddp(net, group());
  const auto wanted = gradients_of_one_process(net);
  auto y = ddp(own_samples());
  y.mul_(2);
  (loss_of(y) / 4).backward();
  expect_close(gradients_of(ddp.parameters()), wanted);
}

struct WithMember : Layers {
  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = layer("left", x);
    penalty = layer("right", x).square().sum();  // of younger nodes than the output: backward walks them before
    return y;
  }
  torch::Tensor penalty;
};

TEST(Outputs, ALossMayUseMoreThanThem) {
  const auto net = std::make_shared<WithMember>();
  DistributedDataParallel ddp(net, group());
  const auto x = torch::ones({1, 4}, torch::kFloat64);
  for (int step = 1; step <= 3; ++step) {
    net->clear();
    const auto y = ddp(x);
    (y.sum() + net->penalty).backward();
    EXPECT_EQ(net->weight("left").grad()[0][0].item<double>(), ranks());
    const auto one = torch::autograd::grad({net->layer("right", x).square().sum()}, {net->weight("right")}).front();
    expect_close({net->weight("right").grad()}, {one}, ranks());
  }
  // Without clearing, which part of a gradient is a sum is not known there.
  const auto y = ddp(x);
  const auto line = refusal_of([&] { (y.sum() + net->penalty).backward(); });
  EXPECT_THAT(line, ranks() > 1 ? HasSubstr("before an output of forward()") : HasSubstr(""));
}

TEST(Outputs, OfOtherFunctionsThanForward) {
  const auto net = std::make_shared<Branches>();
  DistributedDataParallel ddp(net, group(), {.find_unused_parameters = true});
  ddp.run([](Branches& branches) {
       return branches.layer("left", torch::ones({1, 4}, torch::kFloat64));
     })
      .sum()
      .backward();
  EXPECT_EQ(net->weight("left").grad()[0][0].item<double>(), ranks());
}

TEST(Passes, TwoWrappedModulesInOneBackward) {
  const auto first = two_layers();
  const auto second = std::make_shared<torch::nn::SequentialImpl>(torch::nn::Linear(3, 2));
  second->to(torch::kFloat64);
  DistributedDataParallel a(first, group()), b(second, group(), {.bucket_cap_mb = 1e-5, .first_bucket_mb = 1e-5});
  for (int step = 0; step < 3; ++step) {
    first->zero_grad();
    second->zero_grad();
    loss_of(b(a(own_samples()))).backward();
    const auto f = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(first->clone());
    const auto s = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(second->clone());
    f->zero_grad();
    s->zero_grad();
    loss_of(s->forward(f->forward(all_samples()))).backward();
    expect_close(gradients_of(a.parameters()), gradients_of(f->parameters()));
    expect_close(gradients_of(b.parameters()), gradients_of(s->parameters()));
  }
}

struct Counting final : autograd::PostAccumulateGradHook {
  explicit Counting(int& count) : count_(count) {}
  void operator()(const autograd::Variable& parameter) override {
    ++count_;
    parameter.mutable_grad().mul_(2);
  }
  int& count_;
};

TEST(Hooks, ThatAreThereComeFirstAndStay) {
  const auto net = two_layers();
  const auto weight = net->parameters()[0];
  int count = 0;
  autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<Counting>(count));
  auto* const own = autograd::impl::post_acc_grad_hooks(weight).get();
  const auto wanted = gradients_of_one_process(net);
  {
    DistributedDataParallel ddp(net, group());
    loss_of(ddp(own_samples())).backward();
    EXPECT_EQ(count, 1);
    expect_close({weight.grad()}, {wanted[0]}, 2);
  }
  EXPECT_EQ(autograd::impl::post_acc_grad_hooks(weight).get(), own);
  EXPECT_EQ(autograd::impl::post_acc_grad_hooks(net->parameters()[1]).get(), nullptr);
  net->zero_grad();
  loss_of(net->forward(own_samples())).backward();  // nobody sums it, and nobody minds
  EXPECT_EQ(count, 2);
}

struct Around final : autograd::PostAccumulateGradHook {
  explicit Around(std::unique_ptr<autograd::PostAccumulateGradHook> inner) : inner_(std::move(inner)) {}
  void operator()(const autograd::Variable& parameter) override { (*inner_)(parameter); }
  std::unique_ptr<autograd::PostAccumulateGradHook> inner_;
};

TEST(Hooks, ThatOthersHaveWrappedEndQuietly) {
  const auto net = two_layers();
  const auto weight = net->parameters()[0];
  {
    DistributedDataParallel ddp(net, group());
    autograd::impl::set_post_acc_grad_hooks(
        weight, std::make_unique<Around>(std::move(autograd::impl::post_acc_grad_hooks(weight))));
    loss_of(ddp(own_samples())).backward();
    ddp.check();
  }
  net->zero_grad();
  loss_of(net->forward(own_samples())).backward();
  DistributedDataParallel again(net, group());
  net->zero_grad();
  const auto wanted = gradients_of_one_process(net);
  loss_of(again(own_samples())).backward();
  expect_close(gradients_of(again.parameters()), wanted);
}

TEST(Buffers, AreBroadcastFromRankZero) {
  for (const bool broadcast : {true, false}) {
    torch::manual_seed(1);
    torch::nn::Sequential net(torch::nn::Conv2d(1, 2, 3), torch::nn::BatchNorm2d(2),
                              torch::nn::BatchNorm2d(torch::nn::BatchNormOptions(2).track_running_stats(false)));
    DistributedDataParallel ddp(net, group(), {.broadcast_buffers = broadcast});
    auto& norm = *net[1]->as<torch::nn::BatchNorm2d>();
    torch::Tensor after_one;
    for (int step = 0; step < 2; ++step) {
      torch::manual_seed(step * 10 + rank());
      ddp(torch::randn({4, 1, 5, 5})).square().sum().backward();
      if (step == 0) after_one = norm.running_mean.clone();
    }
    // What rank 0 had after a step, all of them have begun the next one with.
    const auto begun = group().all_gather_text(broadcast ? "" : std::to_string(after_one[0].item<float>()));
    EXPECT_EQ(norm.num_batches_tracked.item<std::int64_t>(), 2);
    const torch::NoGradGuard guard;
    ddp(torch::ones({1, 1, 5, 5}));  // sends them again
    torch::manual_seed(3);
    if (broadcast) {
      ddp.broadcast_buffers();
      ddp.check_with_buffers();
    } else if (ranks() > 1) {
      EXPECT_NE(begun[0], begun[1]);
    }
  }
}

TEST(Ownership, IsShared) {
  auto net = two_layers();
  const std::weak_ptr<torch::nn::Module> watched = net;
  std::optional<DistributedDataParallel<torch::nn::SequentialImpl>> ddp(std::in_place, std::move(net), group());
  loss_of((*ddp)(own_samples())).backward();
  ddp.reset();
  EXPECT_TRUE(watched.expired());
  static_assert(!std::is_constructible_v<DistributedDataParallel<torch::nn::LinearImpl>, torch::nn::LinearImpl&,
                                         lockstep::comm::ProcessGroup&>);
}

}  // namespace
}  // namespace adapter
