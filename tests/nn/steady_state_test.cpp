// After the first steps of a training loop of fixed shapes nothing is allocated or built any more, whatever the layers;
// tests/trainer/steady_state_test.cpp says the same of whole steps with data and ranks. oneDNN allocates while it runs
// a primitive, which nobody can prevent: what it asks for itself does not count.
#include <gtest/gtest.h>
#include <sched.h>

#include <chrono>
#include <numeric>
#include <thread>

#include "lockstep/nn/models/models.h"
#include "lockstep/nn/optim/optimizer.h"
#include "nn/ops/cpu/spread_threads.h"
#include "tests/nn/values.h"
#include "tests/support/allocations.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;
using lockstep::testing::AllocationCounter;
using lockstep::testing::listed;
using lockstep::testing::without;

// One layer of each kind, and a long tail so that the tape needs more than its first memory.
class EveryLayer final : public Module {
 public:
  explicit EveryLayer(Context& context)
      : conv_(register_module("conv", std::make_unique<Conv2d>(context, 1, 16, Window{{3, 3}, {1, 1}, {1, 1}}))),
        norm_(register_module("norm", std::make_unique<BatchNorm>(context, 16))),
        conv2_(register_module("conv2", std::make_unique<Conv2d>(context, 16, 16, Window{{3, 3}, {1, 1}, {1, 1}}))),
        rnn_(register_module<Lstm>("rnn", context, 8 * 16, 12, RecurrentOptions{.num_layers = 2})),
        both_ways_(register_module<Gru>("both_ways", context, 12, 6, RecurrentOptions{.bidirectional = true})),
        plain_(register_module<Rnn>("plain", context, 12, 12)),
        rnn_norm_(register_module("rnn_norm", std::make_unique<LayerNorm>(context, 12))),
        rnn_fc_(register_module("rnn_fc", std::make_unique<Linear>(context, 12, 10))),
        fc_(register_module("fc", std::make_unique<Linear>(context, 16 * 2 * 2, 10))),
        last_steps_(context.backend.empty({4}, DType::kI32)) {
    for (int i = 0; i < 4; ++i) last_steps_.data<std::int32_t>()[i] = 8 * i + 7;
  }
  Var forward(Tape& tape, Var x) override {
    x = relu(tape, norm_.forward(tape, conv_.forward(tape, x)));
    x = add(tape, x, conv2_.forward(tape, x, Epilogue::kRelu));
    for (int i = 0; i < 200; ++i) x = relu(tape, x);
    const Var steps = rnn_norm_.forward(tape, plain_.forward(tape, both_ways_.forward(tape, rnn_.forward(tape, x))));
    const Var last = rnn_fc_.forward(tape, index_select(tape, steps, last_steps_));
    x = pool2d(tape, PoolKind::kMax, x, {{2, 2}, {2, 2}, {0, 0}});
    x = pool2d(tape, PoolKind::kAverage, x, {{3, 3}, {2, 2}, {1, 1}});
    return add(tape, last, fc_.forward(tape, flatten(tape, x)));
  }

 private:
  Conv2d& conv_;
  BatchNorm& norm_;
  Conv2d& conv2_;
  Lstm& rnn_;
  Gru& both_ways_;
  Rnn& plain_;
  LayerNorm& rnn_norm_;
  Linear& rnn_fc_;
  Linear& fc_;
  Tensor last_steps_;
};

TEST(SteadyState, NothingIsAllocatedOrBuilt) {
  for (const bool adam : {false, true}) {
    const auto backend = make_cpu_backend(2);
    Generator generator(1);
    Context context{*backend, generator};
    EveryLayer model(context);
    const auto parameters = model.named_parameters();
    const auto optimizer =
        adam ? make_adamw(parameters, {}) : make_sgd(parameters, {.momentum = 0.9, .nesterov = true});
    std::vector<std::size_t> all(parameters.size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    int ready = 0;
    for (const auto& [name, parameter] : parameters) parameter->on_ready = [&ready] { ++ready; };
    const Tensor x = random_tensor(*backend, {4, 8, 8, 1}, 1), labels = backend->empty({4}, DType::kI32);
    for (int i = 0; i < 4; ++i) labels.data<std::int32_t>()[i] = i;
    Tape tape(*backend);
    int hooks = 0;
    tape.set_node_hook([&hooks] { ++hooks; });
    const auto step = [&] {
      for (const auto& [name, parameter] : parameters) parameter->clear_grad();
      for (int half = 0; half < 2; ++half) {  // accumulated
        const Loss loss = cross_entropy(tape, model.forward(tape, tape.input(x)), labels, 0.125f);
        tape.backward(loss.value);
        tape.reset();
      }
      optimizer->begin_step(0.01);
      optimizer->update(all);
    };
    for (int i = 0; i < 3; ++i) step();
    const auto stats = backend->allocator().stats();
    const auto primitives = backend->primitives_created();
    AllocationCounter counter;
    for (int i = 0; i < 3; ++i) step();
    const auto ours = without(counter.by_caller(), {"libdnnl.", "libgomp."});
    EXPECT_TRUE(ours.empty()) << "heap allocations in three steps\n" << listed(ours);
    EXPECT_EQ(backend->allocator().stats().system_allocations, stats.system_allocations);
    EXPECT_EQ(backend->allocator().stats().bytes_in_use, stats.bytes_in_use);
    EXPECT_EQ(backend->allocator().stats().peak_bytes_in_use, stats.peak_bytes_in_use);
    EXPECT_EQ(backend->primitives_created(), primitives);
    EXPECT_EQ(ready, 6 * 2 * static_cast<int>(parameters.size()));
    EXPECT_GT(hooks, 0);
  }
}

// Whether the threads have processors of their own, or all share one and cannot leave it.
TEST(SteadyState, LooksAtThreadsAllocateNothing) {
  for (const bool bound : {false, true}) {
    std::thread([bound] {  // OpenMP gives it threads of its own, bound as it is
      if (bound) {
        cpu_set_t here;
        CPU_ZERO(&here);
        CPU_SET(::sched_getcpu(), &here);
        ASSERT_EQ(::sched_setaffinity(0, sizeof here, &here), 0);
      }
      cpu::ThreadSpreader spreader(3);
      spreader.spread();
      AllocationCounter counter;
      for (int i = 0; i < 10; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(3));  // it looks every two
        spreader.spread();
      }
      const auto ours = without(counter.by_caller(), {"libgomp."});
      EXPECT_TRUE(ours.empty()) << "bound: " << bound << "\n" << listed(ours);
    })
        .join();
  }
}

}  // namespace
}  // namespace lockstep::nn
