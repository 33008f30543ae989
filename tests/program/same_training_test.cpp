// The same training at any number of processes, and the files that a run leaves.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <set>
#include <thread>
#include <utility>

#include "tests/program/command.h"
#include "tests/program/events.h"
#include "tests/support/json.h"

namespace lockstep::testing {
namespace {

TEST(SameTraining, LossesAgreeOnOneToFiveRanks) {
  const TemporaryDirectory directory;
  std::map<int, Metrics> runs;
  for (int n = 1; n <= 5; ++n) {
    const std::string file = "m" + std::to_string(n) + ".jsonl";
    // Every step ends with a bitwise comparison of all ranks' parameters.
    run_well(on_ranks(n) +
                 "lockstep train cnn --data digits --global-batch 64 --epochs 3 --quiet "
                 "--check-replicas 1 --metrics " +
                 file,
             directory.path());
    runs[n] = read_metrics(directory.path() / file);
    ASSERT_EQ(runs[n].losses.size(), 69u);
    ASSERT_EQ(runs[n].evaluations.size(), 3u);
    for (const auto& evaluation : runs[n].evaluations) EXPECT_EQ(evaluation["samples"], 360);
    EXPECT_EQ(runs[n].final["world_size"], n);
    EXPECT_EQ(runs[n].final["params_sha256"].get<std::string>().size(), 64u);
  }
  for (int n = 2; n <= 5; ++n) {
    for (std::size_t i = 0; i < 69; ++i) {
      const double difference = std::abs(runs[n].losses[i] - runs[1].losses[i]) / runs[1].losses[i];
      EXPECT_LE(difference, i < 20 ? 1e-5 : 1e-3) << n << " ranks, step " << i + 1;
    }
  }
}

// --parallel dp: one process and several devices.
TEST(SameTraining, LossesAgreeOnOneToFourDevicesOfOneProcess) {
  const TemporaryDirectory directory;
  struct Case {
    std::string options;
    std::size_t exact;  // steps before rounding has been amplified
  };
  for (const Case& c : {Case{"cnn --optimizer sgd --lr 0.02 --global-batch 61", 30},
                        Case{"lstm --layers 2 --width 16 --dropout 0.2 --clip-norm 1 --batch 10 --threads 1", 30}}) {
    std::vector<Metrics> runs;
    for (const char* devices : {"--device cpu", "--device cpu --parallel dp", "--device cpu:0,1 --parallel dp",
                                "--device cpu:2,0,1 --parallel dp", "--device cpu:0,1,2,3 --parallel dp"}) {
      run_well("lockstep train " + c.options + " " + devices +
                   " --data digits --steps 40 --quiet --check-replicas 7 --metrics m.jsonl",
               directory.path());
      runs.push_back(read_metrics(directory.path() / "m.jsonl"));
      std::filesystem::remove(directory.path() / "m.jsonl");
      ASSERT_EQ(runs.back().losses.size(), 40u);
      EXPECT_EQ(runs.back().final["world_size"], 1);
      for (std::size_t i = 0; i < 40; ++i)
        EXPECT_NEAR(runs.back().losses[i], runs.front().losses[i], (i < c.exact ? 2e-5 : 1e-3) * runs[0].losses[i])
            << c.options << " " << devices << ", step " << i + 1;
    }
    EXPECT_EQ(runs[1].final["params_sha256"], runs[0].final["params_sha256"]) << "one device is one process";
  }
}

// What samples are mixed with does not depend on who reads them, nor what they are to be on how it is computed.
TEST(SameTraining, MixedSamplesAgreeOnRanksDevicesAndInParts) {
  const TemporaryDirectory directory;
  for (const std::string loss :
       {"--mixup 0.4 --cutmix 1", "--mixup 0.4 --label-smoothing 0.1 --class-weights 1,2,1,1,0,1,1,3,1,1",
        "--cutmix 1 --loss focal"}) {
    const std::string line =
        "lockstep train cnn --optimizer sgd --lr 0.02 --global-batch 61 --data digits --steps 30 "
        "--quiet --check-replicas 7 --metrics m.jsonl " +
        loss;
    std::vector<Metrics> runs;
    for (const std::string& run : {line, on_ranks(3) + line, line + " --parallel dp --device cpu:0,1",
                                   on_ranks(2) + line + " --accumulate 3 --workers 2"}) {
      run_well(run, directory.path());
      runs.push_back(read_metrics(directory.path() / "m.jsonl"));
      std::filesystem::remove(directory.path() / "m.jsonl");
      ASSERT_EQ(runs.back().losses.size(), 30u);
      for (std::size_t i = 0; i < 30; ++i)
        EXPECT_NEAR(runs.back().losses[i], runs[0].losses[i], 2e-5 * runs[0].losses[i]) << run << ", step " << i + 1;
    }
    EXPECT_LT(runs[0].losses.back(), runs[0].losses.front());
  }
}

// README's command.
TEST(SameTraining, TwoRanksLearnDigits) {
  const TemporaryDirectory directory;
  run_well(
      "lockstep launch -n 2 -- lockstep train cnn --data digits --epochs 20 --save digits.safetensors "
      "--metrics m.jsonl",
      directory.path());
  const auto metrics = read_metrics(directory.path() / "m.jsonl");
  EXPECT_EQ(metrics.losses.size(), 460u);
  ASSERT_EQ(metrics.evaluations.size(), 20u);
  EXPECT_EQ(metrics.evaluations.back()["samples"], 360);
  EXPECT_EQ(metrics.final["world_size"], 2);
  EXPECT_GE(metrics.final["accuracy"].get<double>(), 0.975);
}

TEST(SameTraining, ARunRepeatsBitForBit) {
  const TemporaryDirectory directory;
  std::string first;
  for (const auto& [start, options] : {std::pair<std::string, const char*>{on_ranks(3), ""},
                                       {on_ranks(3), "--bucket-mb 0.0003 --first-bucket-mb 0.0003"},
                                       {on_ranks(3), "--backend shm"},
                                       {"lockstep launch -n 3 -- ", "--backend mpi"}}) {
    for (int repeat = 0; repeat < 2; ++repeat) {
      run_well(
          start + "lockstep train cnn --data digits --steps 30 --quiet --check-replicas 1 --metrics m.jsonl " + options,
          directory.path());
      const std::string hash = read_metrics(directory.path() / "m.jsonl").final["params_sha256"];
      if (first.empty()) first = hash;
      EXPECT_EQ(hash, first) << "options:" << options;
    }
  }
}

TEST(SameTraining, MoreRanksThanSamples) {
  const TemporaryDirectory directory;
  run_well(
      on_ranks(5) + "lockstep train linear --data random:7,3 --epochs 4 --quiet --check-replicas 1 --metrics m.jsonl",
      directory.path());
  const auto metrics = read_metrics(directory.path() / "m.jsonl");
  EXPECT_EQ(metrics.losses.size(), 4u);
  for (const auto& evaluation : metrics.evaluations) EXPECT_EQ(evaluation["samples"], 1);
}

TEST(SameTraining, PlainMpirunWorksAsWell) {
  const TemporaryDirectory directory;
  const auto outcome =
      run_well("mpirun --oversubscribe -np 2 lockstep train cnn --data digits --epochs 1", directory.path());
  EXPECT_NE(outcome.out.find("on 2 ranks"), std::string::npos) << outcome.out;
}

TEST(SameTraining, SavedWeightsLoadWhereTheyWereSavedFrom) {
  const TemporaryDirectory directory;
  run_well(on_ranks(2) + "lockstep train cnn --data digits --epochs 2 --quiet --metrics a.jsonl --save w.safetensors",
           directory.path());
  // A learning rate of 0 leaves the loaded parameters as they are.
  run_well(
      "lockstep train cnn --data digits --steps 1 --lr 0 --optimizer sgd --quiet --metrics b.jsonl "
      "--weights w.safetensors",
      directory.path());
  const auto a = read_metrics(directory.path() / "a.jsonl"), b = read_metrics(directory.path() / "b.jsonl");
  EXPECT_EQ(a.final["params_sha256"], b.final["params_sha256"]);
  EXPECT_EQ(a.final["accuracy"], b.final["accuracy"]);
  // And nowhere else.
  EXPECT_THAT(run("lockstep train mlp --data digits --steps 1 --weights w.safetensors", directory.path()),
              fails_with(2, "w.safetensors holds a cnn, not a mlp"));
}

TEST(SameTraining, FlagsFromFileEnvironmentAndCommandLine) {
  const TemporaryDirectory directory;
  std::ofstream(directory.path() / "c.toml") << "data = \"digits\"\nsteps = 7\nbatch = 8\nquiet = true\n";
  run_well("LOCKSTEP_BATCH=16 lockstep train cnn --config c.toml --steps 3 --metrics m.jsonl", directory.path());
  EXPECT_EQ(read_metrics(directory.path() / "m.jsonl").losses.size(), 3u);
}

// Note [Waiting beside busy neighbours]: how threads wait changes no bit.
TEST(SameTraining, WaitsOfThreadsAreShortAndTheirBitsTheSame) {
  const TemporaryDirectory directory;
  std::set<std::string> parameters;
  const auto train = [&](const std::string& environment) {
    const auto outcome = run_well(environment +
                                      " lockstep train cnn --data digits --steps 20 --threads 2 --log-level debug "
                                      "--metrics m.jsonl",
                                  directory.path());
    parameters.insert(read_metrics(directory.path() / "m.jsonl").final["params_sha256"]);
    std::filesystem::remove(directory.path() / "m.jsonl");
    return outcome.err;
  };
  const std::string by_default = train("");
  EXPECT_NE(train("GOMP_SPINCOUNT=77").find("GOMP_SPINCOUNT 77"), std::string::npos);
  EXPECT_NE(train("OMP_WAIT_POLICY=passive").find("GOMP_SPINCOUNT not set"), std::string::npos);
  EXPECT_NE(train("taskset -c $(taskset -cp $$ | grep -oE \"[0-9]+$\")").find("GOMP_SPINCOUNT not set"),
            std::string::npos);
  EXPECT_EQ(parameters.size(), 1u);
  if (std::thread::hardware_concurrency() < 2) GTEST_SKIP() << "one processor";
  EXPECT_EQ(by_default.find("GOMP_SPINCOUNT not set"), std::string::npos) << by_default;
}

// A kernel that is made for two threads and gets one leaves half of its result out, or waits for ever.
TEST(SameTraining, ThreadsThatOpenMPWithholdsAreCounted) {
  const TemporaryDirectory directory;
  std::ofstream(directory.path() / "text") << [] {
    std::string text;
    for (int i = 0; i < 600; ++i) text += "now " + std::to_string(i * i % 89) + " then ";
    return text;
  }();
  const std::string line =
      " lockstep train gpt --data text:text --layers 2 --width 64 --context 32 --steps 10 --quiet --metrics m.jsonl ";
  const auto parameters = [&](const std::string& environment, const std::string& flags) {
    std::filesystem::remove(directory.path() / "m.jsonl");
    const auto outcome = run_well(environment + line + flags, directory.path());
    return std::pair(read_metrics(directory.path() / "m.jsonl").final["params_sha256"].get<std::string>(), outcome.err);
  };
  const std::string two = parameters("", "--threads 2").first, one = parameters("", "--threads 1").first;
  for (const char* environment : {"OMP_DYNAMIC=true", "OMP_MAX_ACTIVE_LEVELS=0", "OMP_NUM_THREADS=7", "OMP_NESTED=true",
                                  "OMP_STACKSIZE=300k", "OMP_THREAD_LIMIT=2"})
    EXPECT_EQ(parameters(environment, "--threads 2").first, two) << environment;

  const auto expect_refusal = [&](const std::string& environment, const std::string& flags, int code, const char* why) {
    const auto outcome = run(environment + line + flags, directory.path());
    EXPECT_EQ(outcome.code, code) << outcome.err;
    EXPECT_NE(outcome.err.find(why), std::string::npos) << outcome.err;
    EXPECT_EQ(lines_of(outcome.err).size(), 1u) << outcome.err;
  };
  expect_refusal(
      "OMP_THREAD_LIMIT=1", "--threads 2", 2,
      "--threads 2 compute threads, and OpenMP gives this process 1 (OMP_THREAD_LIMIT=1) → unset it, or give "
      "--threads 1");
  expect_refusal("OMP_STACKSIZE=32k", "--threads 2", 4, "OpenMP's threads have stacks of 32 KB");
  const auto [limited, warning] = parameters("OMP_THREAD_LIMIT=1", "");
  EXPECT_EQ(limited, one);
  if (std::thread::hardware_concurrency() > 1) {
    EXPECT_NE(warning.find("(OMP_THREAD_LIMIT=1) → unset it to use all"), std::string::npos) << warning;
  }
}

// It has started itself again by then.
TEST(SameTraining, IsStillCalledLockstep) {
  const TemporaryDirectory directory;
  auto outcome =
      run("lockstep train cnn --data digits --epochs 100000 --quiet --metrics m.jsonl & "
          "until grep -q event.:.step m.jsonl 2>/dev/null; do sleep 0.05; done; "
          "cat /proc/$!/comm /proc/$!/cmdline; kill $!; wait $!",
          directory.path());
  std::ranges::replace(outcome.out, '\0', ' ');
  EXPECT_TRUE(outcome.out.starts_with("lockstep\n")) << outcome.out;
  EXPECT_NE(outcome.out.find("train cnn --data digits"), std::string::npos) << outcome.out;
}

TEST(SameTraining, CtrlCEndsAllRanksWithOneLine) {
  const TemporaryDirectory directory;
  const auto outcome =
      run("timeout --preserve-status -s INT 2 lockstep launch -n 2 -- lockstep train cnn --data digits --epochs 100000 "
          "--quiet",
          directory.path());
  EXPECT_EQ(outcome.code, 130) << outcome.err;
  const auto alone = run("timeout --preserve-status -s INT 1 lockstep train cnn --data digits --epochs 100000 --quiet",
                         directory.path());
  EXPECT_EQ(alone.code, 130) << alone.err;
  EXPECT_EQ(lines_of(alone.err).size(), 1u) << alone.err;
  EXPECT_NE(alone.err.find("Ctrl-C"), std::string::npos) << alone.err;
}

}  // namespace
}  // namespace lockstep::testing
