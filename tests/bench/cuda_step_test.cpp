// bench step on a GPU: that its figures are there and say what was done; not what they are.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "bench/ceilings.h"
#include "bench/step.h"
#include "tests/support/json.h"

namespace lockstep::bench {
namespace {

nlohmann::json measured(const StepOptions& options) {
  ::testing::internal::CaptureStdout();
  const int code = bench_step(options, std::nullopt);
  const std::string text = ::testing::internal::GetCapturedStdout();
  EXPECT_EQ(code, 0);
  return testing::json_in(text);
}

StepOptions small(const std::string& model) {
  StepOptions options;
  options.train.model.name = model;
  if (model == "mlp") options.train.model.settings = {{"hidden", {24}}};
  options.train.data = "random:1x8x8,64";
  options.train.batch = 8;
  options.train.device = "cuda:0";
  options.train.bucket_mb = options.train.first_bucket_mb = 1.0 / 1024;
  options.train.quiet = true;
  options.steps = 40;
  options.format = Format::kJson;
  return options;
}

class BenchStepOnGpu : public ::testing::TestWithParam<bool> {};

TEST_P(BenchStepOnGpu, ReplaysEveryMeasuredStep) {
  for (const char* model : {"mlp", "cnn"}) {
    auto options = small(model);
    options.copy_batch = GetParam();
    options.timeline = true;
    options.peak_tflops = 2;
    const auto result = measured(options);
    EXPECT_EQ(result["device"].get<std::string>().rfind("cuda:0", 0), 0u) << result["device"];
    EXPECT_EQ(result["precision"], "f32");
    EXPECT_EQ(result["graphs"], true) << result.value("graphs_refused", "");
    EXPECT_EQ(result["replays_per_step"], 1.0);
    EXPECT_EQ(result["steps"], 40);
    EXPECT_EQ(result["steps_a_block"], 2);
    EXPECT_GT(result["step_ms"], 0.0);
    EXPECT_GT(result["compute_ms"], 0.0);
    // f/t is what `tflops` says, and its share of 2.
    const double tflops = 1e-9 * result["flops_per_step"].get<double>() / result["step_ms"].get<double>();
    EXPECT_NEAR(result["tflops"], tflops, 1e-4 + 0.01 * tflops);
    EXPECT_NEAR(result["mfu"], tflops / 2, 1e-4 + 0.01 * tflops);

    const auto& timeline = result["timeline"];
    EXPECT_EQ(timeline["clock"], "device");
    ASSERT_GE(timeline["buckets"].size(), 2u);
    double last = 0;
    for (const auto& bucket : timeline["buckets"]) {
      EXPECT_GE(bucket["ready_ms"].get<double>(), last);
      last = bucket["ready_ms"];
      EXPECT_EQ(bucket["start_ms"], bucket["ready_ms"]) << "one rank has no allreduce";
    }
    EXPECT_EQ(timeline["last_ready_ms"], last);
    EXPECT_GE(timeline["end_ms"].get<double>(), last);
  }
}

INSTANTIATE_TEST_SUITE_P(Batch, BenchStepOnGpu, ::testing::Bool(),
                         [](const auto& tested) { return tested.param ? "Copied" : "Stays"; });

TEST(BenchStep, RunsWithoutGraphsOnRequest) {
  auto options = small("mlp");
  options.train.graphs = false;
  options.train.precision = Precision::kBF16;
  const auto result = measured(options);
  EXPECT_EQ(result["precision"], "bf16");
  EXPECT_EQ(result["graphs"], false);
  EXPECT_EQ(result["graphs_refused"], "--graphs no");
  EXPECT_EQ(result["replays_per_step"], 0.0);
}

// Operation by operation; and how many kernels a graph has.
TEST(BenchStep, ProfilesAStep) {
  auto options = small("cnn");
  options.profile = true;
  const auto result = measured(options);
  EXPECT_GT(result["kernels_per_step"], 10);
  const auto& profile = result["profile"];
  EXPECT_GT(profile["step_ms"], 0.0);
  EXPECT_GT(profile["peak_bytes_per_s"], 1e11);
  EXPECT_GT(result["measured"]["copy_bytes_per_s"], 0.0);
  EXPECT_GT(result["measured"]["product_tflops"], 0.0);
  std::map<std::string, nlohmann::json> by_name;
  double ms = 0;
  for (const auto& one : profile["operations"]) {
    by_name[one["operation"]] = one;
    ms += one["ms"].get<double>();
    EXPECT_GE(one["share_of_peak_bandwidth"], 0.0);
    const double floor_ms = one["floor_ms"], copy = result["measured"]["copy_bytes_per_s"];
    EXPECT_GE(floor_ms, 1e3 * one["bytes"].get<double>() / copy - 1e-3) << one;
  }
  EXPECT_LE(ms, profile["step_ms"].get<double>());
  // 8 images, two layers with bias and ReLU, each with a pooling; the input's gradient is not asked for.
  ASSERT_TRUE(by_name.contains("max pooling")) << profile;
  EXPECT_EQ(by_name["max pooling"]["calls"], 2);
  ASSERT_TRUE(by_name.contains("cross entropy")) << profile;
  EXPECT_EQ(by_name["cross entropy"]["calls"], 1);
  ASSERT_TRUE(by_name.contains("update")) << profile;
  // adamw: the gradient, and the parameter and two moments there and back.
  EXPECT_EQ(std::fmod(by_name["update"]["bytes"].get<double>(), 28.0), 0.0);
  ASSERT_TRUE(by_name.contains("product")) << profile;
  EXPECT_GT(by_name["product"]["flops"], 0.0);
  options.train.device = "cpu";
  EXPECT_THROW(bench_step(options, std::nullopt), UsageError);
}

TEST(BenchStep, ReportsTf32) {
  auto options = small("mlp");
  options.train.tf32 = true;
  EXPECT_EQ(measured(options)["precision"], "tf32");
}

// In the precision of the step.
TEST(BenchStep, MeasuresPeaksOnRequest) {
  for (const char* device : {"cuda:0", "cpu"}) {
    auto options = small("mlp");
    options.train.device = device;
    if (options.train.device == "cpu") options.train.threads = 1;
    EXPECT_FALSE(measured(options).contains("measured"));
    options.measure_peaks = true;
    const auto result = measured(options);
    EXPECT_GT(result["measured"]["product_tflops"], 0.0);
    EXPECT_GT(result["measured"]["copy_bytes_per_s"], 0.0);
    EXPECT_GE(result["measured"]["product_width"], 64);
    EXPECT_GT(result["measured"]["mfu"], 0.0);
  }
}

// Each device by itself, and the GPU's memory is there again afterwards.
TEST(Ceilings, OfAMachine) {
  const auto all = measure_machine(1);
  ASSERT_GE(all.size(), 2u);
  for (const auto& rates : all) {
    EXPECT_FALSE(rates.problem) << rates.device << ": " << rates.problem->what;
    EXPECT_GT(rates.copy_bytes_per_s, 0.0) << rates.device;
    EXPECT_GT(rates.product_tflops("f32"), 0.0) << rates.device;
    EXPECT_EQ(rates.product_tflops("tf32").has_value(), rates.device != "cpu") << rates.device;
  }
  EXPECT_EQ(all.front().device, "cuda:0");
  EXPECT_EQ(all.back().device, "cpu");
  EXPECT_EQ(all.back().threads, 1);
}

}  // namespace
}  // namespace lockstep::bench
