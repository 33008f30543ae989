#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/text.h"
#include "bench/allreduce.h"
#include "bench/step.h"
#include "bench/timings.h"
#include "lockstep/comm/make_group.h"
#include "tests/support/json.h"

namespace lockstep::bench {
namespace {

using ::testing::ElementsAre;

std::vector<std::int64_t> sizes(std::int64_t min, std::int64_t max, int factor = 2, DType dtype = DType::kF32) {
  AllReduceOptions options;
  options.min_bytes = min;
  options.max_bytes = max;
  options.factor = factor;
  options.dtype = dtype;
  return sizes_of(options);
}

TEST(Sizes, GrowByAFactorInWholeElements) {
  EXPECT_THAT(sizes(8, 64), ElementsAre(8, 16, 32, 64));
  EXPECT_THAT(sizes(10, 100, 3), ElementsAre(8, 28, 88));
  EXPECT_THAT(sizes(1, 9), ElementsAre(4, 8)) << "1, 2 and 4 bytes are one float";
  EXPECT_THAT(sizes(7, 7, 2, DType::kI64), ElementsAre(8));
}

TEST(Speed, BandwidthMatchesNcclTests) {
  // 8 MB in 1 ms are 8 GB/s; of four ranks' links, each carries 2·3/4 of that.
  const Speed speed = speed_of(1000, 8'000'000, 4);
  EXPECT_DOUBLE_EQ(speed.algbw_gbs, 8.0);
  EXPECT_DOUBLE_EQ(speed.busbw_gbs, 12.0);
  EXPECT_DOUBLE_EQ(speed_of(1000, 8'000'000, 1).busbw_gbs, 0.0);
  EXPECT_TRUE(std::isfinite(speed_of(0, 8, 2).algbw_gbs));
}

TEST(Quantile, IsTheNearestValue) {
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 3, 2}), 2.5);
  EXPECT_EQ(quantile({5, 4, 3, 2, 1, 0}, 0.0), 0);
  EXPECT_EQ(quantile({5, 4, 3, 2, 1, 0}, 1.0), 5);
  EXPECT_EQ(quantile({10, 0, 30, 20, 40}, 0.25), 10);
  EXPECT_TRUE(std::isnan(median({})));
}

TEST(Report, AllReduceAsJsonTableOrCsv) {
  const comm::SelfGroup group(std::chrono::seconds(1));
  AllReduceOptions options;
  options.format = Format::kJson;
  AllReduceResult result{
      .bytes = 1024, .count = 256, .out_of_place = speed_of(3, 1024, 1), .in_place = speed_of(2, 1024, 1)};
  result.in_place.wrong = 0;
  const auto json = testing::json_in(line_of(result, options, group));
  EXPECT_EQ(json["bytes"], 1024);
  EXPECT_EQ(json["time_us"], 2.0);
  EXPECT_EQ(json["algbw_gbs"], 0.512);
  EXPECT_EQ(json["busbw_gbs"], 0.0);
  EXPECT_EQ(json["out_of_place_time_us"], 3.0);
  EXPECT_EQ(json["wrong"], 0);
  options.format = Format::kTable;
  EXPECT_NE(line_of(result, options, group).find("N/A"), std::string::npos) << "what was not checked";
}

TEST(Report, StepHasTheDocumentedFields) {
  StepResult result;
  result.peak_memory_bytes = {7, 8};
  result.backend = "shm";
  const auto json = testing::json_in(text_of(result, Format::kJson));
  for (const char* key : {"model", "world_size", "batch", "precision", "step_ms", "samples_per_s", "compute_ms",
                          "exposed_comm_ms", "peak_memory_bytes", "startup_ms"})
    EXPECT_TRUE(json.contains(key)) << key;
  EXPECT_EQ(json["peak_memory_bytes"], (nlohmann::json{7, 8}));
  const auto csv = split(text_of(result, Format::kCsv), '\n');
  ASSERT_GE(csv.size(), 2u);
  EXPECT_EQ(split(csv[0], ',').size(), split(csv[1], ',').size());
}

