// After the first steps of a training loop of fixed shapes nothing is allocated or built any more. Counts every
// operator new of this program, except those that oneDNN makes while it runs a primitive, which nobody can prevent.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

#include "nn/models/models.h"
#include "nn/optim/optimizer.h"
#include "tests/nn/values.h"

namespace {

std::atomic<bool> counting{false};
std::atomic<long> counted{0};

void* allocate(std::size_t bytes, const void* caller, std::size_t alignment = alignof(std::max_align_t)) {
  if (counting.load(std::memory_order_relaxed)) {
    Dl_info where{};
    if (::dladdr(caller, &where) == 0 || std::strstr(where.dli_fname, "libdnnl") == nullptr) ++counted;
  }
  const std::size_t rounded = (bytes / alignment + 1) * alignment;
  if (void* const data = std::aligned_alloc(alignment, rounded)) return data;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, __builtin_return_address(0)); }
void* operator new[](std::size_t bytes) { return allocate(bytes, __builtin_return_address(0)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, __builtin_return_address(0), static_cast<std::size_t>(alignment));
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete(void* data, std::size_t, std::align_val_t) noexcept { std::free(data); }
void operator delete[](void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }
void operator delete[](void* data, std::size_t) noexcept { std::free(data); }

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

// One layer of each kind, and a long tail so that the tape needs more than its first memory.
class EveryLayer final : public Module {
 public:
  explicit EveryLayer(Context& context)
      : conv_(register_module("conv", std::make_unique<Conv2d>(context, 1, 16, Window{{3, 3}, {1, 1}, {1, 1}}))),
        norm_(register_module("norm", std::make_unique<BatchNorm>(context, 16))),
        conv2_(register_module("conv2", std::make_unique<Conv2d>(context, 16, 16, Window{{3, 3}, {1, 1}, {1, 1}}))),
        fc_(register_module("fc", std::make_unique<Linear>(context, 16 * 2 * 2, 10))) {}
  Var forward(Tape& tape, Var x) override {
    x = relu(tape, norm_.forward(tape, conv_.forward(tape, x)));
    x = add(tape, x, conv2_.forward(tape, x, Epilogue::kRelu));
    for (int i = 0; i < 200; ++i) x = relu(tape, x);
    x = pool2d(tape, PoolKind::kMax, x, {{2, 2}, {2, 2}, {0, 0}});
    x = pool2d(tape, PoolKind::kAverage, x, {{3, 3}, {2, 2}, {1, 1}});
    return fc_.forward(tape, flatten(tape, x));
  }

 private:
  Conv2d& conv_;
  BatchNorm& norm_;
  Conv2d& conv2_;
  Linear& fc_;
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
    int ready = 0;
    for (const auto& [name, parameter] : parameters) parameter->on_ready = [&ready] { ++ready; };
    const Tensor x = random_tensor(*backend, {4, 8, 8, 1}, 1), labels = backend->empty({4}, DType::kI32);
    for (int i = 0; i < 4; ++i) labels.data<std::int32_t>()[i] = i;
    Tape tape(*backend);
    int hooks = 0;
    tape.set_node_hook([&hooks] { ++hooks; });
    const auto step = [&] {
      for (const auto& [name, parameter] : parameters) parameter->forget_gradient();
      for (int half = 0; half < 2; ++half) {  // accumulated
        const Loss loss = cross_entropy(tape, model.forward(tape, tape.input(x)), labels, 0.125f);
        tape.backward(loss.value);
        tape.reset();
      }
      optimizer->begin_step(0.01);
      for (std::size_t i = 0; i < parameters.size(); ++i) optimizer->update(i);
    };
    for (int i = 0; i < 3; ++i) step();
    const auto stats = backend->allocator().stats();
    const auto primitives = backend->primitives_created();
    counted = 0;
    counting = true;
    for (int i = 0; i < 3; ++i) step();
    counting = false;
    EXPECT_EQ(counted, 0) << "heap allocations in three steps";
    EXPECT_EQ(backend->allocator().stats().system_allocations, stats.system_allocations);
    EXPECT_EQ(backend->allocator().stats().bytes_in_use, stats.bytes_in_use);
    EXPECT_EQ(backend->allocator().stats().peak_bytes_in_use, stats.peak_bytes_in_use);
    EXPECT_EQ(backend->primitives_created(), primitives);
    EXPECT_EQ(ready, 6 * 2 * static_cast<int>(parameters.size()));
    EXPECT_GT(hooks, 0);
  }
}

// The counter itself: a test that counts nothing would always pass.
TEST(SteadyState, TheCounterCounts) {
  counted = 0;
  counting = true;
  const auto kept = std::make_unique<std::vector<int>>(100);
  counting = false;
  EXPECT_EQ(counted, 2);
  EXPECT_EQ(kept->size(), 100u);
}

}  // namespace
}  // namespace lockstep::nn
