// What a hook keeps, in a checkpoint's file and back, on as many ranks and on others.
#include "trainer/carried_state.h"

#include <gmock/gmock.h>

#include <numeric>
#include <string>

#include "base/error.h"
#include "nn/io/safetensors_writer.h"
#include "tests/support/ranks.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::trainer {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using testing::group;
using ::testing::HasSubstr;

class KeepingHook final : public ddp::CommHook {
 public:
  std::string name() const override { return "keeping"; }
  comm::Work start(const ddp::GradBucket& bucket, comm::ProcessGroup& group) override {
    return group.all_reduce(bucket.gradients, comm::ReduceOp::kSum);
  }
  void finish(const ddp::GradBucket&, StreamView) override {}
  std::vector<State> state() override {
    return {{.name = "error", .values = error, .of_rank = true},
            {.name = "q", .values = q},
            {.name = "none", .values = {}}};
  }
  std::vector<float> error = {0, 0, 0}, q = {0, 0};
};

class HookStateTest : public ::testing::Test {
 protected:
  HookStateTest() { resumed_.path = group().all_gather_text(own_.path().string()).front(); }

  /// As a checkpoint of `ranks` ranks has it: on rank 0, which reads it.
  void write(std::vector<nn::HostTensor> tensors, int ranks) {
    resumed_.manifest.world_size = ranks;
    resumed_.manifest.files[checkpoint::kHookFile] = {};
    if (group().rank() != 0) return;
    std::vector<nn::TensorHeader> headers;
    for (const auto& tensor : tensors)
      headers.push_back({tensor.name, tensor.dtype, tensor.shape, tensor.bytes.size()});
    nn::SafetensorsWriter writer(resumed_.path + "/" + checkpoint::kHookFile, headers);
    for (const auto& tensor : tensors) writer.add(tensor.bytes);
    writer.commit();
  }
  static nn::HostTensor tensor(const std::string& name, std::vector<std::int64_t> shape, std::vector<float> values) {
    nn::HostTensor made{.name = name, .shape = std::move(shape), .bytes = {}};
    const auto bytes = std::as_bytes(std::span(values));
    made.bytes.assign(bytes.begin(), bytes.end());
    return made;
  }

  testing::TemporaryDirectory own_;
  checkpoint::Resumed resumed_;
};

TEST_F(HookStateTest, EachRankGetsItsOwnBack) {
  const auto rank = static_cast<float>(group().rank());
  KeepingHook kept;
  kept.error = {rank, 10 + rank, 20 + rank};
  kept.q = {7, 8};
  const auto tensors = gather_hook_state(&kept, group());
  if (group().rank() == 0) {
    ASSERT_EQ(tensors.size(), 2u);
    EXPECT_EQ(tensors[0].name, "keeping.error");
    EXPECT_THAT(tensors[0].shape, ElementsAre(group().size(), 3));
    EXPECT_THAT(tensors[1].shape, ElementsAre(2));
  } else {
    EXPECT_TRUE(tensors.empty());
  }
  write(tensors, group().size());
  KeepingHook again;
  resume_hook_state(resumed_, &again, group());
  EXPECT_EQ(again.error, kept.error);
  EXPECT_EQ(again.q, kept.q);
}

TEST_F(HookStateTest, OnOtherRanksTheSumStays) {
  constexpr int kRanks = 4;
  std::vector<float> rows(kRanks * 3);
  std::iota(rows.begin(), rows.end(), 1.0f);  // 1 2 3, 4 5 6, 7 8 9, 10 11 12
  write({tensor("keeping.error", {kRanks, 3}, rows), tensor("keeping.q", {2}, {7, 8})}, kRanks);
  KeepingHook hook;
  resume_hook_state(resumed_, &hook, group());
  EXPECT_THAT(hook.q, ElementsAre(7, 8));
  group().all_reduce(std::span(hook.error));
  EXPECT_NEAR(hook.error[0], 22, 1e-4);
  EXPECT_NEAR(hook.error[1], 26, 1e-4);
  EXPECT_NEAR(hook.error[2], 30, 1e-4);
}

TEST_F(HookStateTest, StateOfAnotherHookIsIgnored) {
  write({tensor("topk:1.error", {group().size(), 3},
                std::vector<float>(static_cast<std::size_t>(group().size()) * 3, 5))},
        group().size());
  KeepingHook hook;
  resume_hook_state(resumed_, &hook, group());
  EXPECT_THAT(hook.error, Each(0.0f));
  resume_hook_state(resumed_, nullptr, group());
}

TEST_F(HookStateTest, AFileOfAnotherModelIsRefused) {
  write({tensor("keeping.error", {group().size(), 2}, std::vector<float>(static_cast<std::size_t>(group().size()) * 2)),
         tensor("keeping.q", {2}, {7, 8})},
        group().size());
  KeepingHook hook;
  try {
    resume_hook_state(resumed_, &hook, group());
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("it has no keeping.error of 3 numbers"));  // the others say rank 0's
  }
}

}  // namespace
}  // namespace lockstep::trainer
