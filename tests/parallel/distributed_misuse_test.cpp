// DistributedDataParallel in a loop that is wrong: each rank gets the fault and its remedy, and none waits for another.
#include <gmock/gmock.h>

#include <optional>
#include <thread>

#include "lockstep/comm/make_group.h"
#include "lockstep/ddp/reducer.h"
#include "lockstep/nn/ops/transfer.h"
#include "lockstep/nn/optim/optimizer.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "tests/support/ranks.h"
#include "tests/support/refusal.h"

namespace lockstep::parallel {
namespace {

using lockstep::testing::group;
using lockstep::testing::refusal_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

class DistributedMisuse : public ::testing::Test {
 protected:
  std::unique_ptr<nn::Sequential> two_layers() {
    auto made = std::make_unique<nn::Sequential>();
    made->then(std::make_unique<nn::Linear>(context, 4, 5)).then(std::make_unique<nn::Linear>(context, 5, 3));
    return made;
  }
  nn::Var loss_of(nn::Tape& on, nn::Var y) {
    return nn::squared_error(on, y, target, 1.0f / static_cast<float>(2 * group().size())).value;
  }
  nn::Var input() { return tape.input(x); }
  // Through what wraps the module, or through the module itself.
  void pass(nn::Module& through) {
    tape.backward(loss_of(tape, through(tape, input())));
    tape.reset();
  }

