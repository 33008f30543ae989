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
      run_well("lockstep bench step mlp --batch 8 --threads 1 --steps 3 --warmup-steps 1 --profile-out p.json",
               directory.path());
  std::ifstream file(directory.path() / "p.json");
  const json profile = json::parse(file);
  EXPECT_EQ(profile["gradients"].size(), 6u);
  double before = profile["backward_ms"];
  for (const auto& gradient : profile["gradients"]) {  // the first layer's come last, in each step, so in medians too
    EXPECT_GT(gradient["ready_ms"].get<double>(), 0.0);
    if (gradient["rows"] == 1) continue;
    EXPECT_LE(gradient["ready_ms"].get<double>(), before);
    before = gradient["ready_ms"];
  }

  const auto predicted = run_well(
      "lockstep simulate p.json --nodes 1,4,16384 --link 10,20 --samples 1e9 --price 2 --node-mtbf-hours 9000 "
      "--checkpoint-seconds 5 --json --html page.html --svg plot.svg",
      directory.path());
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

  const auto advice = run_well("lockstep plan p.json --nodes 2 --link 1,50 --json", directory.path());
  EXPECT_EQ(json::parse(advice.out)["advice"][0]["compressed"].size(), 4u);
  run_well("lockstep plan p.json --nodes 1,2 --link 1,50", directory.path());
  run_well("lockstep simulate linear --nodes 1", directory.path());  // measured first
}

TEST(Simulate, TakesAClusterFromAFile) {
  const TemporaryDirectory directory;
  run_well("lockstep bench step linear --threads 1 --steps 2 --warmup-steps 1 --profile-out p.json", directory.path());
  std::ofstream(directory.path() / "cluster.toml")
      << "nodes = [2, 4]\nranks-per-node = 2\nlink = \"100,5\"\nlocal-link = \"400,2\"\nvariation = \"normal:0.02\"\n";
  const auto outcome = run_well("lockstep simulate p.json --config cluster.toml --json", directory.path());
  EXPECT_EQ(json::parse(outcome.out)["predictions"][1]["ranks"], 8);
}

TEST(Simulate, RefusesWhatItCannotDoInOneLine) {
  const TemporaryDirectory directory;
  run_well("lockstep bench step linear --threads 1 --steps 2 --warmup-steps 1 --profile-out p.json", directory.path());
  std::ofstream(directory.path() / "empty.json") << "";
  std::ofstream(directory.path() / "other.json") << "{\"kind\": \"x\"}";
  for (const BadInput& input : bad_inputs(R"(
2 lockstep
  simulate | MODEL|FILE
  simulate mlpp | mlpp
  simulate p.json | --link
  simulate p.json --nodes 0 | --nodes
  simulate p.json --nodes 2 --link 10 | rate and a latency
  simulate p.json --nodes 1048576 --ranks-per-node 65536 --link 1,1 | 16777216
  simulate p.json --link 10,5 --algorithm rings | rings
  simulate p.json --link 10,5 --variation normal | distribution
  simulate p.json --link 10,5 --slow-ranks 2,2 | share
  simulate p.json --link 10,5 --zero 1 --comm-hook bf16 | --zero
  simulate p.json --link 10,5 --price 3 | --samples
  simulate p.json --link 10,5 --node-mtbf-hours 5 | --checkpoint-seconds
  simulate p.json --link 10,5 --restart-seconds 5 | --node-mtbf-hours
  simulate p.json --link 10,5 --oversubscription 2 | --switch-nodes
  plan p.json --link 10,5 --samples 5 | --samples
  bench step linear --profile-out p.json --comm-hook bf16 | --comm-hook
3 lockstep
  simulate no.json | no.json
  simulate empty.json | not JSON
  simulate other.json | no profile
  simulate p.json --link 10,5 --collectives p.json | allreduce
  simulate p.json --link 10,5 --profiles empty.json | empty.json
  simulate p.json --link 10,5 --html no/where.html | no/where.html
  bench step linear --profile-out no/p.json | no/p.json
)"))
    EXPECT_EQ(lines_of(expect_refused(input, directory.path()).err).size(), 1u) << input.line;
}

}  // namespace
}  // namespace lockstep::testing
