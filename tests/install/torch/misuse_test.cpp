// Loops that are wrong: each rank gets the fault and its remedy, and none waits for another.
#include "support.h"

namespace adapter {
namespace {

struct Growing : torch::nn::Module {
  Growing() {
    register_parameter("a", torch::ones({4}));
    register_parameter("b", torch::ones({4}));
    statistics = register_buffer("statistics", torch::zeros({2}));
  }
  torch::Tensor forward() {
    torch::Tensor sum = torch::zeros({});
    for (const auto& parameter : parameters())
      if (parameter.requires_grad()) sum = sum + parameter.sum().to(torch::kFloat32);
    return sum;
  }
  torch::Tensor statistics;
};

TEST(Misuse, TheModuleIsCalledInPlaceOfWhatWrapsIt) {
  const auto net = two_layers();
  DistributedDataParallel ddp(net, group());
  const auto stray = [&] { loss_of(net->forward(own_samples())).backward(); };
  const auto refused = AllOf(HasSubstr("got a gradient in a pass that DistributedDataParallel knows nothing of"),
                             HasSubstr("ddp(x), not net->forward(x)"));
  EXPECT_THAT(refusal_of(stray), AllOf(refused, HasSubstr("2.")));
  // Nobody has waited, and the right call works.
  net->zero_grad();
  loss_of(ddp(own_samples())).backward();
  ddp.check();
  // Nor is it noticed in the first step alone.
  EXPECT_THAT(refusal_of(stray), refused);
}

TEST(Misuse, ASecondBackwardOfOnePass) {
  const auto net = two_layers();
  DistributedDataParallel ddp(net, group());
  const auto loss = loss_of(ddp(own_samples()));
  loss.backward({}, true);
  EXPECT_THAT(
      refusal_of([&] { loss.backward(); }),
      AllOf(HasSubstr("a second backward of one pass, whose gradients are summed already"), HasSubstr("no_sync()")));
  net->zero_grad();
  const auto wanted = gradients_of_one_process(net);
  torch::Tensor part;
  {
    const auto guard = ddp.no_sync();
    part = loss_of(ddp(own_samples()));
  }
  part.backward({}, true);  // of this rank alone it may be
  part.backward();
  loss_of(ddp(own_samples())).backward();
  expect_close(gradients_of(ddp.parameters()), wanted, 3);
}

TEST(Misuse, ItEndsBeforeBackward) {
  const auto net = two_layers();
  std::optional<DistributedDataParallel<torch::nn::SequentialImpl>> ddp(std::in_place, net, group());
  auto x = own_samples().requires_grad_();
  const auto loss = loss_of((*ddp)(x));
  ddp.reset();
  EXPECT_TRUE(torch::autograd::grad({loss}, {x}, {}, true).front().defined());
  EXPECT_THAT(refusal_of([&] { loss.backward(); }), AllOf(HasSubstr("DistributedDataParallel is no longer there"),
                                                          HasSubstr("keep it until backward has ended")));
}

TEST(Misuse, AGroupThatEndsBeforeWhatSumsOverIt) {
  std::unique_ptr<lockstep::comm::ProcessGroup> alone =
      std::make_unique<lockstep::comm::SelfGroup>(std::chrono::seconds(30));
  const auto net = two_layers();
  DistributedDataParallel ddp(net, *alone);
  loss_of(ddp(own_samples())).backward();  // whose sums the gradients hold
  const auto loss = loss_of(ddp(own_samples()));
  alone.reset();
  EXPECT_THAT(refusal_of([&] { loss.backward(); }), HasSubstr("over a group that is gone"));
  EXPECT_THAT(refusal_of([&] { ddp(own_samples()); }), HasSubstr("over a group that is gone"));
  EXPECT_THAT(refusal_of([&] { ddp.contribute_nothing(); }), HasSubstr("over a group that is gone"));
  EXPECT_THAT(refusal_of([&] { ddp.check(); }), HasSubstr("over a group that is gone"));
}

TEST(Misuse, ParametersThatChange) {
  const auto expect = [](const char* what, const std::function<void(Growing&)>& change) {
    const auto net = std::make_shared<Growing>();
    net->parameters()[1].requires_grad_(false);
    DistributedDataParallel ddp(net, group());
    ddp().backward();
    change(*net);
    EXPECT_THAT(refusal_of([&] { ddp().backward(); }), HasSubstr(what));
  };
  expect("c was not in the module when DistributedDataParallel was made: its gradient would not be summed",
         [](auto& net) { net.register_parameter("c", torch::ones({1})); });
  expect("b is trained now, and was not when", [](auto& net) { net.parameters()[1].requires_grad_(true); });
  expect("a is not trained now, and was when", [](auto& net) { net.parameters()[0].requires_grad_(false); });
  expect("a f64 [4] was a f32 [4] when DistributedDataParallel was made", [](auto& net) { net.to(torch::kFloat64); });
}

TEST(Misuse, ChildrenThatAreReplaced) {
  const auto net = std::make_shared<Growing>();
  net->register_module("child", torch::nn::Linear(2, 2));
  DistributedDataParallel ddp(net, group(), {.find_unused_parameters = true});
  ddp().backward();
  net->replace_module("child", torch::nn::Linear(2, 2));
  EXPECT_THAT(refusal_of([&] { ddp(); }), HasSubstr("child.weight was not in the module when"));
  net->unregister_module("child");
  EXPECT_THAT(refusal_of([&] { ddp(); }), HasSubstr("child.weight is no longer in the module"));
}

TEST(Misuse, BuffersThatChange) {
  if (ranks() == 1) GTEST_SKIP() << "one rank sends none";
  const auto net = std::make_shared<Growing>();
  DistributedDataParallel ddp(net, group());
  ddp().backward();
  net->statistics.set_data(torch::zeros({3}));
  EXPECT_THAT(refusal_of([&] { ddp(); }), HasSubstr("the buffer statistics f32 [3] is another one"));
}

TEST(Misuse, AModuleThatIsWrappedTwice) {
  const auto net = two_layers();
  DistributedDataParallel ddp(net, group());
  EXPECT_THAT(refusal_of([&] { DistributedDataParallel again(net, group()); }),
              refused_everywhere(HasSubstr("0.weight belongs to another DistributedDataParallel already")));
  loss_of(ddp(own_samples())).backward();  // it sums yet
  ddp.check();
}

TEST(Misuse, WhatCannotBeWrapped) {
  const auto refused = [](const std::shared_ptr<torch::nn::Module>& net, const std::string& what,
                          const lockstep::torch::DistributedDataParallelOptions& options = {}) {
    EXPECT_THAT(refusal_of([&] { DistributedDataParallel ddp(net, group(), options); }),
                refused_everywhere(HasSubstr(what)));
  };
  refused(nullptr, "of a null pointer");
  refused(std::make_shared<torch::nn::ReLUImpl>(), "of a module that has no parameters to train");
  refused(two_layers(), "a bucket of no size", {.bucket_cap_mb = 0.0});
  const auto complex = std::make_shared<Growing>();
  complex->register_parameter("c", torch::ones({1}, torch::kComplexFloat));
  refused(complex, "the gradient of c is ComplexFloat → gradients are summed in f32, f64, bf16 and f16");
  const auto elsewhere = std::make_shared<Growing>();
  elsewhere->register_parameter("c", torch::ones({1}, torch::kMeta));
  refused(elsewhere, "c is on meta, and the group's memory on cpu → have the module there, in dense tensors");
  const auto buffer = std::make_shared<Growing>();
  buffer->register_buffer("d", torch::ones({1}, torch::kMeta));
  refused(buffer, "d is on meta");
}

/// A rank alone, as if its arenas were on a GPU.
class GpuGroup final : public lockstep::comm::ProcessGroup {
 public:
  GpuGroup() : ProcessGroup(0, 1, std::chrono::seconds(30)) {}
  std::string name() const override { return "gpu"; }
  lockstep::Device device() const override { return {lockstep::DeviceKind::kCuda, 0}; }
  void poll() override {}
  void shutdown() override {}

