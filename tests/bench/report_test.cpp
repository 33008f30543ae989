#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "bench/collectives.h"
#include "bench/step.h"
#include "bench/timings.h"
#include "tests/support/json.h"

namespace lockstep::bench {
namespace {

using ::testing::ElementsAre;

std::vector<std::int64_t> sizes(std::int64_t min, std::int64_t max, int factor = 2, DType dtype = DType::kF32,
                                Collective collective = Collective::kAllReduce, int ranks = 3) {
  CollectiveOptions options;
  options.collective = collective;
  options.min_bytes = min;
  options.max_bytes = max;
  options.factor = factor;
  options.dtype = dtype;
  return sizes_of(options, ranks);
}

TEST(Sizes, GrowByAFactorInWholeElements) {
  EXPECT_THAT(sizes(8, 64), ElementsAre(8, 16, 32, 64));
  EXPECT_THAT(sizes(10, 100, 3), ElementsAre(8, 28, 88));
  EXPECT_THAT(sizes(1, 9), ElementsAre(4, 8)) << "1, 2 and 4 bytes are one float";
  EXPECT_THAT(sizes(7, 7, 2, DType::kI64), ElementsAre(8));
  EXPECT_THAT(sizes(1, 30, 2, DType::kF32, Collective::kAllGather), ElementsAre(12))
      << "a float of each of three ranks";
  EXPECT_THAT(sizes(1, 30, 2, DType::kF32, Collective::kBarrier), ElementsAre(0));
}

double bus_bandwidth(Collective collective, double n) {
  return speed_of({1000}, 8'000'000, family_of(collective).bus_factor(n)).busbw_gbs;
}

// 8 MB in 1 ms are 8 GB/s.
TEST(Speed, BandwidthMatchesNcclTests) {
  EXPECT_DOUBLE_EQ(speed_of({1000}, 8'000'000, 1).algbw_gbs, 8.0);
  EXPECT_DOUBLE_EQ(bus_bandwidth(Collective::kAllReduce, 4), 12.0);
  EXPECT_DOUBLE_EQ(bus_bandwidth(Collective::kReduceScatter, 4), 6.0);
  EXPECT_DOUBLE_EQ(bus_bandwidth(Collective::kAllGather, 4), 6.0);
  EXPECT_DOUBLE_EQ(bus_bandwidth(Collective::kAllToAll, 4), 6.0);
  EXPECT_DOUBLE_EQ(bus_bandwidth(Collective::kBroadcast, 4), 8.0);
  EXPECT_DOUBLE_EQ(bus_bandwidth(Collective::kReduce, 4), 8.0);
  EXPECT_DOUBLE_EQ(bus_bandwidth(Collective::kSendRecv, 4), 8.0);
  EXPECT_DOUBLE_EQ(bus_bandwidth(Collective::kAllReduce, 1), 0.0);
  EXPECT_TRUE(std::isfinite(speed_of({0}, 8, 2).algbw_gbs));
  const Speed speed = speed_of({5, 1, 9, 2, 3}, 8, 1);
  EXPECT_EQ(speed.min_us, 1);
  EXPECT_EQ(speed.time_us, 3);
  EXPECT_EQ(speed.p99_us, 9);
}

TEST(Quantile, IsTheNearestValue) {
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 3, 2}), 2.5);
  EXPECT_EQ(quantile({5, 4, 3, 2, 1, 0}, 0.0), 0);
  EXPECT_EQ(quantile({5, 4, 3, 2, 1, 0}, 1.0), 5);
  EXPECT_EQ(quantile({10, 0, 30, 20, 40}, 0.25), 10);
  EXPECT_TRUE(std::isnan(median({})));
}

TEST(Report, CollectivesAsJsonTableOrCsv) {
  CollectiveOptions options;
  options.compare = {"mpi"};
  options.format = Format::kJson;
  CollectiveResult result{.bytes = 1024,
                          .count = 256,
                          .out_of_place = speed_of({3}, 1024, 1.5),
                          .in_place = speed_of({2}, 1024, 1.5),
                          .rivals = {speed_of({6}, 1024, 1.5)}};
  result.in_place->wrong = 0;
  auto json = testing::json_in(line_of(result, options, 4, "shm"));
  EXPECT_EQ(json["collective"], "allreduce");
  EXPECT_EQ(json["bytes"], 1024);
  EXPECT_EQ(json["time_us"], 2.0);
  EXPECT_EQ(json["p99_us"], 2.0);
  EXPECT_EQ(json["algbw_gbs"], 0.512);
  EXPECT_EQ(json["busbw_gbs"], 0.768);
  EXPECT_EQ(json["out_of_place_time_us"], 3.0);
  EXPECT_EQ(json["mpi_time_us"], 6.0);
  EXPECT_EQ(json["wrong"], 0);
  EXPECT_EQ(json["out_of_place_wrong"], -1) << "what was not checked";
  EXPECT_EQ(json["world_size"], 4);

  options.format = Format::kTable;
  const std::string row = line_of(result, options, 4, "shm");
  EXPECT_NE(row.find("N/A"), std::string::npos) << "what was not checked";
  EXPECT_TRUE(row.ends_with("    3.00\n")) << "ratio: " << row;
  const auto lines = split(heading_of(options, 4, "shm"), '\n');
  ASSERT_EQ(lines.size(), 5u);
  EXPECT_THAT(summary_of({result}, options), ::testing::HasSubstr("# Avg bus bandwidth    : 0.64\n"));

  options.format = Format::kCsv;
  const auto cells = [](const std::string& line) { return std::ranges::count(line, ','); };
  EXPECT_EQ(cells(heading_of(options, 4, "shm")), cells(line_of(result, options, 4, "shm")));
  result.in_place.reset();  // as of an all-to-all
  EXPECT_EQ(cells(heading_of(options, 4, "shm")), cells(line_of(result, options, 4, "shm")));
  options.format = Format::kJson;
  json = testing::json_in(line_of(result, options, 4, "shm"));
  EXPECT_EQ(json["time_us"], 3.0);
  EXPECT_FALSE(json.contains("out_of_place_time_us"));
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
