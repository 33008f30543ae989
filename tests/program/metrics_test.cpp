// Every field of a metrics file is in docs/metrics.md, and the other way round.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "tests/program/command.h"
#include "tests/program/events.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;

using Fields = std::map<std::string, std::set<std::string>>;  // by event

/// The names in backquotes of the first column, under the heading of each event.
Fields documented() {
  Fields fields;
  std::ifstream in(fs::path(LOCKSTEP_SOURCE_DIR) / "docs/metrics.md");
  std::string event;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("## `")) event = line.substr(4, line.rfind('`') - 4);
    if (!line.starts_with("| `")) continue;
    const std::string column = line.substr(0, line.find('|', 1));
    for (std::size_t at = column.find('`'); at != std::string::npos; at = column.find('`', at + 1)) {
      const std::size_t end = column.find('`', at + 1);
      fields[event].insert(column.substr(at + 1, end - at - 1));
      at = end;
    }
  }
  return fields;
}

void add_fields(const fs::path& path, Fields& fields) {
  for (const auto& event : events_of(read_file(path)))
    for (const auto& [name, value] : event.items())
      if (name != "event") fields[event["event"]].insert(name);
}

TEST(MetricsFile, HasTheDocumentedFields) {
  const TemporaryDirectory directory;
  const auto in = [&](const char* name) { return directory.path() / name; };
  fs::create_directories(in(".git/refs/heads"));
  directory.write(".git/HEAD", "ref: refs/heads/main\n");
  directory.write(".git/refs/heads/main", "0123456789abcdef0123456789abcdef01234567\n");
  std::string numbers = "a,b,y\n", classes = numbers;
  for (int row = 0; row < 40; ++row) {
    numbers += fmt::format("{},{},{}.5\n", row, row % 2 == 0 ? "x" : "y", 3 * row);
    classes += fmt::format("{},{},{}\n", row, row % 3 == 0 ? "x" : "y", row % 2 == 0 ? "u" : "v");
  }
  directory.write("numbers.csv", numbers);
  directory.write("classes.csv", classes);
  directory.write("run.toml", "lr = 0.01\n");
  Fields written;
  const std::string line = on_ranks(2) +
                           "lockstep train cnn --data digits --threads 1 --global-batch 256 --ema 0.9 --save-best loss "
                           "--save w.safetensors --comm-hook bf16 --checkpoint-dir c --quiet --metrics m.jsonl "
                           "--config run.toml ";
  run_well(line + "--epochs 1", directory.path());
  run_well(
      "LOCKSTEP_ATTEMPT=1 LOCKSTEP_RESTART_CAUSE=why LOCKSTEP_SEED=7 " + line + "--epochs 2 --seed 1 --resume auto",
      directory.path());
  add_fields(in("m.jsonl"), written);
  const auto runs = events_of(in("m.jsonl"), "run");
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_THAT(runs[0]["command"].get<std::string>(), ::testing::StartsWith("lockstep train cnn --data digits"));
  EXPECT_EQ(runs[0]["settings"]["lr"], (nlohmann::json{{"value", "0.01"}, {"from", "run.toml:1"}}));
  EXPECT_EQ(runs[0]["settings"]["seed"]["from"], "default");
  EXPECT_EQ(runs[1]["settings"]["seed"]["from"], "command line");
  EXPECT_EQ(runs[0]["ranks"].size(), 2u);
  EXPECT_EQ(runs[0]["git"]["branch"], "main");
  EXPECT_EQ(runs[0]["data_sha256"], runs[1]["data_sha256"]);
  const std::string table = "lockstep train tabular --threads 1 --batch 4 --tail drop --epochs 2 --quiet --metrics ";
  run_well(table + "n.jsonl --data table:numbers.csv --target y", directory.path());
  run_well(table + "k.jsonl --data table:classes.csv --target y", directory.path());
  fs::remove_all(in(".git"));
  directory.write(".git", "x\n");                        // no repository, and no reason to stop
  directory.write("rare.csv", classes + "40,x,rare\n");  // of which one of the parts has none
  run_well(table + "r.jsonl --data table:rare.csv --target y", directory.path());
  const auto warnings = events_of(in("r.jsonl"), "warning");
  ASSERT_FALSE(warnings.empty());
  EXPECT_THAT(warnings.back()["text"].get<std::string>(), ::testing::HasSubstr("has no sample of 'rare'"));
  add_fields(in("n.jsonl"), written);
  add_fields(in("k.jsonl"), written);
  add_fields(in("r.jsonl"), written);

  const OnTwoProcessors few;  // a rank with more computes all its shards at a time
  run_well("PATH=$(dirname " FAULTY_PROGRAM
           "):$PATH; LOCKSTEP_TEST_FAULT=slow:1:30 lockstep launch -n 2 -- "
           "faulty --steps 20 --batch 8 --shards 8 --balance auto --audit 0.5 --quiet --metrics b.jsonl",
           directory.path());
  add_fields(in("b.jsonl"), written);
  run_well("PATH=$(dirname " FAULTY_PROGRAM
           "):$PATH; LOCKSTEP_TEST_FAULT=unreadable:1 lockstep launch -n 2 -- faulty --steps 15 --on-bad-batch skip "
           "--quiet --metrics s.jsonl",
           directory.path());
  add_fields(in("s.jsonl"), written);

  run_well("PATH=$(dirname " FAULTY_PROGRAM
           "):$PATH; LOCKSTEP_TEST_FAULT=nan:1 lockstep launch -n 2 -- faulty --steps 15 --on-divergence rewind "
           "--checkpoint-dir rewound --checkpoint-every 5 --quiet --metrics w.jsonl",
           directory.path());
  add_fields(in("w.jsonl"), written);

  Fields wanted = documented();
  ASSERT_EQ(wanted.size(), 12u);
  for (const auto& [event, names] : written)
    for (const auto& name : names) EXPECT_TRUE(wanted[event].contains(name)) << event << ": " << name;
  // Of GPUs.
  for (const char* event : {"step", "final"})
    for (const char* scaled : {"loss_scale", "good_steps", "skipped_steps"}) EXPECT_EQ(wanted[event].erase(scaled), 1u);
  for (const auto& [event, names] : wanted)
    for (const auto& name : names) EXPECT_TRUE(written[event].contains(name)) << event << ": " << name;
}

}  // namespace
}  // namespace lockstep::testing