 protected:
  std::unique_ptr<lockstep::comm::Arena> map_arena(std::size_t) override { return nullptr; }
  std::vector<std::string> exchange(const std::string& mine) override { return {mine}; }
  std::vector<std::vector<std::byte>> all_gather_objects(std::span<const std::byte> mine) override {
    return {{mine.begin(), mine.end()}};
  }
  bool has_let_go(std::uint64_t) const noexcept override { return true; }
  void start(const lockstep::comm::Op&) override {}
  bool is_done(std::uint64_t) override { return true; }
  void wait_done(std::uint64_t, lockstep::Deadline) override {}
};

TEST(Misuse, AModuleThatIsNotWhereTheGroupIs) {
  GpuGroup gpu;
  EXPECT_THAT(refusal_of([&] { DistributedDataParallel ddp(two_layers(), gpu); }),
              HasSubstr("is on cpu, and the group's memory on cuda:0 → have the module there"));
}

TEST(Misuse, ModulesThatDifferAmongRanks) {
  if (ranks() == 1) GTEST_SKIP() << "one rank agrees with itself";
  const bool odd = rank() + 1 == ranks();
  const auto out_of_step = [&](const std::function<void()>& make, const std::string& what) {
    try {
      make();
      FAIL() << "accepted";
    } catch (const lockstep::OutOfStepError& error) {
      EXPECT_THAT(error.line(), HasSubstr(what));
    } catch (const lockstep::PeerError&) {  // another rank says it
      EXPECT_FALSE(odd);
    }
  };
  const auto linear = [](int in, int out, bool bias = true) {
    return std::make_shared<torch::nn::LinearImpl>(torch::nn::LinearOptions(in, out).bias(bias));
  };
  out_of_step([&] { DistributedDataParallel ddp(linear(odd ? 3 : 4, 2), group()); }, "weight f32 [2, 3]");
  out_of_step([&] { DistributedDataParallel ddp(linear(4, 2, odd), group()); }, "number of parameters=2");
  out_of_step(
      [&] {
        const auto net = linear(4, 2);
        if (odd) net->to(torch::kFloat64);
        DistributedDataParallel ddp(net, group());
      },
      "weight f64 [2, 4]");
  out_of_step(
      [&] {
        const auto net = linear(4, 2);
        if (odd) net->weight.requires_grad_(false);
        DistributedDataParallel ddp(net, group());
      },
      "weight f32 [2, 4], not trained");
  out_of_step(
      [&] {
        auto net = std::make_shared<torch::nn::Conv2dImpl>(torch::nn::Conv2dOptions(2, 2, 3));
        if (odd) net->weight.set_data(net->weight.detach().contiguous(torch::MemoryFormat::ChannelsLast));
        DistributedDataParallel ddp(net, group());
      },
      "with strides");
  out_of_step([&] { DistributedDataParallel ddp(linear(4, 2), group(), {.average_gradients = odd}); },
              "average_gradients=true");
  out_of_step([&] { DistributedDataParallel ddp(linear(4, 2), group(), {.broadcast_buffers = odd}); },
              "broadcast_buffers=");
  out_of_step([&] { DistributedDataParallel ddp(linear(4, 2), group(), {.find_unused_parameters = odd}); },
              "find_unused_parameters=true");
}

TEST(Misuse, SparseGradients) {
  torch::nn::Embedding net(torch::nn::EmbeddingOptions(4, 2).sparse(true));
  DistributedDataParallel ddp(net, group());
  const auto y = ddp(torch::zeros({1}, torch::kInt64));
  EXPECT_THAT(refusal_of([&] { y.sum().backward(); }), HasSubstr("the gradient of weight is sparse → "));
}

TEST(Misuse, GradientsToBeDifferentiatedAgain) {
  const auto net = two_layers();
  DistributedDataParallel ddp(net, group());
  const auto y = ddp(own_samples());
  EXPECT_THAT(refusal_of([&] { loss_of(y).backward({}, true, true); }), HasSubstr("is to be differentiated again → "));
  net->zero_grad();
}

/// Calls the wrapped module in the middle of backward.
struct Again : torch::autograd::Function<Again> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x,
                               const std::function<void()>* call) {
    call_ = call;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    (*call_)();
    return {gradients[0], torch::Tensor()};
  }
  inline static const std::function<void()>* call_ = nullptr;
};

