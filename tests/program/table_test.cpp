// Tables and arrays through the whole program: trained on, evaluated, predicted from; on any number of ranks, and
// resumed.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/text.h"
#include "tests/program/command.h"
#include "tests/program/events.h"

namespace lockstep::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

/// Rows of which 'price' follows from the others.
std::string cars(int rows = 400) {
  std::string text = "id,maker,power,price\n";
  for (int i = 0; i < rows; ++i) {
    const int maker = i * 7 % 3, power = i * 11 % 6 + 1;
    text += fmt::format("{},{},{},{}\n", i,
                        maker == 0   ? "Fiat"
                        : maker == 1 ? "\"Kia, K\""
                                     : "Opel",
                        i % 19 == 0 ? "" : fmt::to_string(power), 1000 * (power + 4 * maker));
  }
  return text;
}

const std::string kTrainCars =
    "lockstep train tabular --data table:cars.csv --target price --ignore id --threads 1 --global-batch 40 --lr 0.01 "
    "--hidden 16 ";

TEST(TablesAndArrays, ARegressionIsMeasuredInTheTargetsUnits) {
  const TemporaryDirectory directory;
  directory.write("cars.csv", cars());
  const Metrics metrics = metrics_of(kTrainCars + "--epochs 30 --save-best mae --save w.safetensors", directory.path());
  const auto& last = metrics.evaluations.back();
  EXPECT_TRUE(last["accuracy"].is_null());
  EXPECT_GT(last["r2"], 0.8);
  EXPECT_LT(last["mae"], 2000);
  EXPECT_LE(last["mae"], last["rmse"]);
  EXPECT_EQ(metrics.final["best"]["metric"], "mae");
  const Outcome eval = run_well(
      "lockstep eval tabular --threads 1 --weights w.safetensors --data table:cars.csv --split val --batch 40 "
      "--metrics e.jsonl",  // in batches of training's size: others may round differently
      directory.path());
  EXPECT_THAT(eval.out, AllOf(HasSubstr("MAE "), HasSubstr("R² ")));
  EXPECT_EQ(events_of(directory.path() / "e.jsonl", "eval").back()["mae"], metrics.final["best"]["value"]);
}

TEST(TablesAndArrays, AnyNumberOfRanksComesToTheSame) {
  const TemporaryDirectory directory;
  directory.write("cars.csv", cars(97));
  const std::string shards = kTrainCars + "--epochs 2 --shards 4 --tail drop ";
  const Metrics one = metrics_of(shards, directory.path());
  for (const int ranks : {2, 3}) {
    const Metrics several = metrics_of(on_ranks(ranks) + shards, directory.path());
    EXPECT_EQ(several.final["params_sha256"], one.final["params_sha256"]) << ranks;
    EXPECT_EQ(several.evaluations.back()["r2"], one.evaluations.back()["r2"]) << ranks;
  }
}

TEST(TablesAndArrays, TwoClassesHaveAnAreaUnderTheCurve) {
  const TemporaryDirectory directory;
  std::string text = "x;plan;left\n";
  for (int i = 0; i < 300; ++i)
    text += fmt::format("{};{};{}\n", i * 7 % 10, i % 2 ? "a" : "b", i * 7 % 10 > 4 ? "yes" : "no");
  directory.write("c.csv", text);
  const std::string line =
      "lockstep train tabular --data table:c.csv --target left --threads 1 --global-batch 30 --epochs 4 --hidden 8 ";
  const Metrics one = metrics_of(line + "--save-best auc --save w.safetensors", directory.path());
  EXPECT_GT(one.evaluations.back()["auc"], 0.9);
  const auto auc_on = [&](int ranks) {
    run_well(
        on_ranks(ranks) +
            "lockstep eval tabular --threads 1 --weights w.safetensors --data table:c.csv --batch 8 --metrics e.jsonl",
        directory.path());
    return events_of(directory.path() / "e.jsonl", "eval").back()["auc"];
  };
  EXPECT_EQ(auc_on(1), auc_on(3));
  const Outcome report = run_well(
      "lockstep eval tabular --threads 1 --weights w.safetensors --data table:c.csv --report", directory.path());
  EXPECT_THAT(report.out, AllOf(HasSubstr("AUC "), HasSubstr("300 of 300 samples"), HasSubstr("macro mean")));
  const auto lines = lines_of(
      run_well("lockstep infer tabular --weights w.safetensors --input c.csv --batch 7 --quiet", directory.path()).out);
  ASSERT_EQ(lines.size(), 301u);
  EXPECT_EQ(lines[0], "x;plan;left;prediction;probability");
  EXPECT_THAT(lines[2], StartsWith("7;a;yes;yes;"));
}

