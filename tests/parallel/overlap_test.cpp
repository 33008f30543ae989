// Communication hidden by backward: with a first layer that takes its time, the first bucket's collective is over
// before the last gradient is ready. Prints the step's timeline.
#include <gtest/gtest.h>

#include <cstdio>
#include <thread>

#include "lockstep/nn/layers/layers.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "tests/support/ranks.h"

namespace lockstep::parallel {
namespace {

using lockstep::testing::group;

// Passes its input through; its backward sleeps.
class SlowNode final : public nn::Node {
 public:
  SlowNode(nn::Var output, nn::Var x) : Node(output), x_(x) {}
  void backward(nn::Tape& tape) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    tape.contribute(x_, tape.grad(output()));
  }

 private:
  nn::Var x_;
};

class SlowFirstLayer final : public nn::Module {
 public:
  explicit SlowFirstLayer(nn::Context& context)
      : first_(register_module("first", std::make_unique<nn::Linear>(context, 64, 64))),
        middle_(register_module("middle", std::make_unique<nn::Linear>(context, 64, 64))),
        last_(register_module("last", std::make_unique<nn::Linear>(context, 64, 10))) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override {
    x = first_.forward(tape, x);
    const nn::Var slow = tape.make_var(x.value(), x.needs_grad());
    tape.record<SlowNode>(slow, x);
    return last_.forward(tape, nn::relu(tape, middle_.forward(tape, nn::relu(tape, slow))));
  }

 private:
  nn::Linear& first_;
  nn::Linear& middle_;
  nn::Linear& last_;
};

TEST(Overlap, TheFirstBucketEndsBeforeTheLastGradientIsReady) {
  const auto backend = nn::make_cpu_backend(1);
  nn::Generator generator(1);
  nn::Context context{*backend, generator};
  SlowFirstLayer module(context);
  DistributedDataParallel ddp(module, group(), {.bucket_mb = 4096 / 1048576.0, .first_bucket_mb = 2048 / 1048576.0});
  const auto optimizer = nn::make_sgd(ddp.parameters(), {});
  nn::Tape tape(*backend);
  std::vector<float> x(8 * 64, 0.5f);
  std::vector<std::int32_t> labels(8, 3);
  // Where other programs take the cores, a rank may come late to one step, but not to all of them.
  bool started_early = false, ended_early = false;
  for (std::int64_t step = 1; step <= 20; ++step) {
    optimizer->zero_grad();
    ddp.set_step(step);
    const auto in = tape.input(backend->from_host(x.data(), {8, 64}, DType::kF32));
    const nn::Loss loss =
        nn::cross_entropy(tape, ddp(tape, in), backend->from_host(labels.data(), {8}, DType::kI32), 1.0f / 8);
    tape.backward(loss.value);
    tape.reset();
    const auto& timeline = ddp.reducer().timeline();
    if (step < 3) continue;  // the buckets' order is known from then on
    ASSERT_GE(timeline.buckets.size(), 2u);
    started_early = started_early || timeline.buckets.front().start < timeline.last_ready;
    ended_early = ended_early || timeline.buckets.front().end < timeline.last_ready;
  }
  if (group().rank() == 0) std::printf("%s\n", describe(ddp.reducer().timeline()).c_str());
  EXPECT_TRUE(started_early);
  EXPECT_TRUE(ended_early);
}

}  // namespace
}  // namespace lockstep::parallel