TEST(Report, StepOnAGpuReportsGraphsAndKernels) {
  StepResult result;
  result.device = "cuda:0, NVIDIA \"H100\"";
  result.step_ms = 0.5;
  result.flops_per_step = 1e9;
  result.peak_tflops = 8;
  result.mfu = 0.25;
  result.graphs_refused = "a kernel waits";
  result.engines = {{"attention, bf16", {"cuDNN \"eng1\""}}, {"LSTM, bf16", {"cuDNN in f32", "an old cuDNN"}}};
  result.timeline = Timeline{.clock = "device",
                             .buckets = {{.bytes = 64, .ready_ms = 1, .start_ms = 1, .end_ms = 3},
                                         {.bytes = 64, .ready_ms = 2, .start_ms = 3, .end_ms = 4}},
                             .last_ready_ms = 2,
                             .end_ms = 5};
  const auto json = testing::json_in(text_of(result, Format::kJson));
  EXPECT_EQ(json["device"], result.device);
  EXPECT_EQ(json["graphs"], false);
  EXPECT_EQ(json["graphs_refused"], "a kernel waits");
  EXPECT_EQ(json["engines"]["attention, bf16"], "cuDNN \"eng1\"");
  EXPECT_EQ(json["fallbacks"], (nlohmann::json{{"LSTM, bf16", "an old cuDNN"}}));
  EXPECT_EQ(json["tflops"], 2.0);
  EXPECT_EQ(json["mfu"], 0.25);
  EXPECT_EQ(json["timeline"]["communication_ms"], 3.0);
  EXPECT_EQ(json["timeline"]["hidden_ms"], 1.0) << "what lay before the last gradient";
  const std::string table = text_of(result, Format::kTable);
  for (const char* words : {"steps are not captured: a kernel waits", "25.0 % of 8", "attention, bf16 by cuDNN",
                            "of which backward hid 1.000 ms (33 %)"})
    EXPECT_NE(table.find(words), std::string::npos) << table;
}

TEST(Report, ProfileHasLowerBounds) {
  StepResult result;
  result.precision = "bf16";
  result.step_ms = 2;
  result.flops_per_step = 1e12;
  result.measured = devices::MeasuredRates{.device = "cuda:0",
                                           .copy_bytes = 1 << 20,
                                           .copy_bytes_per_s = 2e12,
                                           .products = {{"bf16", 8192, 800}, {"f32", 64, 1}}};
  result.profile =
      Profile{.operations = {{"norm", 2, 4.0, 6e9, 0}, {"product", 1, 2.0, 1e9, 8e11}}, .peak_bytes_per_s = {}};
  const auto json = testing::json_in(text_of(result, Format::kJson));
  EXPECT_EQ(json["measured"], (nlohmann::json{{"copy_bytes_per_s", 2e12},
                                              {"copy_bytes", 1 << 20},
                                              {"product_tflops", 800.0},
                                              {"product_width", 8192},
                                              {"mfu", 0.625}}));
  EXPECT_EQ(json["profile"]["operations"][0]["floor_ms"], 3.0) << "6 GB at 2 TB/s";
  EXPECT_EQ(json["profile"]["operations"][1]["floor_ms"], 1.0) << "arithmetic that takes longer than its bytes";
  const std::string table = text_of(result, Format::kTable);
  for (const char* words : {"3.000 ms at least", "800 TFLOP/s          62.5 % of that", "2000 GB/s"})
    EXPECT_NE(table.find(words), std::string::npos) << table;
  EXPECT_NE(text_of(result, Format::kCsv).find(",false,0.6250\n"), std::string::npos);
  EXPECT_FALSE(floor_ms({}, {}, "f32"));
}

}  // namespace
}  // namespace lockstep::bench
