// Tapes and modules that another thread uses than the one that has a pass under way.
#include <gmock/gmock.h>

#include <thread>

#include "lockstep/base/misuse.h"
#include "lockstep/nn/layers/layers.h"
#include "tests/nn/values.h"
#include "tests/support/refusal.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;
using lockstep::testing::refusal_of;
using ::testing::HasSubstr;

template <class Work>
std::string elsewhere(const Work& work) {
  std::string refusal;
  std::thread([&] { refusal = refusal_of(work); }).join();
  return refusal;
}

class Threads : public ::testing::Test {
 protected:
  Var pass(Tape& on) { return squared_error(on, layer.forward(on, on.input(x)), target, 1.0f).value; }

  std::unique_ptr<Backend> backend = make_cpu_backend(1);
  Generator generator{1};
  Context context{*backend, generator};
  Linear layer{context, 4, 3};
  Tensor x = random_tensor(*backend, {5, 4}, 1), target = backend->zeros({5, 3});
  Tape tape{*backend};
};

TEST_F(Threads, ATapeThatAnotherThreadHasAPassOn) {
  const auto refused = HasSubstr("a call from another thread than the one that has a pass on this tape → give each");
  const Var loss = pass(tape), input = tape.input(x);
  EXPECT_THAT(elsewhere([&] { tape.input(x); }), refused);
  EXPECT_THAT(elsewhere([&] { layer.forward(tape, input); }), refused);
  EXPECT_THAT(elsewhere([&] { tape.backward(loss); }), refused);
  tape.backward(loss);  // it is as it was
  EXPECT_THAT(elsewhere([&] { pass(tape); }), refused);
}

TEST_F(Threads, ATapeIsHandedOnBetweenPasses) {
  for (int i = 0; i < 2; ++i) {
    tape.backward(pass(tape));
    tape.reset();
    EXPECT_EQ(elsewhere([&] {
                tape.backward(pass(tape));
                tape.reset();
              }),
              "");
  }
  // Nor does it matter where it ends.
  EXPECT_EQ(elsewhere([&] { pass(tape); }), "");
}

TEST_F(Threads, AModuleThatAnotherThreadHasAPassIn) {
  const auto refused = HasSubstr("linear uses parameters in which another thread has a pass → one thread at a time");
  const auto on_its_own_tape = [&] {
    Tape own(*backend);
    own.backward(pass(own));
  };
  const Var loss = pass(tape);
  EXPECT_THAT(elsewhere(on_its_own_tape), refused);
  // To compute without recording is no matter of it.
  EXPECT_EQ(elsewhere([&] {
              Tape own(*backend);
              own.set_recording(false);
              pass(own);
            }),
            "");
  tape.backward(loss);
  EXPECT_EQ(elsewhere(on_its_own_tape), "");
  tape.reset();
  pass(tape);
  tape.reset();
  EXPECT_EQ(elsewhere(on_its_own_tape), "");
}

TEST_F(Threads, OneThatActsForAnother) {
  const ThreadId mine = this_thread();
  const Var loss = pass(tape);
  EXPECT_EQ(elsewhere([&] {
              EXPECT_NE(this_thread(), mine);
              const ActsFor me(mine);
              EXPECT_EQ(this_thread(), mine);
              tape.backward(loss);
            }),
            "");
}

}  // namespace
}  // namespace lockstep::nn
