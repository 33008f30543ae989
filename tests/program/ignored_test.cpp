// --ignore-index: what it leaves out is as if it were not there, on any number of ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/splitmix.h"
#include "tests/program/command.h"
#include "tests/program/events.h"

namespace lockstep::testing {
namespace {

constexpr int kRowNumbers = 5, kRowClasses = 3;

template <class T>
std::string npy(const std::string& type, const std::string& shape, const std::vector<T>& values) {
  std::string header = "{'descr': '" + type + "', 'fortran_order': False, 'shape': " + shape + ", }";
  header.resize((10 + header.size() + 64) / 64 * 64 - 11, ' ');
  header += '\n';
  const auto length = static_cast<std::uint16_t>(header.size());
  std::string file = "\x93NUMPY\x01";
  file += '\0';
  file += static_cast<char>(length & 0xff);
  file += static_cast<char>(length >> 8);
  file += header;
  file.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  return file;
}

struct Rows {
  std::vector<float> x;
  std::vector<std::int64_t> y;

  void add(int number, std::int64_t label) {
    for (int f = 0; f < kRowNumbers; ++f)
      x.push_back(static_cast<float>(mix64(static_cast<std::uint64_t>(number), static_cast<std::uint64_t>(f)) % 1000) /
                      500 -
                  1);
    y.push_back(label);
  }
  void write(const std::filesystem::path& directory, const std::string& name) const {
    const std::string rows = std::to_string(y.size());
    write_file(directory / ("x" + name), npy("<f4", "(" + rows + ", " + std::to_string(kRowNumbers) + ")", x));
    write_file(directory / ("y" + name), npy("<i8", "(" + rows + ",)", y));
  }
};

std::int64_t label_of(int number) {
  return static_cast<std::int64_t>(mix64(static_cast<std::uint64_t>(number), 99) % kRowClasses);
}

/// whole.npy: 200 rows, of which every third counts, and the first is such a one; kept.npy: those alone.
void write_rows(const std::filesystem::path& directory, std::int64_t ignored) {
  Rows whole, kept;
  for (int i = 0; i < 200; ++i) {
    whole.add(i, i % 3 == 0 ? label_of(i) : ignored);
    if (i % 3 == 0) kept.add(i, label_of(i));
  }
  whole.write(directory, "whole.npy");
  kept.write(directory, "kept.npy");
}

constexpr const char* kWhole = " --data npy:xwhole.npy,ywhole.npy --ignore-index ";

// Of all rows at once: the loss, which is a mean over those that count, its gradient, by what it does to the next
// losses, and accuracy.
TEST(Ignored, RowsAreAsIfTheyWereNotThere) {
  for (const std::int64_t ignored : {-100, 255, 3}) {
    const TemporaryDirectory directory;
    write_rows(directory.path(), ignored);
    // Weights of all rows that count, after which both are evaluated.
    run_well("lockstep train mlp --hidden 8 --data npy:xkept.npy,ykept.npy --steps 20 --quiet --save w.safetensors",
             directory.path());
    const auto evaluate = [&](const std::string& data) {
      const auto outcome = run_well("lockstep eval mlp --weights w.safetensors --json" + data, directory.path());
      return json_in(outcome.out);
    };
    const auto kept = evaluate(" --data npy:xkept.npy,ykept.npy");
    const auto whole = evaluate(kWhole + std::to_string(ignored));
    EXPECT_NEAR(whole["loss"].get<double>(), kept["loss"].get<double>(), 1e-6);
    EXPECT_NEAR(whole["accuracy"].get<double>(), kept["accuracy"].get<double>(), 1e-9);
    const auto report = run_well(
        "lockstep eval mlp --weights w.safetensors --report" + (kWhole + std::to_string(ignored)), directory.path());
    EXPECT_THAT(report.out, ::testing::HasSubstr("67"));
    EXPECT_THAT(run("lockstep eval mlp --weights w.safetensors --data npy:xkept.npy,ykept.npy --ignore-index -7",
                    directory.path()),
                fails_with(2, "--ignore-index -7 for", "whose labels are 0 to 2"));
    EXPECT_THAT(
        run("lockstep eval mlp --weights w.safetensors --data npy:xwhole.npy,ywhole.npy", directory.path()).code,
        ::testing::Ne(0));
  }
}

struct Result {
  std::string params;
  std::vector<double> losses;
  friend bool operator==(const Result&, const Result&) = default;
};

Result result_of(const std::string& line, const std::filesystem::path& directory) {
  run_well(line + " --quiet --metrics m.jsonl", directory);
  const Metrics metrics = read_metrics(directory / "m.jsonl");
  std::filesystem::remove(directory / "m.jsonl");
  return {metrics.final["params_sha256"], metrics.losses};
}

// Ranks have different numbers of rows that count, some of them none; the mean is over those of all.
TEST(Ignored, RanksShardsDevicesAndPartsAgree) {
  const TemporaryDirectory directory;
  write_rows(directory.path(), -100);
  const std::string line =
      "lockstep train mlp --hidden 8 --optimizer sgd --lr 0.1 --label-smoothing 0.1 --class-weights 1,2,3 "
      "--global-batch 14 --epochs 3" +
      (kWhole + std::string("-100"));
  const Result one = result_of(line, directory.path());
  ASSERT_EQ(one.losses.size(), 39u);
  for (const std::string& other : {on_ranks(2) + line, on_ranks(3) + line + " --workers 2", on_ranks(7) + line,
                                   on_ranks(2) + line + " --accumulate 3", line + " --parallel dp --device cpu:0,1"}) {
    const Result result = result_of(other, directory.path());
    ASSERT_EQ(result.losses.size(), one.losses.size());
    for (std::size_t i = 0; i < one.losses.size(); ++i)
      EXPECT_NEAR(result.losses[i], one.losses[i], 2e-5 * one.losses[i]) << other << ", step " << i + 1;
  }
  const Result shards = result_of(line + " --shards 7", directory.path());
  for (const int ranks : {2, 3, 7})
    EXPECT_TRUE(result_of("lockstep launch -n " + std::to_string(ranks) + " -- " + line + " --shards 7",
                          directory.path()) == shards)
        << ranks;
}

// As the rows that count alone, in one step per epoch.
TEST(Ignored, TrainingIsThatOfTheOthers) {
  const TemporaryDirectory directory;
  // 100 rows that count, and as many that do not, in blocks of ten, of which each holds one out.
  Rows whole, kept;
  for (int block = 0; block < 10; ++block)
    for (int i = 0; i < 10; ++i) kept.add(10 * block + i, label_of(10 * block + i));
  whole = kept;
  for (int i = 100; i < 200; ++i) whole.add(i, -100);
  whole.write(directory.path(), "whole.npy");
  kept.write(directory.path(), "kept.npy");
  const std::string line = "lockstep train mlp --hidden 8 --optimizer sgd --lr 0.2 --epochs 8 --global-batch ";
  const Result alone = result_of(line + "90 --data npy:xkept.npy,ykept.npy", directory.path());
  const Result both = result_of(on_ranks(3) + line + "180" + kWhole + "-100", directory.path());
  ASSERT_EQ(both.losses.size(), alone.losses.size());
  for (std::size_t i = 0; i < alone.losses.size(); ++i) EXPECT_NEAR(both.losses[i], alone.losses[i], 1e-5) << i;
}

TEST(Ignored, StepsWithoutTargetsMoveNothing) {
  const TemporaryDirectory directory;
  Rows rows;
  for (int i = 0; i < 40; ++i) rows.add(i, i % 13 == 0 ? i % 2 : -1);
  rows.write(directory.path(), "whole.npy");
  const std::string line =
      on_ranks(2) + "lockstep train mlp --hidden 8 --optimizer sgd --global-batch 3 --epochs 1" + kWhole + "-1";
  const Result result = result_of(line, directory.path());
  ASSERT_EQ(result.losses.size(), 12u);
  int none = 0;
  for (const double loss : result.losses) {
    EXPECT_TRUE(std::isfinite(loss));
    none += loss == 0 ? 1 : 0;
  }
  EXPECT_GE(none, 8);
  EXPECT_LE(none, 11);
}

TEST(Ignored, ARunResumesWithTheSame) {
  const TemporaryDirectory directory;
  write_rows(directory.path(), -100);
  const std::string line =
      "lockstep train mlp --hidden 8 --global-batch 14 --shards 7 --threads 1" + (kWhole + std::string("-100 "));
  const Result whole = result_of(line + "--steps 12", directory.path());
  const std::string resumes = line + "--checkpoint-dir c --checkpoint-every 0 --resume auto --steps ";
  result_of(on_ranks(2) + resumes + "5", directory.path());
  EXPECT_EQ(result_of(resumes + "12", directory.path()).params, whole.params);

  const std::string digits = "lockstep train mlp --hidden 8 --data digits --quiet --checkpoint-dir d --resume auto ";
  run_well(digits + "--steps 2 --ignore-index 3", directory.path());
  EXPECT_THAT(run(digits + "--steps 3 --ignore-index 4", directory.path()),
              fails_with(6, "ignored label 3 there and 4 here"));
}

}  // namespace
}  // namespace lockstep::testing
