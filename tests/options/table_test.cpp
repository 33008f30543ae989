#include "options/table.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "cli/commands.h"
#include "launcher/options.h"
#include "tests/options/example_table.h"
#include "trainer/options.h"

namespace lockstep::options {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::size_t columns(const std::string& line) {
  return static_cast<std::size_t>(
      std::count_if(line.begin(), line.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

TEST(OptionTable, FindsNamesSynonymsAndUnderscores) {
  Example example;
  const OptionTable table = example_table(example);
  for (const char* name : {"global-batch", "global_batch"}) {
    ASSERT_NE(table.find(name), nullptr) << name;
    EXPECT_EQ(table.find(name)->name, "global-batch");
  }
  ASSERT_NE(table.find("n"), nullptr);
  EXPECT_EQ(table.find("n")->name, "np");
  EXPECT_EQ(table.find("global"), nullptr);
  EXPECT_EQ(table.find(""), nullptr);
}

TEST(OptionTable, RefusesASecondOptionOfTheSameName) {
  Example example;
  OptionTable table = example_table(example);
  EXPECT_THROW(table.add({.name = "batch", .value = text(example.save)}), InternalError);
  EXPECT_THROW(table.add({.name = "batch-size", .value = text(example.save)}), InternalError);
  EXPECT_THROW(table.add({.name = "other", .synonyms = {"n"}, .value = text(example.save)}), InternalError);
  EXPECT_THROW(table.exclusive({"batch", "nothing"}), InternalError);
}

TEST(OptionTable, Exclusion) {
  Example example;
  const OptionTable table = example_table(example);
  EXPECT_THAT(table.excluded_by("batch"), ElementsAre("global-batch"));
  EXPECT_THAT(table.excluded_by("lr"), IsEmpty());
}

TEST(OptionTable, HelpShowsNamesDefaultsAndGroups) {
  Example example;
  const std::string help = example_table(example).help();
  EXPECT_THAT(help, HasSubstr("Usage: lockstep example MODEL [flags] -- PROGRAM"));
  EXPECT_THAT(help, HasSubstr("\nSizes\n  --batch B"));
  EXPECT_THAT(help, HasSubstr("samples (default 32); also --batch-size"));
  EXPECT_THAT(help, HasSubstr("  -n, --np N"));
  EXPECT_THAT(help, HasSubstr("  --quiet"));
  EXPECT_THAT(help, Not(HasSubstr("(default )")));
}

TEST(OptionTable, HelpFitsAHundredColumns) {
  trainer::TrainConfig config;
  launcher::LaunchOptions options;
  bool json = false;
  for (const std::string& help : {trainer::train_options(config).help(), cli::launch_options(options).help(),
                                  cli::version_options(json).help()}) {
    for (const auto& line : split(help, '\n')) {
      EXPECT_LE(columns(line), 100u) << line;
      EXPECT_FALSE(line.ends_with(' ')) << line;
    }
  }
}

TEST(OptionTable, LongHelpIsWrappedUnderItself) {
  std::string sink;
  OptionTable table("x", "About.");
  table.add({.name = "flag",
             .placeholder = "X",
             .help = std::string(60, 'a') + " " + std::string(60, 'b'),
             .value = text(sink)});
  EXPECT_THAT(table.help(), HasSubstr(std::string(60, 'a') + "\n" + std::string(34, ' ') + std::string(60, 'b')));
}

}  // namespace
}  // namespace lockstep::options
