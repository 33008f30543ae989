// Streams on several GPUs, each with a copy of the weights, against the CPU: on software devices, and on GPUs where
// there are two.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "base/splitmix.h"
#include "base/text.h"
#include "inference/streams.h"
#include "lockstep/base/device.h"
#include "lockstep/nn/models/models.h"

namespace lockstep::inference {
namespace {

constexpr std::int64_t kClasses = 10, kBatch = 3;
constexpr std::uint64_t kJobs = 24;

std::unique_ptr<nn::Module> model_on(nn::Backend& backend) {
  nn::Generator generator(/*seed=*/1);
  nn::Context context{backend, generator};
  auto model = nn::make_model(context, {.name = "cnn", .sample_shape = {8, 8, 1}, .classes = kClasses});
  model->fuse();
  return model;
}

// Puts the logits of batch `job`, which the CPU computes within rounding.
class Logits final : public InferWorker {
 public:
  Logits(nn::Module& model, nn::Backend& stream) : model_(model), stream_(stream), tape_(stream) {
    tape_.set_recording(false);
  }
  void run(std::uint64_t job, const Put& put, Tally& tally) override {
    std::vector<float> values(static_cast<std::size_t>(kBatch * 64));
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(SplitMix64::word(job, i) % 2000) / 1000.0f - 1.0f;
    const nn::Tensor x = stream_.empty({kBatch, 8, 8, 1});
    stream_.upload(std::as_bytes(std::span(values)), x);
    const nn::Tensor y = model_.forward(tape_, tape_.input(x)).value();
    std::vector<float> logits(static_cast<std::size_t>(y.count()));
    stream_.download(y, std::as_writable_bytes(std::span(logits)));
    tape_.reset();
    for (const float logit : logits) put(fmt::format("{}\n", logit));
    ++tally.results;
  }

 private:
  nn::Module& model_;
  nn::Backend& stream_;
  nn::Tape tape_;
};

std::vector<double> printed(const std::vector<nn::Backend*>& devices, int streams) {
  std::vector<std::unique_ptr<nn::Module>> models;
  for (nn::Backend* device : devices) models.push_back(model_on(*device));
  std::string out;
  const auto result = run_streams(
      devices,
      {.streams = streams,
       .jobs = kJobs,
       .warmup = 1,
       .doing = "computing",
       .print = [&out](std::string_view text) { out += text; }},
      [&](nn::Backend& stream, std::size_t device) { return std::make_unique<Logits>(*models[device], stream); });
  EXPECT_EQ(result.tally.results, kJobs);
  std::vector<double> values;
  for (const auto& line : split(out, '\n'))
    if (!line.empty()) values.push_back(std::stod(line));
  return values;
}

TEST(StreamsOnGpus, ComputeWhatTheCpuDoes) {
  if (probe_cuda().devices < 2) GTEST_SKIP() << "there are not two GPUs";
  const auto cpu = nn::make_cpu_backend(1), first = nn::make_cuda_backend({.device = 0}),
             second = nn::make_cuda_backend({.device = 1});
  const auto wanted = printed({cpu.get()}, 1);
  ASSERT_EQ(wanted.size(), static_cast<std::size_t>(kJobs) * kBatch * kClasses);
  for (const int streams : {2, 3}) {
    const auto got = printed({second.get(), first.get()}, streams);
    ASSERT_EQ(got.size(), wanted.size());
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], wanted[i], 1e-4) << i;
  }
}

}  // namespace
}  // namespace lockstep::inference