TEST(TablesAndArrays, PredictionsKeepTheOtherColumns) {
  const TemporaryDirectory directory;
  directory.write("cars.csv", cars());
  run_well(kTrainCars + "--epochs 30 --save w.safetensors", directory.path());
  directory.write("new.csv", "power,note,maker,prediction\n3,\"a \"\"b\"\"\",\"Kia, K\",x\n,,Dacia,y\n");
  const std::string line = "lockstep infer tabular --weights w.safetensors --quiet --input ";
  const auto lines = lines_of(run_well(line + "new.csv", directory.path()).out);
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0], "power,note,maker,prediction,prediction_");
  EXPECT_THAT(lines[1], StartsWith("3,\"a \"\"b\"\"\",\"Kia, K\",x,"));
  const double price = parse_double(lines[1].substr(lines[1].rfind(',') + 1)).value();
  EXPECT_NEAR(price, 7000, 1500);
  EXPECT_EQ(run_well("cat new.csv | " + line + "-", directory.path()).out,
            run_well(line + "new.csv", directory.path()).out);
  const auto rows = lines_of(run_well(line + "new.csv --json", directory.path()).out);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_NEAR(json_in(rows[0])["prediction"], price, 0.1);
  directory.write("less.csv", "power,note\n3,a\n");
  EXPECT_THAT(run(line + "less.csv", directory.path()), fails_with(3, "lacks the column 'maker'"));
  EXPECT_THAT(run("lockstep infer tabular --weights w.safetensors --input random:1x1", directory.path()),
              fails_with(2, "for a model of tables with categories"));
  directory.write("words.csv", "power,maker\nthree,Opel\n");
  EXPECT_THAT(run(line + "words.csv", directory.path()), fails_with(3, "line 2: 'three' is no number"));
}

TEST(TablesAndArrays, EvaluationsListWhatIsPredicted) {
  const TemporaryDirectory directory;
  directory.write("cars.csv", cars(41));
  run_well(kTrainCars + "--epochs 20 --save w.safetensors", directory.path());
  const std::string eval = "lockstep eval tabular --threads 1 --weights w.safetensors --data table:cars.csv --batch 4 ";
  const auto printed = json_in(run_well(eval + "--json --predictions p.csv", directory.path()).out);
  const auto lines = lines_of(read_file(directory.path("p.csv")));
  ASSERT_EQ(lines.size(), 42u);
  EXPECT_EQ(lines[0], "sample,truth,prediction");
  EXPECT_THAT(lines[1], StartsWith("0,1000,"));
  double error = 0;
  for (std::size_t i = 1; i < lines.size(); ++i) {
    const auto fields = split(lines[i], ',');
    error += std::abs(parse_double(fields[1]).value() - parse_double(fields[2]).value()) / 41;
  }
  EXPECT_NEAR(printed["mae"], error, 1e-2);
  EXPECT_EQ(printed["of"], 41);
  const auto quantiles = json_in(lines_of(run_well(eval + "--json --report", directory.path()).out).at(1));
  EXPECT_LE(quantiles["p50"], quantiles["p90"]);
  EXPECT_GE(quantiles["max"], printed["mae"]);
  EXPECT_THAT(run_well(eval + "--report", directory.path()).out, HasSubstr("mean error "));
  run_well(on_ranks(3) + eval + "--predictions p3.csv", directory.path());
  // Ranks have other batches, and a row's bits may depend on how many are computed with it.
  const auto of_ranks = lines_of(read_file(directory.path("p3.csv")));
  ASSERT_EQ(of_ranks.size(), lines.size());
  for (std::size_t i = 1; i < lines.size(); ++i) {
    const std::size_t prediction = lines[i].rfind(',') + 1;
    EXPECT_EQ(of_ranks[i].substr(0, prediction), lines[i].substr(0, prediction));
    EXPECT_NEAR(parse_double(of_ranks[i].substr(prediction)).value(), parse_double(lines[i].substr(prediction)).value(),
                1e-2);
  }
  EXPECT_THAT(run(eval + "--predictions p.txt", directory.path()), fails_with(2, "its name says no format"));
  EXPECT_THAT(run(eval + "--predictions cars.csv", directory.path()),
              fails_with(2, "would overwrite the file of --data"));
}

