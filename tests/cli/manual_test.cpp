// What a package says of the program: all flags, in a form that roff and bash take.
#include "cli/manual.h"

#include <gmock/gmock.h>

#include <cstdio>
#include <fstream>

#include "tests/support/temporary_directory.h"

namespace lockstep::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Manual, HasAllFlagsOfAllSubcommands) {
  const std::string page = manual();
  const auto all = texts_of_subcommands();
  ASSERT_GE(all.size(), 10U);
  for (const auto& each : all)
    for (const auto& flag : each.flags)
      for (const auto& spelling : flag.spellings) {
        std::string escaped;
        for (const char c : spelling) escaped += c == '-' ? std::string("\\-") : std::string(1, c);
        EXPECT_THAT(page, HasSubstr(escaped)) << each.name;
      }
  for (const char* section :
       {".SH NAME", ".SH SYNOPSIS", ".SH DESCRIPTION", ".SH EXIT STATUS", ".SS lockstep bench step"})
    EXPECT_THAT(page, HasSubstr(section));
}

// A line of text that begins with a dot would be a request, and vanish.
TEST(Manual, LinesAreTextOrRequestsThatRoffHas) {
  std::istringstream page(manual());
  std::string line;
  while (std::getline(page, line)) {
    ASSERT_FALSE(line.empty());
    if (line[0] == '.') {
      EXPECT_TRUE(line.starts_with(".TH ") || line.starts_with(".SH ") || line.starts_with(".SS ") || line == ".TP" ||
                  line.starts_with(".B ") || line.starts_with(".I ") || line == ".br")
          << line;
    }
    EXPECT_NE(line[0], '\'');
  }
}

class Completion : public ::testing::Test {
 protected:
  // What bash proposes for these words, of which the last is being typed.
  std::vector<std::string> proposals(const std::string& words) {
    std::ofstream(directory_.path() / "completion") << bash_completion();
    const std::string script =
        "source " + (directory_.path() / "completion").string() + "; compopt() { :; }; COMP_WORDS=(" + words +
        "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _lockstep; printf '%s\\n' \"${COMPREPLY[@]}\"";
    std::ofstream(directory_.path() / "script") << script;
    std::FILE* const pipe = ::popen(("bash --norc " + (directory_.path() / "script").string()).c_str(), "r");
    std::vector<std::string> lines;
    char line[256];
    while (std::fgets(line, sizeof line, pipe) != nullptr)
      if (std::string text = line; text.size() > 1) lines.push_back(text.substr(0, text.size() - 1));
    EXPECT_EQ(::pclose(pipe), 0) << words;
    return lines;
  }

  testing::TemporaryDirectory directory_;
};

TEST_F(Completion, ProposesSubcommandsFlagsAndChoices) {
  EXPECT_THAT(proposals("lockstep tr"), ElementsAre("train"));
  EXPECT_THAT(proposals("lockstep train --sched"), ElementsAre("--schedule"));
  EXPECT_THAT(proposals("lockstep train mlp --schedule co"), ElementsAre("constant", "cosine"));
  EXPECT_THAT(proposals("lockstep train resnet1"), ElementsAre("resnet18", "resnet101", "resnet152", "resnet18-cifar"));
  EXPECT_THAT(proposals("lockstep bench s"), ElementsAre("step"));
  EXPECT_THAT(proposals("lockstep bench step --graphs n"), ElementsAre("no"));
  EXPECT_THAT(proposals("lockstep checkpoint v"), ElementsAre("verify"));
  EXPECT_THAT(proposals("lockstep launch -n 2 -- program --s"), ElementsAre()) << "another program's";
  EXPECT_THAT(proposals("lockstep train --weights ''"), ElementsAre()) << "files, which bash has itself";
}

}  // namespace
}  // namespace lockstep::cli
