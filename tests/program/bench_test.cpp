// lockstep bench, as people and scripts call it. That figures are there and consistent; not what they are.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/program/command.h"
#include "tests/support/json.h"

namespace lockstep::testing {
namespace {

using nlohmann::json;

std::string bench(int ranks, const std::string& arguments) { return on_ranks(ranks) + "lockstep bench " + arguments; }

/// MPI alone needs a launcher.
std::string start(int ranks, const std::string& choice) {
  if (!choice.ends_with("mpi")) return on_ranks(ranks);
  return "lockstep launch --no-prefix -n " + std::to_string(ranks) + " -- ";
}

/// Figures that are there and consistent.
void check_lines(const std::string& out, int ranks, std::size_t sizes) {
  const auto lines = lines_of(out);
  ASSERT_EQ(lines.size(), sizes) << out;
  for (const auto& line : lines) {
    const auto result = json::parse(line);
    EXPECT_EQ(result["wrong"], 0) << line;
    EXPECT_EQ(result.value("out_of_place_wrong", 0), 0) << line;
    EXPECT_EQ(result.value("mpi_wrong", 0), 0) << line;
    EXPECT_EQ(result.value("gloo_wrong", 0), 0) << line;
    EXPECT_EQ(result["world_size"], ranks);
    EXPECT_GT(result["time_us"], 0.0);
    EXPECT_LE(result["min_us"], result["time_us"]);
    EXPECT_GE(result["p99_us"], result["time_us"]);
    // Four decimals of GB/s: half of the last one is 0.05 bytes for each microsecond.
    const double bytes = result["bytes"], time_us = result["time_us"];
    const double moved = result.value("pattern", "") == "bidirectional" ? 2 * bytes : bytes;
    EXPECT_NEAR(result["algbw_gbs"].get<double>() * time_us * 1e3, moved, 0.1 * moved + 100 + 0.05 * time_us) << line;
  }
}

TEST(BenchCollectives, AreRightForEveryTypeAndOperation) {
  const TemporaryDirectory directory;
  const std::string sizes = " --min 6 --max 300K --factor 9 --iterations 2 --json ";
  for (const int ranks : {1, 2, 3}) {
    for (const char* choice :
         {"allreduce --dtype f32 --op sum", "allreduce --dtype f64 --op min", "reduce-scatter --dtype bf16 --op sum",
          "reduce --dtype i32 --op max --root 0", "allreduce --dtype i64 --backend mpi", "all-gather --dtype u8",
          "broadcast --dtype f16 --in-flight 3", "all-to-all --dtype f64", "send-recv --in-flight 2",
          "allreduce --memory own", "reduce-scatter --memory own", "all-gather --memory own",
          "reduce --memory own --op min", "all-to-all --memory own", "send-recv --memory own"}) {
      SCOPED_TRACE(std::string(choice) + " on " + std::to_string(ranks));
      const auto outcome = run_well(start(ranks, choice) + "lockstep bench " + choice + sizes, directory.path());
      check_lines(outcome.out, ranks, 5);
    }
  }
  for (const int ranks : {2, 3})
    for (const char* choice : {"broadcast --root 1", "send-recv --pattern latency", "send-recv --pattern bandwidth",
                               "send-recv --pattern bidirectional --memory own"}) {
      SCOPED_TRACE(std::string(choice) + " on " + std::to_string(ranks));
      const auto outcome = run_well(bench(ranks, choice + sizes), directory.path());
      check_lines(outcome.out, ranks, 5);
    }
  const auto barrier = run_well(bench(2, "barrier --iterations 3 --json"), directory.path());
  EXPECT_GT(json::parse(barrier.out)["time_us"], 0.0);
}

TEST(BenchCollectives, StandBesideMpi) {
  const TemporaryDirectory directory;
  const std::string launch = "lockstep launch --no-prefix --mpi -n 2 -- lockstep bench ";
  for (const char* choice : {"allreduce", "reduce-scatter", "all-gather", "broadcast", "reduce --root 1", "all-to-all",
                             "send-recv", "send-recv --pattern bandwidth"}) {
    SCOPED_TRACE(choice);
    const auto outcome = run_well(
        launch + choice + " --min 4K --max 64K --factor 16 --iterations 2 --json --compare mpi", directory.path());
    check_lines(outcome.out, 2, 2);
    for (const auto& line : lines_of(outcome.out)) EXPECT_GT(json::parse(line)["mpi_time_us"], 0.0);
  }
  EXPECT_THAT(run(bench(1, "allreduce --max 64 --compare mpi"), directory.path()),
              fails_with(2, "lockstep launch --mpi"));
}

TEST(BenchCollectives, StandBesideGlooWhereItIsThere) {
  const TemporaryDirectory directory;
  const bool there =
      std::filesystem::exists(std::filesystem::path(LOCKSTEP_PROGRAM).parent_path() / "liblockstep_gloo.so");
  const std::string sizes = " --min 4K --max 64K --factor 16 --iterations 2 --json --compare gloo";
  for (const char* choice : {"allreduce --op max", "all-gather", "broadcast", "reduce --root 1 --dtype i64",
                             "all-to-all", "send-recv", "send-recv --pattern bandwidth"}) {
    SCOPED_TRACE(choice);
    const auto outcome = run(bench(2, choice + sizes), directory.path());
    ASSERT_EQ(outcome.code, there ? 0 : 2) << outcome.err;
    if (there)
      check_lines(outcome.out, 2, 2);
    else
      EXPECT_THAT(outcome.err, ::testing::HasSubstr("install libgloo-dev"));
  }
  EXPECT_EQ(run(bench(2, "reduce-scatter --max 64 --compare gloo"), directory.path()).code, 2);
}

TEST(BenchCollectives, PrintATableOnceAndCsv) {
  const TemporaryDirectory directory;
  auto outcome = run_well(bench(2, "allreduce --min 4K --max 16K --iterations 2"), directory.path());
  EXPECT_EQ(lines_of(outcome.out).size(), 4u + 3u + 2u) << outcome.out;
  outcome = run(bench(2, "allreduce --min 4K --max 16K --iterations 2 --csv --check no"), directory.path());
  const auto lines = lines_of(outcome.out);
  ASSERT_EQ(lines.size(), 4u) << outcome.out;
  EXPECT_EQ(std::ranges::count(lines[0], ','), std::ranges::count(lines[1], ','));
}

TEST(BenchStep, MeasuresPeaksOfTheDeviceOnRequest) {
  const TemporaryDirectory directory;
  const std::string step = "step linear --batch 8 --steps 3 --warmup-steps 2 --threads 1 --json --peak-tflops ";
  for (const int ranks : {1, 2}) {
    const auto outcome = run_well(bench(ranks, step + "measured"), directory.path());
    const auto result = json::parse(outcome.out);
    EXPECT_GT(result["measured"]["product_tflops"], 0.0);
    EXPECT_GT(result["measured"]["copy_bytes_per_s"], 0.0);
    EXPECT_GT(result["measured"]["core_flops"], 1e8);
    EXPECT_LT(result["measured"]["core_share"], 1.0);
    EXPECT_FALSE(result.contains("mfu")) << "of a data sheet, which is not there";
  }
  const auto stated = run(bench(1, step + "0.5"), directory.path());
  EXPECT_EQ(json::parse(stated.out)["peak_tflops"], 0.5);
  EXPECT_FALSE(json::parse(stated.out).contains("measured"));
}

TEST(BenchStep, ReportsThePartsOfAStep) {
  const TemporaryDirectory directory;
  for (const int ranks : {1, 2, 3}) {
    for (const char* model : {"linear", "mlp --hidden 32", "cnn --data digits"}) {
      const auto outcome =
          run_well(bench(ranks, std::string("step ") + model + " --batch 8 --steps 5 --warmup-steps 2 --json"),
                   directory.path());
      ASSERT_EQ(lines_of(outcome.out).size(), 1u) << outcome.out;
      const auto result = json::parse(outcome.out);
      EXPECT_EQ(result["world_size"], ranks);
      EXPECT_EQ(result["batch"], 8);
      EXPECT_EQ(result["precision"], "f32");
      EXPECT_EQ(result["peak_memory_bytes"].size(), static_cast<std::size_t>(ranks));
      const double step = result["step_ms"];
      EXPECT_LE(result["step_ms_p10"], step);
      EXPECT_GE(result["step_ms_p90"], step);
      EXPECT_NEAR(result["samples_per_s"].get<double>() * step, 1e3 * 8 * ranks, 0.05 * 8e3 * ranks);
      EXPECT_GT(result["startup_ms"], 0.0);
      EXPECT_GT(result["compute_ms"], 0.0);
    }
  }
}

TEST(BenchDpVsDdp, ReportsAllModes) {
  const TemporaryDirectory directory;
  for (const char* devices : {"cpu:0,1", "cpu:2,0,1"}) {
    const auto outcome = run_well(std::string("lockstep bench dp-vs-ddp mlp --hidden 64,64 --batch 12 --steps 4 "
                                              "--warmup-steps 2 --rounds 2 --threads 1 --json --device ") +
                                      devices,
                                  directory.path());
    ASSERT_EQ(lines_of(outcome.out).size(), 1u) << outcome.out;
    const auto result = json::parse(outcome.out);
    const std::size_t count = result["devices"].size();
    EXPECT_EQ(count, std::string(devices) == "cpu:0,1" ? 2u : 3u);
    EXPECT_EQ(result["global_batch"], 12 * count);
    constexpr double kParameters = 4.0 * (784 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10);
    for (const char* way : {"dp_loss_outside", "dp", "ddp"}) {
      const auto& each = result[way];
      EXPECT_GT(each["step_ms"], 0.0);
      double in = 0, out = 0;
      for (std::size_t i = 0; i < count; ++i) {
        // Parameters, gradients and AdamW's two moments; copies have the former two.
        EXPECT_GT(each["peak_memory_bytes"][i], (way == std::string("ddp") || i == 0 ? 4 : 2) * kParameters);
        EXPECT_GE(each["busy_share"][i], 0.0);
        in += each["bytes_in"][i].get<double>();
        out += each["bytes_out"][i].get<double>();
      }
      EXPECT_NEAR(in, out, 1.0);
      EXPECT_NEAR(each["bytes_moved"].get<double>(), in, 1.0);
    }
    // The first sends its parameters to all others and takes their gradients in; outputs and inputs come on top.
    EXPECT_GT(result["dp"]["bytes_out"][0], static_cast<double>(count - 1) * kParameters);
    EXPECT_GT(result["dp"]["bytes_in"][0], static_cast<double>(count - 1) * kParameters);
    // Outputs and their gradients.
    EXPECT_GT(result["dp_loss_outside"]["bytes_in"][0], result["dp"]["bytes_in"][0]);
    EXPECT_GT(result["dp_loss_outside"]["bytes_out"][0], result["dp"]["bytes_out"][0]);
    EXPECT_GT(result["dp"]["memory_ratio"], 1.5);
    EXPECT_LE(result["ddp"]["memory_ratio"], 1.05);
    // 2 (N − 1) / N of all gradients, and a little beside them: docs/collectives.md.
    const auto n = static_cast<double>(count);
    for (std::size_t i = 0; i < count; ++i) {
      EXPECT_GT(result["ddp"]["bytes_in"][i], 2 * (n - 1) / n * kParameters);
      EXPECT_LT(result["ddp"]["bytes_in"][i], 2 * (n - 1) / n * kParameters * 1.02);
    }
  }
  const auto table = run_well("lockstep bench dp-vs-ddp linear --steps 1 --rounds 1 --threads 1", directory.path());
  EXPECT_NE(table.out.find("largest / smallest"), std::string::npos) << table.out;
}

TEST(BenchDpVsDdp, CleansUpItsProcesses) {
  const TemporaryDirectory directory;
  const auto outcome = run(
      "timeout --preserve-status -s INT 2 lockstep bench dp-vs-ddp mlp --steps 1000000 --threads 1; "
      "code=$?; for i in $(seq 100); do "
      "pgrep -f \"^[^ ]*lockstep bench dp-vs-ddp mlp --steps 1000000\" >left || exit $code; sleep 0.1; done; cat left",
      directory.path());
  EXPECT_EQ(outcome.code, 130) << outcome.out << outcome.err;
}

TEST(Bench, RefusesWhatItCannotDoInOneLine) {
  const TemporaryDirectory directory;
  struct Case {
    const char* arguments;
    int code;
    const char* text;
  };
  for (const Case& c :
       {Case{"allreduce --min 0", 2, "not a size"}, Case{"allreduce --max 2T", 2, "not a size"},
        Case{"allreduce --min 1M --max 1K", 2, "--min is above --max"},
        Case{"allreduce --max 900G", 4, "not enough memory"}, Case{"allreduce --json --csv", 2, "--csv"},
        Case{"allreduce --dtype u8", 2, "u8"}, Case{"step", 2, "MODEL"}, Case{"step cn", 2, "did you mean"},
        Case{"step cnn --steps 0", 2, "--steps"}, Case{"step cnn --min 8", 2, "lockstep bench allreduce"},
        Case{"step mlp --lr 1e30 --steps 30", 7, "NaN or infinite"}})
    expect_refused({bench(2, c.arguments), c.code, c.text}, directory.path());
  EXPECT_EQ(run("lockstep bench stp", directory.path()).code, 2);
  run_well("lockstep bench --help", directory.path());
  run_well("lockstep bench step --help", directory.path());
}

}  // namespace
}  // namespace lockstep::testing
