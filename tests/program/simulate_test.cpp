// lockstep simulate and lockstep plan, as people call them. That figures are there and consistent; not what they are.
#include <gtest/gtest.h>

#include <fstream>

#include "tests/program/command.h"
#include "tests/support/json.h"

namespace lockstep::testing {
namespace {

using nlohmann::json;

TEST(Simulate, PredictsFromAProfileThatWasMeasured) {
  const TemporaryDirectory directory;
  const auto measured =
      run("lockstep bench step mlp --batch 8 --threads 1 --steps 3 --warmup-steps 1 --profile-out p.json",
          directory.path());
  ASSERT_EQ(measured.code, 0) << measured.err;
  std::ifstream file(directory.path() / "p.json");
  const json profile = json::parse(file);
  EXPECT_EQ(profile["gradients"].size(), 6u);
  double before = profile["backward_ms"];
  for (const auto& gradient : profile["gradients"]) {  // the first layer's come last
    EXPECT_GT(gradient["ready_ms"].get<double>(), 0.0);
    if (gradient["rows"] == 1) continue;
    EXPECT_LE(gradient["ready_ms"].get<double>(), before);
    before = gradient["ready_ms"];
  }
  // Forward is a part of a step: nothing is ready before it.
  EXPECT_GT(before, 0.1 * profile["backward_ms"].get<double>());

  const auto predicted =
      run("lockstep simulate p.json --nodes 1,4,16384 --link 10,20 --samples 1e9 --price 2 --node-mtbf-hours 9000 "
          "--checkpoint-seconds 5 --json --html page.html --svg plot.svg",
          directory.path());
  ASSERT_EQ(predicted.code, 0) << predicted.err;
  const json result = json::parse(predicted.out);
  ASSERT_EQ(result["predictions"].size(), 3u);
  EXPECT_EQ(result["predictions"][0]["communication_ms"], 0.0);
  EXPECT_EQ(result["predictions"][2]["ranks"], 16384);
  for (const auto& p : result["predictions"]) {
    EXPECT_LE(p["efficiency"], 1.0);
    EXPECT_NEAR(p["samples_per_s"].get<double>(), 8e3 * p["ranks"].get<double>() / p["step_ms"].get<double>(),
                1e-2 * p["samples_per_s"].get<double>());
    EXPECT_GT(p["run"]["hours"], 0.0);
    EXPECT_GT(p["run"]["price"], 0.0);
  }
  for (const char* const name : {"page.html", "plot.svg"}) {
    std::ifstream page(directory.path() / name);
    const std::string text((std::istreambuf_iterator<char>(page)), {});
    EXPECT_NE(text.find("<svg"), std::string::npos) << name;
    EXPECT_EQ(text.find("src="), std::string::npos) << name;
  }

  const auto advice = run("lockstep plan p.json --nodes 2 --link 1,50 --json", directory.path());
  ASSERT_EQ(advice.code, 0) << advice.err;
  EXPECT_EQ(json::parse(advice.out)["advice"][0]["compressed"].size(), 4u);
  EXPECT_EQ(run("lockstep plan p.json --nodes 1,2 --link 1,50", directory.path()).code, 0);
  EXPECT_EQ(run("lockstep simulate linear --nodes 1", directory.path()).code, 0);  // measured first
}

TEST(Simulate, TakesAClusterFromAFile) {
  const TemporaryDirectory directory;
  ASSERT_EQ(
      run("lockstep bench step linear --threads 1 --steps 2 --warmup-steps 1 --profile-out p.json", directory.path())
          .code,
      0);
  std::ofstream(directory.path() / "cluster.toml")
      << "nodes = [2, 4]\nranks-per-node = 2\nlink = \"100,5\"\nlocal-link = \"400,2\"\nvariation = \"normal:0.02\"\n";
  const auto outcome = run("lockstep simulate p.json --config cluster.toml --json", directory.path());
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(json::parse(outcome.out)["predictions"][1]["ranks"], 8);
}

TEST(Simulate, RefusesWhatItCannotDoInOneLine) {
  const TemporaryDirectory directory;
  ASSERT_EQ(
      run("lockstep bench step linear --threads 1 --steps 2 --warmup-steps 1 --profile-out p.json", directory.path())
          .code,
      0);
  std::ofstream(directory.path() / "empty.json");
  std::ofstream(directory.path() / "other.json") << "{\"kind\": \"x\"}";
  struct Refusal {
    const char* arguments;
    int code;
    const char* text;
  };
  for (const Refusal& c : {Refusal{"simulate", 2, "MODEL|FILE"},
                           Refusal{"simulate no.json", 3, "no.json"},
                           Refusal{"simulate empty.json", 3, "not JSON"},
                           Refusal{"simulate other.json", 3, "no profile"},
                           Refusal{"simulate mlpp", 2, "mlpp"},
                           Refusal{"simulate p.json", 2, "--link"},
                           Refusal{"simulate p.json --nodes 0", 2, "--nodes"},
                           Refusal{"simulate p.json --nodes 2 --link 10", 2, "rate and a latency"},
                           Refusal{"simulate p.json --nodes 1048576 --ranks-per-node 65536 --link 1,1", 2, "16777216"},
                           Refusal{"simulate p.json --link 10,5 --algorithm rings", 2, "rings"},
                           Refusal{"simulate p.json --link 10,5 --variation normal", 2, "distribution"},
                           Refusal{"simulate p.json --link 10,5 --slow-ranks 2,2", 2, "share"},
                           Refusal{"simulate p.json --link 10,5 --zero 1 --comm-hook bf16", 2, "--zero"},
                           Refusal{"simulate p.json --link 10,5 --price 3", 2, "--samples"},
                           Refusal{"simulate p.json --link 10,5 --node-mtbf-hours 5", 2, "--checkpoint-seconds"},
                           Refusal{"simulate p.json --link 10,5 --restart-seconds 5", 2, "--node-mtbf-hours"},
                           Refusal{"simulate p.json --link 10,5 --oversubscription 2", 2, "--switch-nodes"},
                           Refusal{"simulate p.json --link 10,5 --collectives p.json", 3, "allreduce"},
                           Refusal{"simulate p.json --link 10,5 --profiles empty.json", 3, "empty.json"},
                           Refusal{"simulate p.json --link 10,5 --html no/where.html", 3, "no/where.html"},
                           Refusal{"plan p.json --link 10,5 --samples 5", 2, "--samples"},
                           Refusal{"bench step linear --profile-out p.json --comm-hook bf16", 2, "--comm-hook"},
                           Refusal{"bench step linear --profile-out no/p.json", 3, "no/p.json"}}) {
    const auto outcome = run(std::string("lockstep ") + c.arguments, directory.path());
    EXPECT_EQ(outcome.code, c.code) << c.arguments << "\n" << outcome.err;
    EXPECT_EQ(lines_of(outcome.err).size(), 1u) << c.arguments << "\n" << outcome.err;
    EXPECT_NE(outcome.err.find(c.text), std::string::npos) << c.arguments << "\n" << outcome.err;
    EXPECT_NE(outcome.err.find("→"), std::string::npos) << c.arguments << "\n" << outcome.err;
  }
}

}  // namespace
}  // namespace lockstep::testing