TEST(Misuse, APassInTheMiddleOfABackwardThatSums) {
  const auto net = std::make_shared<Growing>();
  DistributedDataParallel ddp(net, group());
  const std::function<void()> call = [&] { ddp(); };
  // Its node is younger than the pass's first one and older than its output, which begins the step.
  const auto refused = HasSubstr("in the middle of a backward that sums");
  const auto y = ddp.run([&](Growing& module) { return Again::apply(module.forward(), &call) * 2; });
  EXPECT_THAT(refusal_of([&] { y.backward(); }), refused);
  EXPECT_THAT(refusal_of([&] { ddp(); }), refused);  // and it stays so
}

TEST(Misuse, HooksForF32WhereGradientsAreF64) {
  const auto net = two_layers();
  DistributedDataParallel ddp(net, group());
  class Hook final : public lockstep::ddp::CommHook {
    std::string name() const override { return "none"; }
    lockstep::comm::Work start(const lockstep::ddp::GradBucket&, lockstep::comm::ProcessGroup&) override { return {}; }
    void finish(const lockstep::ddp::GradBucket&, lockstep::StreamView) override {}
  };
  EXPECT_THAT(refusal_of([&] { ddp.register_comm_hook(std::make_shared<Hook>()); }),
              refused_everywhere(HasSubstr("a communication hook where the gradient of 0.weight is f64")));
}

}  // namespace
}  // namespace adapter
