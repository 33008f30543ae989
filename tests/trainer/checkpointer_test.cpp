// Checkpoints of a custom training loop: the same bits as without a break.
#include "lockstep/trainer/checkpointer.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <optional>

#include "base/error.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/open.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/optim/grad_scaler.h"
#include "lockstep/trainer/forward.h"
#include "tests/support/ranks.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::trainer {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr std::int64_t kSteps = 9;

class Net final : public nn::Module {
 public:
  explicit Net(nn::Context& context)
      : in_(register_module<nn::Linear>("in", context, 64, 32)),
        out_(register_module<nn::Linear>("out", context, 32, 10)) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override {
    return out_.forward(tape, nn::gelu(tape, in_.forward(tape, nn::flatten(tape, x))));
  }

 private:
  nn::Linear& in_;
  nn::Linear& out_;
};

// One session for all tests: a process joins its ranks once.
session::Session& session() {
  static session::Session joined = [] {
    session::SessionOptions options;
    options.device = "cpu";
    options.threads = 1;
    return session::open_session(options);
  }();
  return joined;
}

class CheckpointerTest : public ::testing::Test {
 protected:
  CheckpointerTest() {
    const auto names = session().group->all_gather_text(own_.path().string());
    directory_ = names.front() + "/kept";
  }

  // A process that starts: everything anew. With `scaling` losses are scaled, and the first steps overflow f32.
  struct Loop {
    explicit Loop(std::uint64_t seed, int zero_stage = 0, bool scaling = false) : zero(zero_stage), generator(seed) {
      if (scaling) optimizer->set_scaler(&scaler.emplace(*session().backend, kScaling));
    }
    static constexpr nn::GradScaler::Options kScaling = {.initial_scale = 0x1p127, .growth_interval = 2};
    int zero;
    nn::Generator generator;
    nn::Context context{*session().backend, generator};
    Net net{context};
    parallel::DistributedDataParallel ddp{net, session().gradients(), {.first_bucket_mb = 0.001, .zero = zero}};
    std::optional<nn::GradScaler> scaler;  // must outlive the optimizer
    std::unique_ptr<nn::Optimizer> optimizer = nn::make_adamw(ddp.parameters(), {}, {}, ddp.share());
    data::DataSplits digits = data::open_data("digits");
    sampler::DistributedSampler sampler{{.length = digits.train->size(), .seed = 3, .global_batch = 600},
                                        session().group->rank(),
                                        session().group->size()};
  };

  // From where the newest checkpoint is to the end; the parameters' hash.
  std::string train(Loop& loop, Checkpointer& checkpoints, std::int64_t wanted_start, int every) {
    std::int64_t step = checkpoints.load_latest(loop.sampler).value_or(0);
    EXPECT_EQ(step, wanted_start);
    data::Loader loader(loop.digits.train, loop.sampler, {});
    nn::Tape tape(*session().backend);
    const SampleFormat format = format_of(*loop.digits.train);
    if (loop.scaler) tape.set_loss_scale(loop.scaler->scale());
    const float weight = loop.scaler ? 64.0f : 1.0f;  // so that the largest scales overflow
    while (step < kSteps) {
      const data::Batch& batch = loader.next();
      const auto [x, labels] = inputs_of(*session().backend, batch, format);
      const nn::Loss loss = nn::cross_entropy(tape, loop.ddp(tape, tape.input(x)), labels,
                                              weight / static_cast<float>(batch.plan.global_count));
      loop.optimizer->zero_grad();
      tape.backward(loss.value);
      loop.optimizer->step({.lr = 0.01, .clip_norm = 1});
      if (loop.scaler) loop.scaler->update();
      tape.reset();
      if (++step % every == 0) checkpoints.save(step, batch.state_after);
    }
    checkpoints.finish();
    return nn::parameters_sha256(loop.net);
  }

  std::string error_of(const std::function<void()>& act) {
    try {
      act();
    } catch (const Error& error) {
      return error.line();
    }
    return "none";
  }

  testing::TemporaryDirectory own_;
  std::string directory_;
};

TEST_F(CheckpointerTest, ResumesToTheSameBits) {
  std::string whole;
  {
    Loop loop(1);
    Checkpointer checkpoints(session(), loop.ddp, *loop.optimizer, {.checkpoint_dir = directory_, .keep = 0});
    whole = train(loop, checkpoints, 0, 3);
  }
  if (session().group->rank() == 0) {
    EXPECT_TRUE(fs::exists(directory_ + "/step-0000000003"));
    fs::remove_all(directory_ + "/step-0000000009");
    std::ofstream(directory_ + "/step-0000000006/weights.safetensors") << "cut";
  }
  session().group->barrier().wait_host();
  Loop loop(2);  // other parameters, until the checkpoint is there
  Checkpointer checkpoints(session(), loop.ddp, *loop.optimizer, {.checkpoint_dir = directory_, .keep = 0});
  EXPECT_EQ(train(loop, checkpoints, 3, 100), whole);
}

