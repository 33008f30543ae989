// What a package says of the program: all flags, in a form that roff and shells take.
#include "cli/manual.h"

#include <gmock/gmock.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "tests/support/temporary_directory.h"

namespace lockstep::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

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
TEST(Manual, LinesAreValidRoff) {
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

struct Shell {
  const char* name;
  std::string (*completion)();
  // Prints what it proposes for "$1", of which the last word is being typed.
  const char* script;
};

constexpr Shell kShells[] = {
    {"bash", bash_completion,
     R"(source ./_lockstep; compopt() { :; }; COMP_WORDS=($1); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_lockstep; printf '%s\n' "${COMPREPLY[@]}")"},
    // An interactive shell in a terminal of its own; what goes to compadd is what it would list.
    {"zsh", zsh_completion, R"(zmodload zsh/zpty; zpty typed zsh -f -i; touch found
zpty -w typed "PROMPT= RPROMPT=; fpath=($PWD \$fpath); autoload -Uz compinit; compinit -D -u
  compadd() { if [[ \$* == *-[OAD]\ * ]] { builtin compadd \"\$@\" } else {
    local -a hits; builtin compadd -O hits \"\$@\"; print -rl -- \"\$hits[@]\" >>found; builtin compadd \"\$@\" } }
  _ended() { print >ended; compstate[insert]=; compstate[list]= }
  comppostfuncs=(_ended); bindkey '^I' complete-word; print >ready"
for i in {1..1000}; do [[ -f ready ]] && break; sleep 0.01; done
zpty -w -n typed $1$'\t'
for i in {1..1000}; do [[ -f ended ]] && break; sleep 0.01; done
zpty -d typed; sort -u found)"},
    {"fish", fish_completion, R"(source ./_lockstep; complete -C $argv[1] | string replace -r '\t.*' ''; true)"},
};

class Completion : public ::testing::TestWithParam<Shell> {
 protected:
  std::vector<std::string> proposals(const std::string& words) {
    const testing::TemporaryDirectory directory;
    std::ofstream(directory.path() / "_lockstep") << GetParam().completion();
    std::ofstream(directory.path() / "script") << GetParam().script;
    const std::string line = "cd " + directory.path().string() + " && HOME=$PWD " + GetParam().name + " ./script '" +
                             words + "' && rm -f script _lockstep";
    std::FILE* const pipe = ::popen(line.c_str(), "r");
    std::vector<std::string> lines;
    char text[256];
    while (std::fgets(text, sizeof text, pipe) != nullptr)
      if (const std::string one = text; one.size() > 1) lines.push_back(one.substr(0, one.size() - 1));
    EXPECT_EQ(::pclose(pipe), 0) << words;
    return lines;
  }
};

TEST_P(Completion, ProposesSubcommandsFlagsAndChoices) {
  if (std::system(("command -v " + std::string(GetParam().name) + " >/dev/null").c_str()) != 0)
    GTEST_SKIP() << GetParam().name << " is not installed";
  EXPECT_THAT(proposals("lockstep tr"), ElementsAre("train"));
  EXPECT_THAT(proposals("lockstep train --sched"), ElementsAre("--schedule"));
  EXPECT_THAT(proposals("lockstep train mlp --schedule co"), UnorderedElementsAre("constant", "cosine"));
  EXPECT_THAT(proposals("lockstep train resnet1"),
              UnorderedElementsAre("resnet18", "resnet101", "resnet152", "resnet18-cifar"));
  EXPECT_THAT(proposals("lockstep bench st"), ElementsAre("step"));
  EXPECT_THAT(proposals("lockstep bench sc"), ElementsAre("scaling"));
  EXPECT_THAT(proposals("lockstep export o"), ElementsAre("onnx"));
  EXPECT_THAT(proposals("lockstep export onnx llam"), ElementsAre("llama"));
  EXPECT_THAT(proposals("lockstep export onnx llama --outp"), ElementsAre("--output"));
  EXPECT_THAT(proposals("lockstep bench step --graphs n"), ElementsAre("no"));
  EXPECT_THAT(proposals("lockstep checkpoint v"), ElementsAre("verify"));
  EXPECT_THAT(proposals("lockstep launch -n 2 -- program --s"), ElementsAre()) << "another program's";
  EXPECT_THAT(proposals("lockstep train --weights zzz"), ElementsAre()) << "files, which shells have themselves";
}

INSTANTIATE_TEST_SUITE_P(Shells, Completion, ::testing::ValuesIn(kShells),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace lockstep::cli
