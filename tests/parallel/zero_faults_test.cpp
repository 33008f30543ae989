// A rank that ends while owners write into the parameters of all ranks (Note [Direct writes]).
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>

#include "base/error.h"
#include "lockstep/nn/autograd/functions.h"
#include "lockstep/nn/ops/transfer.h"
#include "lockstep/nn/optim/optimizers.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "tests/comm/forked_ranks.h"

namespace lockstep::parallel {
namespace {

using namespace std::chrono_literals;
using lockstep::testing::die;
using lockstep::testing::on_group;
using lockstep::testing::throws;

constexpr std::int64_t kNarrow = 33, kWide = 300, kLeft = 5, kFew = 3;

class DoomedLayers final : public nn::Module {
 public:
  explicit DoomedLayers(nn::Context& context)
      : first_(register_module<nn::Linear>("first", context, kNarrow, kWide)),
        last_(register_module<nn::Linear>("last", context, kWide, kLeft)) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override {
    return last_.forward(tape, nn::relu(tape, first_.forward(tape, x)));
  }

 private:
  nn::Linear &first_, &last_;
};

/// A loop that moves parameters bucket by bucket. `moved` is called after each of them.
class DoomedLoop {
 public:
  DoomedLoop(comm::ProcessGroup& group, std::function<void()> moved)
      : ddp(model, group, {.bucket_mb = 0.01, .first_bucket_mb = 0.001, .zero = 1}),
        optimizer(nn::make_adamw(ddp.parameters(), {}, {}, ddp.share())) {
    ddp.set_bucket_callback([this, moved = std::move(moved)](std::span<const std::size_t> slots) {
      optimizer->update(slots);
      moved();
    });
  }

  void backward() {
    optimizer->zero_grad();
    optimizer->begin_step(0.1);
    const std::vector<float> values(kFew * kNarrow, 0.5f);
    const std::vector<std::int32_t> classes = {0, 1, 2};
    const nn::Tensor labels = backend->empty({kFew}, DType::kI32);
    backend->upload(std::as_bytes(std::span(classes)), labels);
    tape.reset();
    const nn::Var y = ddp(tape, tape.input(nn::tensor_of(*backend, {kFew, kNarrow}, values)));
    tape.backward(nn::cross_entropy(tape, y, labels, 0.1f).value);
  }

  std::unique_ptr<nn::Backend> backend = nn::make_cpu_backend(1);
  nn::Generator generator{1};
  nn::Context context{*backend, generator};
  DoomedLayers model{context};
  DistributedDataParallel ddp;
  std::unique_ptr<nn::Optimizer> optimizer;
  nn::Tape tape{*backend};
};

// It has written some buckets into their parameters, and not all: they end with its name before they read them.
TEST(ZeroFaults, ARankThatEndsBetweenItsWrites) {
  for (const int moved_before : {1, 2})
    on_group({.hosts = "aaa", .doomed = 1}, [&](comm::ProcessGroup& group) {
      if (group.name() != "shm") return false;
      int moved = 0, step = 0;
      DoomedLoop loop(group, [&] {
        if (group.rank() == 1 && step == 2 && ++moved == moved_before) die();
      });
      step = 1;
      loop.backward();
      loop.ddp.start_gathering_parameters();
      loop.ddp.check();
      step = 2;
      const auto begin = Clock::now();
      loop.backward();
      loop.ddp.start_gathering_parameters();
      const nn::Parameter& parameter = *loop.ddp.parameters().front().parameter;
      for (int again = 0; again < 2; ++again)
        if (!throws<DeviceError>([&] { parameter.value(); }, {"rank 1 (host a", "barrier #"})) return false;
      return throws<DeviceError>([&] { loop.ddp.check(); }, {"rank 1 (host a"}) &&
             throws<DeviceError>([&] { loop.backward(); }, {"rank 1 (host a"}) && Clock::now() - begin < 5s;
    });
}

// Nobody has written anything where a rank does not come to its update. It ends when its last sums are complete: before
// that, others may miss its part of them.
TEST(ZeroFaults, ARankThatEndsBeforeItsUpdate) {
  on_group({.hosts = "aaa", .doomed = 1}, [&](comm::ProcessGroup& group) {
    DoomedLoop loop(group, [] {});
    std::vector<std::byte> before;
    for (const auto& [name, parameter] : loop.ddp.parameters()) {
      const auto* const bytes = static_cast<const std::byte*>(parameter->value().raw());
      before.insert(before.end(), bytes, bytes + parameter->value().bytes());
    }
    std::size_t left = loop.ddp.parameters().size();
    if (group.rank() == 1)
      loop.ddp.set_bucket_callback([&](std::span<const std::size_t> slots) {
        if ((left -= slots.size()) == 0) die();
      });
    if (!throws<DeviceError>([&] { loop.backward(); }, {"rank 1 (host a", "barrier #"})) return false;
    std::size_t at = 0;
    for (const auto& [name, parameter] : loop.ddp.parameters()) {
      if (std::memcmp(parameter->value().raw(), before.data() + at, parameter->value().bytes()) != 0) return false;
      at += parameter->value().bytes();
    }
    return true;
  });
}

}  // namespace
}  // namespace lockstep::parallel