// With what the hook keeps: each rank its own part.
TEST_F(CheckpointerTest, ResumesCommunicationHooks) {
  for (const char* hook : {"fp16", "powersgd:1", "topk:2"}) {
    SCOPED_TRACE(hook);
    const std::string kept = fmt::format("{}/{}", directory_, hook);
    std::string whole;
    {
      Loop loop(1);
      loop.ddp.register_comm_hook(ddp::make_comm_hook(hook));
      Checkpointer checkpoints(session(), loop.ddp, *loop.optimizer, {.checkpoint_dir = kept, .keep = 0});
      whole = train(loop, checkpoints, 0, 4);
    }
    if (session().group->rank() == 0) fs::remove_all(kept + "/step-0000000008");
    session().group->barrier().wait_host();
    Loop loop(2);
    loop.ddp.register_comm_hook(ddp::make_comm_hook(hook));
    Checkpointer checkpoints(session(), loop.ddp, *loop.optimizer, {.checkpoint_dir = kept, .keep = 0});
    EXPECT_EQ(train(loop, checkpoints, 4, 100), whole);
  }
}

// With the scale of losses, its count of good steps, and the steps that were skipped, which bias corrections leave out.
TEST_F(CheckpointerTest, ResumesScaledLosses) {
  for (const int zero : {0, 1}) {
    const std::string kept = fmt::format("{}/{}", directory_, zero);
    std::string whole;
    nn::GradScaler::State end;
    std::int64_t steps = 0;
    {
      Loop loop(1, zero, true);
      Checkpointer checkpoints(session(), loop.ddp, *loop.optimizer, {.checkpoint_dir = kept, .keep = 0});
      whole = train(loop, checkpoints, 0, 5);
      end = loop.scaler->state();
      steps = loop.optimizer->steps();
      EXPECT_GT(end.skipped_steps, 0);
      EXPECT_EQ(steps, kSteps - end.skipped_steps);
    }
    Loop loop(2, zero, true);
    Checkpointer checkpoints(session(), loop.ddp, *loop.optimizer, {.checkpoint_dir = kept, .keep = 0});
    EXPECT_EQ(train(loop, checkpoints, 5, 100), whole);
    EXPECT_EQ(loop.scaler->state(), end);
    EXPECT_EQ(loop.optimizer->steps(), steps);
  }
}

// One that scaled no losses may be resumed by one that does; a file that is another's is refused.
TEST_F(CheckpointerTest, LossScaleRestartsWithoutSavedState) {
  {
    Loop loop(1);
    Checkpointer checkpoints(session(), loop.ddp, *loop.optimizer, {.checkpoint_dir = directory_});
    train(loop, checkpoints, 0, 5);
  }
  Loop loop(1, 0, true);
  Checkpointer checkpoints(session(), loop.ddp, *loop.optimizer, {.checkpoint_dir = directory_});
  EXPECT_EQ(checkpoints.load_latest(loop.sampler), 5);
  EXPECT_EQ(loop.scaler->state(), nn::GradScaler::State{.scale = 0x1p127f});
  EXPECT_EQ(loop.optimizer->steps(), 5);
}

// A checkpoint has all moments, whoever remembered them.
TEST_F(CheckpointerTest, ShardedAndReplicatedUpdatesResumeFromEachOther) {
  std::string whole;
  for (const int zero : {0, 1, 0, 1}) {
    Loop loop(1, zero);
    Checkpointer checkpoints(session(), loop.ddp, *loop.optimizer, {.checkpoint_dir = directory_, .keep = 0});
    const std::string hash = train(loop, checkpoints, whole.empty() ? 0 : 3, 3);
    if (whole.empty()) whole = hash;
    EXPECT_EQ(hash, whole) << "zero " << zero;
    session().group->barrier().wait_host();
    if (session().group->rank() == 0)
      for (const char* later : {"/step-0000000006", "/step-0000000009"}) fs::remove_all(directory_ + later);
    session().group->barrier().wait_host();
  }
}

TEST_F(CheckpointerTest, MissingOrRepeatedCalls) {
  Loop loop(1);
  Checkpointer checkpoints(session(), loop.ddp, *loop.optimizer, {.checkpoint_dir = directory_});
  EXPECT_THAT(error_of([&] { checkpoints.save(1, {}); }), HasSubstr("save() before load_latest()"));
  EXPECT_EQ(checkpoints.load_latest(loop.sampler), std::nullopt);
  EXPECT_THAT(error_of([&] { checkpoints.load_latest(loop.sampler); }), HasSubstr("load_latest() a second time"));
  checkpoints.save(4, loop.sampler.state());
  EXPECT_THAT(error_of([&] { checkpoints.save(4, loop.sampler.state()); }),
              HasSubstr("a checkpoint of step 4 after that of step 4"));
  checkpoints.finish();
  Checkpointer other(session(), loop.ddp, *loop.optimizer, {.checkpoint_dir = directory_}, {.name = "another"});
  EXPECT_THAT(error_of([&] { other.load_latest(loop.sampler); }), HasSubstr("another"));
  EXPECT_THAT(error_of([&] { Checkpointer(session(), loop.ddp, *loop.optimizer, {}); }),
              HasSubstr("checkpoints without a directory"));
  for (const checkpoint::CheckpointOptions& options : std::vector<checkpoint::CheckpointOptions>{
           {.checkpoint_every = 5}, {.checkpoint_mirror = "there"}, {.resume = "auto"}}) {
    checkpoint::CheckpointOptions named = options;
    named.checkpoint_dir = directory_;
    EXPECT_THAT(error_of([&] { Checkpointer(session(), loop.ddp, *loop.optimizer, named); }),
                HasSubstr("load_latest()"));
  }
}

}  // namespace
}  // namespace lockstep::trainer