TEST(TablesAndArrays, PredictionsOfClassesHaveProbabilities) {
  const TemporaryDirectory directory;
  run_well("lockstep train linear --data digits --threads 1 --steps 20 --save w.safetensors", directory.path());
  const std::string eval = "lockstep eval linear --threads 1 --weights w.safetensors --data digits ";
  const auto printed = lines_of(run_well(eval + "--json --report --predictions p.jsonl", directory.path()).out);
  ASSERT_EQ(printed.size(), 2u);
  const auto events = events_of(read_file(directory.path("p.jsonl")));
  ASSERT_EQ(events.size(), 360u);
  double right = 0;
  for (const auto& event : events) {
    double sum = 0;
    for (const double probability : event["probabilities"]) {
      sum += probability;
      EXPECT_LE(probability, event["probability"]);
    }
    EXPECT_NEAR(sum, 1, 1e-9);
    right += event["truth"] == event["prediction"] ? 1 : 0;
  }
  EXPECT_NEAR(json_in(printed[0])["accuracy"], right / 360, 1e-9);
  EXPECT_EQ(json_in(printed[1])["classes"].size(), 10u);
}

TEST(TablesAndArrays, AResumedRunKnowsItsData) {
  const TemporaryDirectory directory;
  directory.write("cars.csv", cars());
  const std::string whole = metrics_of(kTrainCars + "--epochs 2", directory.path()).final["params_sha256"];
  run_well(kTrainCars + "--steps 9 --checkpoint-dir c --checkpoint-every 9", directory.path());
  EXPECT_EQ(
      metrics_of(kTrainCars + "--epochs 2 --checkpoint-dir c --resume auto", directory.path()).final["params_sha256"],
      whole);
  std::string other = cars();
  other.replace(other.find(",1000\n"), 6, ",1001\n");
  directory.write("cars.csv", other);
  EXPECT_THAT(run(kTrainCars + "--epochs 3 --checkpoint-dir c --resume auto", directory.path()),
              fails_with(6, "is of other data"));
}

TEST(TablesAndArrays, CategoriesAloneAreEnough) {
  const TemporaryDirectory directory;
  std::string text = "a,b,target\n";
  for (int i = 0; i < 200; ++i)
    text += fmt::format("{},{},{}\n", i % 2 ? "p" : "q", i % 3 ? "r" : "s", (i % 2) ^ (i % 3 ? 1 : 0));
  directory.write("t.csv", text);
  const Metrics metrics = metrics_of(
      "lockstep train tabular --data table:t.csv --threads 1 --global-batch 20 --epochs 8 --lr 0.01 --save "
      "w.safetensors",
      directory.path());
  EXPECT_EQ(metrics.final["accuracy"], 1);
  EXPECT_THAT(
      run_well("lockstep eval tabular --threads 1 --weights w.safetensors --data table:t.csv", directory.path()).out,
      HasSubstr("accuracy 100.00 %"));
}

}  // namespace
}  // namespace lockstep::testing