  std::unique_ptr<nn::Backend> backend = nn::make_cpu_backend(1);
  nn::Generator generator{1};
  nn::Context context{*backend, generator};
  std::unique_ptr<nn::Sequential> net = two_layers();
  nn::Tensor x = nn::tensor_of(*backend, {2, 4}, std::vector<float>(8, static_cast<float>(group().rank() + 1)));
  nn::Tensor target = backend->zeros({2, 3});
  nn::Tape tape{*backend};
};

TEST_F(DistributedMisuse, TheModuleIsCalledInPlaceOfWhatWrapsIt) {
  DistributedDataParallel ddp(*net, group());
  const auto optimizer = nn::make_sgd(ddp.parameters(), {});
  EXPECT_THAT(refusal_of([&] { pass(*net); }),
              AllOf(HasSubstr("1.weight got a gradient in a pass that DistributedDataParallel knows nothing of"),
                    HasSubstr("ddp(tape, x), not net(tape, x)")));
  tape.reset();
  // Nobody has waited, and the right call works.
  optimizer->zero_grad();
  pass(ddp);
  optimizer->step(0.1);
  // Nor is it noticed in the first step alone.
  EXPECT_REFUSED("knows nothing of", pass(*net));
  tape.reset();
  // To evaluate that way is right.
  tape.set_recording(false);
  (*net)(tape, input());
  tape.reset();
  ddp.check();
}

TEST_F(DistributedMisuse, OnRequestGradientsAreThisRanksAlone) {
  DistributedDataParallel ddp(*net, group());
  const auto optimizer = nn::make_sgd(ddp.parameters(), {});
  {
    const auto guard = ddp.no_sync();
    pass(ddp);
  }
  EXPECT_TRUE(ddp.parameters().front().parameter->is_partial());
  EXPECT_REFUSED("that is this rank's alone", optimizer->step(0.1));
  pass(ddp);  // and sums both
  EXPECT_FALSE(ddp.parameters().front().parameter->is_partial());
  optimizer->step(0.1);
  ddp.check();
}

TEST_F(DistributedMisuse, SeveralNoSyncsThatEndInAnyOrder) {
  DistributedDataParallel ddp(*net, group());
  const auto partial = [&] {
    for (const auto& [name, parameter] : ddp.parameters()) parameter->clear_grad();
    pass(ddp);
    return ddp.parameters().front().parameter->is_partial();
  };
  std::optional<DistributedDataParallel::NoSync> first(std::in_place, ddp), second(std::in_place, ddp);
  EXPECT_TRUE(partial());
  first.reset();
  EXPECT_TRUE(partial());
  second.reset();
  EXPECT_FALSE(partial());
  std::optional<DistributedDataParallel> short_lived;
  const auto other = two_layers();
  short_lived.emplace(*other, group());
  first.emplace(*short_lived);
  short_lived.reset();
  first.reset();  // what it held back is gone
}

TEST_F(DistributedMisuse, AModuleThatIsWrappedTwice) {
  DistributedDataParallel ddp(*net, group());
  const auto refused = HasSubstr("belongs to another DistributedDataParallel already");
  EXPECT_THAT(refusal_of([&] { DistributedDataParallel again(*net, group()); }),
              ::testing::AnyOf(refused, HasSubstr("no UsageError: rank 0")));
  EXPECT_THAT(refusal_of([&] { DistributedDataParallel outer(ddp, group()); }),
              ::testing::AnyOf(refused, HasSubstr("no UsageError: rank 0")));
  pass(ddp);
  EXPECT_FALSE(ddp.parameters().front().parameter->is_partial());
  EXPECT_TRUE(ddp.parameters().front().parameter->on_ready);  // it sums yet
}

TEST_F(DistributedMisuse, TwoOfThemOnOneTape) {
  const auto other = two_layers();
  DistributedDataParallel a(*net, group()), b(*other, group());
  const nn::Var left = a(tape, input());
  EXPECT_REFUSED("backward would sum only one", b(tape, input()));
  tape.backward(loss_of(tape, left));
  tape.reset();
  // One after the other they share a group.
  pass(b);
  pass(a);
  a.check();
  b.check();
}

TEST_F(DistributedMisuse, TrainedParametersChangeAfterWrapping) {
  net->named_parameters()[0].parameter->set_requires_grad(false);
  DistributedDataParallel ddp(*net, group());
  pass(ddp);
  net->named_parameters()[0].parameter->set_requires_grad(true);
  EXPECT_REFUSED("0.weight is trained now, and was not when", pass(ddp));
}

TEST_F(DistributedMisuse, AModuleThatEndsBeforeWhatWrapsIt) {
  std::optional<DistributedDataParallel> ddp(std::in_place, *net, group());
  net.reset();
  EXPECT_REFUSED("of a module that is gone", (*ddp)(tape, input()));
  EXPECT_REFUSED("of a module that is gone", ddp->contribute_nothing());
  ddp.reset();
}

TEST_F(DistributedMisuse, ItEndsBeforeBackward) {
  std::optional<DistributedDataParallel> ddp(std::in_place, *net, group());
  const nn::Var loss = loss_of(tape, (*ddp)(tape, input()));
  ddp.reset();
  EXPECT_REFUSED("DistributedDataParallel is no longer there", tape.backward(loss));
}

// Gradients were in the memory of its group.
TEST_F(DistributedMisuse, AStepAfterItsEnd) {
  std::optional<DistributedDataParallel> ddp(std::in_place, *net, group());
  const auto optimizer = nn::make_sgd(ddp->parameters(), {});
  pass(*ddp);
  ddp.reset();
  EXPECT_FALSE(net->named_parameters().front().parameter->has_gradient());
  EXPECT_REFUSED("none of its parameters has a gradient", optimizer->step(0.1));
  pass(*net);  // alone, into memory of its own
  optimizer->step(0.1);
}

TEST_F(DistributedMisuse, OtherCallsAfterTheEndOfTheModuleOrTheGroup) {
  auto part = group().duplicate();
  std::optional<DistributedDataParallel> ddp(std::in_place, *net, *part);
  part->shutdown();
  part.reset();
  const auto gone = HasSubstr("over a group that is gone");
  EXPECT_THAT(refusal_of([&] { ddp->broadcast_buffers(); }), gone);
  EXPECT_THAT(refusal_of([&] { ddp->broadcast_state(); }), gone);
  EXPECT_THAT(refusal_of([&] { ddp->wait_for_parameters(); }), gone);
  EXPECT_THAT(refusal_of([&] { ddp->start_gathering_parameters(); }), gone);
  EXPECT_THAT(refusal_of([&] { ddp->register_comm_hook(nullptr); }), gone);
  ddp.emplace(*net, group());
  net.reset();
  EXPECT_REFUSED("of a module that is gone", ddp->broadcast_state());
}

TEST_F(DistributedMisuse, AGroupThatEndsBeforeWhatSumsOverIt) {
  std::unique_ptr<comm::ProcessGroup> alone = std::make_unique<comm::SelfGroup>(std::chrono::seconds(30));
  std::optional<DistributedDataParallel> ddp(std::in_place, *net, *alone);
  std::optional<ddp::Reducer> reducer(std::in_place, *alone, std::vector<ddp::SlotSpec>{{"w", 4, DType::kF32}},
                                      ddp::BucketLimits{.first_bucket_bytes = 64, .bucket_bytes = 64});
  pass(*ddp);
  alone.reset();
  EXPECT_REFUSED("over a group that is gone", (*ddp)(tape, input()));
  EXPECT_REFUSED("whose group has ended", reducer->begin_step(1));
  ddp.reset();
  reducer.reset();
}

TEST_F(DistributedMisuse, ACallFromAnotherThread) {
  DistributedDataParallel ddp(*net, group());
  const auto elsewhere = [&](const auto& work) {
    std::string refusal;
    std::thread([&] { refusal = refusal_of(work); }).join();
    return refusal;
  };
  const auto refused = HasSubstr("from another thread than the one that has a pass under way → let one thread use it");
  const nn::Var loss = loss_of(tape, ddp(tape, input()));
  EXPECT_THAT(elsewhere([&] {
                nn::Tape own(*backend);
                ddp(own, own.input(x));
              }),
              refused);
  EXPECT_THAT(elsewhere([&] { ddp.contribute_nothing(); }), refused);
  tape.backward(loss);  // it is as it was
  tape.reset();
  // Between passes another one may take over, on every rank at the same place.
  EXPECT_EQ(elsewhere([&] { pass(ddp); }), "");
  ddp(tape, input());
  tape.reset();  // and where a pass is given up
  EXPECT_EQ(elsewhere([&] { pass(ddp); }), "");
  pass(ddp);
  ddp.check();
}

TEST_F(DistributedMisuse, TwoReducersOnOneGroup) {
  const auto make = [&] {
    return std::make_unique<ddp::Reducer>(group(), std::vector<ddp::SlotSpec>{{"w", 4, DType::kF32}},
                                          ddp::BucketLimits{.first_bucket_bytes = 64, .bucket_bytes = 64});
  };
  const auto first = make(), second = make();
  const auto set = [](ddp::Reducer& reducer, float value) {
    auto* const at = reinterpret_cast<float*>(reducer.storage(0).data());
    std::fill(at, at + 4, value);
  };
  first->begin_step(1);
  second->begin_step(1);
  set(*first, 1.0f);
  set(*second, 10.0f);
  first->mark_ready(0);
  second->mark_ready(0);
  second->finish({}, [](auto) {});
  first->finish({}, [](auto) {});
  EXPECT_EQ(reinterpret_cast<const float*>(first->storage(0).data())[3], 1.0f * static_cast<float>(group().size()));
  EXPECT_EQ(reinterpret_cast<const float*>(second->storage(0).data())[3], 10.0f * static_cast<float>(group().size()));
}

}  // namespace
}  // namespace lockstep::parallel
