#include "options/sources.h"

#include <gmock/gmock.h>
#include <sys/stat.h>
#include <cstdlib>

#include <filesystem>
#include <fstream>
#include <map>

#include "base/error.h"
#include "tests/options/example_table.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::options {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class OptionSources : public ::testing::Test {
 protected:
  /// Writes a config file, which `args` may then name.
  std::string config(const std::string& content) { return directory_.write("run.toml", content); }

  /// Parses "m ARGS…" into example_.
  ParsedOptions parse(std::vector<std::string> args, const std::map<std::string, std::string>& environment = {}) {
    args.insert(args.begin(), "m");
    return parse_exactly(std::move(args), environment);
  }

  ParsedOptions parse_exactly(std::vector<std::string> args,
                              const std::map<std::string, std::string>& environment = {}) {
    Sources sources{.args = std::move(args),
                    .env = [&](const std::string& name) -> std::optional<std::string> {
                      const auto at = environment.find(name);
                      return at == environment.end() ? std::nullopt : std::optional(at->second);
                    },
                    .environment_names = {}};
    for (const auto& [name, value] : environment) sources.environment_names.push_back(name);
    example_ = Example();
    return parse_options(example_table(example_, takes_program_), sources, {{"log-dir", "launch"}, {"tail", "train"}});
  }

  /// The line that a user would see.
  std::string complaint(std::vector<std::string> args, const std::map<std::string, std::string>& environment = {}) {
    try {
      parse(std::move(args), environment);
    } catch (const UsageError& error) {
      EXPECT_THAT(error.line(), Not(HasSubstr("\n")));
      EXPECT_FALSE(error.remedy().empty()) << error.what();
      return error.line();
    }
    ADD_FAILURE() << "nothing was thrown";
    return "";
  }

  testing::TemporaryDirectory directory_;
  Example example_;
  bool takes_program_ = true;
};

TEST_F(OptionSources, UnsetOptionsKeepTheirDefaults) {
  parse({});
  EXPECT_EQ(example_.model, "m");
  EXPECT_EQ(example_.lr, 0.5);
  EXPECT_FALSE(example_.batch);
}

TEST_F(OptionSources, TheCommandLineWinsThenTheEnvironmentThenTheFile) {
  const std::string file = config("lr = 1\nsteps = 1\nnp = 1\n");
  const std::map<std::string, std::string> environment = {{"LOCKSTEP_LR", "2"}, {"LOCKSTEP_STEPS", "2"}};
  parse({"--lr", "3", "--config", file}, environment);
  EXPECT_EQ(example_.lr, 3);
  EXPECT_EQ(example_.steps, 2);
  EXPECT_EQ(example_.ranks, 1);
}

TEST_F(OptionSources, TheFileMayBeNamedInTheEnvironment) {
  parse({}, {{"LOCKSTEP_CONFIG", config("lr = 1\n")}});
  EXPECT_EQ(example_.lr, 1);
}

TEST_F(OptionSources, EverySourceKnowsSynonymsAndBothDashes) {
  parse({"--batch_size=8"});
  EXPECT_EQ(example_.batch, 8);
  parse({}, {{"LOCKSTEP_BATCH_SIZE", "9"}});
  EXPECT_EQ(example_.batch, 9);
  parse({"--config", config("batch-size = 10")});
  EXPECT_EQ(example_.batch, 10);
  parse({"--config", config("batch_size = 11")});
  EXPECT_EQ(example_.batch, 11);
}

TEST_F(OptionSources, TomlTypes) {
  parse({"--config",
         config("lr = 1e-3\nquiet = true\noptimizer = 'sgd'\nbetas = [0.8, 0.9]\nhidden = [5, 6]\nsteps = 1_0\n")});
  EXPECT_EQ(example_.lr, 1e-3);
  EXPECT_TRUE(example_.quiet);
  EXPECT_EQ(example_.optimizer, "sgd");
  EXPECT_THAT(example_.settings.numbers("betas"), ElementsAre(0.8, 0.9));
  EXPECT_THAT(example_.settings.integers("hidden"), ElementsAre(5, 6));
  EXPECT_EQ(example_.steps, 10);
}

TEST_F(OptionSources, AFlagCanBeTurnedOffAgain) {
  parse({"--quiet=false", "--config", config("quiet = true")});
  EXPECT_FALSE(example_.quiet);
}

TEST_F(OptionSources, NegativeNumbers) {
  parse({"--lr", "-0.25"});
  EXPECT_EQ(example_.lr, -0.25);
}

TEST_F(OptionSources, OnlyRepeatableOptionsAppend) {
  parse({"--export", "A,B", "--export=C", "--config", config("export = ['D']")});
  EXPECT_EQ(example_.exports, "A,B,C");
  parse({"--config", config("export = ['D', 'E']")});
  EXPECT_EQ(example_.exports, "D,E");
  EXPECT_THAT(complaint({"--hidden", "1,2", "--hidden=3"}),
              AllOf(HasSubstr("--hidden is given twice on the command line, as 1,2 and 3"), HasSubstr("one list")));
  parse({"--hidden", "1,2", "--config", config("hidden = [9]")});
  EXPECT_THAT(example_.settings.integers("hidden"), ElementsAre(1, 2));
}

TEST_F(OptionSources, AListInAFileIsForWhatTakesLists) {
  for (const char* line : {"lr = [1]", "lr = [1, 2]", "quiet = [true]", "save = ['a', 'b']", "lr = []"})
    EXPECT_THAT(complaint({"--config", config(line)}),
                AllOf(HasSubstr("run.toml:1: "), HasSubstr("is a list, and --"), HasSubstr("without brackets")))
        << line;
  EXPECT_THAT(complaint({"--config", config("hidden = [[1]]")}), HasSubstr("neither text"));
}

TEST_F(OptionSources, InapplicableOptionsNameTheirSource) {
  EXPECT_THAT(complaint({"-n", "3"}, {{"LOCKSTEP_OPTIMIZER", "sgd"}}),
              HasSubstr("--np 3 on the command line: it applies to others, and this is sgd → leave it out"));
  EXPECT_THAT(complaint({"--opt=sgd"}, {{"LOCKSTEP_NP", "3"}}),
              HasSubstr("LOCKSTEP_NP=3 in the environment: it applies"));
  const std::string file = config("optimizer = 'sgd'\nnp = 3\n");
  EXPECT_THAT(complaint({"--config", file}), HasSubstr(file + ":2: np = 3: it applies"));
  // All values count, whatever their order and source.
  parse({"--config", file, "--optimizer", "adamw"});
  EXPECT_EQ(example_.ranks, 3);
  // What was not typed may be meant for others.
  EXPECT_THAT(complaint({"--seed", "3"}), HasSubstr("--seed 3 on the command line: it applies"));
  EXPECT_NO_THROW(parse({}, {{"LOCKSTEP_SEED", "3"}}));
}

TEST_F(OptionSources, AFlagThatIsSwitchedOffExcludesNothing) {
  EXPECT_THAT(complaint({"--quiet", "--save", "a"}), HasSubstr("exclude each other"));
  parse({"--quiet=false", "--save", "a"});
  EXPECT_EQ(example_.save, "a");
  parse({"--quiet=no", "--config", config("save = 'b'")});
  EXPECT_EQ(example_.save, "b");
}

TEST_F(OptionSources, AStrongerSourceSilencesWhatItsFlagExcludes) {
  parse({"--batch", "4", "--config", config("global-batch = 64")});
  EXPECT_EQ(example_.batch, 4);
  EXPECT_FALSE(example_.global_batch);
  EXPECT_THAT(complaint({"--batch", "4", "--global-batch", "64"}), HasSubstr("--batch and --global-batch exclude"));
}

TEST_F(OptionSources, TheProgramIsPassedOn) {
  EXPECT_THAT(parse({"-n", "2", "--", "prog", "--batch_size"}).program, ElementsAre("prog", "--batch_size"));
  takes_program_ = false;
  EXPECT_THAT(complaint({"--", "prog"}), HasSubstr("takes no program"));
}

TEST_F(OptionSources, HelpGoesBeforeEverythingElse) {
  EXPECT_TRUE(parse({"--bach", "--help"}).help);
  EXPECT_TRUE(parse_exactly({"-h"}).help);
  EXPECT_FALSE(parse({"--", "prog", "--help"}).help);
  EXPECT_THAT(complaint({"--bach", "--", "--help"}), HasSubstr("--bach"));
}

TEST_F(OptionSources, UnknownFlagsNameTheNearest) {
  EXPECT_THAT(complaint({"--bach", "64"}),
              AllOf(HasSubstr("unknown flag --bach"), HasSubstr("command line"), HasSubstr("→ did you mean --batch?")));
  EXPECT_THAT(complaint({"--optimiser=sgd"}), HasSubstr("did you mean --optimizer?"));
  EXPECT_THAT(complaint({"--batch-sizes=1"}), HasSubstr("did you mean --batch?"));
  EXPECT_THAT(complaint({"--entirely-different"}), HasSubstr("lockstep example --help"));
  EXPECT_THAT(complaint({"-x"}), HasSubstr("unknown flag --x"));
  EXPECT_THAT(complaint({"---"}), HasSubstr("unknown flag"));
  EXPECT_THAT(complaint({"--=3"}), HasSubstr("unknown flag"));
  EXPECT_THAT(complaint({"--ba tch=3"}), HasSubstr("unknown flag --ba tch"));
  EXPECT_THAT(complaint({"--tail=exact"}), HasSubstr("it is a flag of lockstep train"));
}

TEST_F(OptionSources, UnknownVariablesNameTheNearest) {
  EXPECT_THAT(complaint({}, {{"LOCKSTEP_BACH", "64"}}),
              AllOf(HasSubstr("environment variable LOCKSTEP_BACH"), HasSubstr("did you mean LOCKSTEP_BATCH?")));
  EXPECT_THAT(complaint({}, {{"LOCKSTEP_", "64"}}), HasSubstr("LOCKSTEP_ matches no flag"));
}

TEST_F(OptionSources, ReservedAndUnrelatedVariablesAreAccepted) {
  parse({}, {{"LOCKSTEP_JOB", "/x"},
             {"LOCKSTEP_LAUNCHER", "1"},
             {"LOCKSTEP_MEETING", "4f"},
             {"LOCKSTEP_HOST_NAME", "a"},
             {"LOCKSTEP_SOCKET_IFNAME", "eth"},
             {"LOCKSTEP_TEST_X", ""},
             {"LOCKSTEP_LOG_DIR", ""}});
  EXPECT_EQ(example_.lr, 0.5);
}

TEST_F(OptionSources, UnknownKeysNameFileLineAndTheNearest) {
  const std::string file = config("# comment\nlog-dir = 'x'\nbach = 64\n");
  EXPECT_THAT(complaint({"--config", file}),
              AllOf(HasSubstr(file + ":3: unknown key bach"), HasSubstr("did you mean batch?")));
  EXPECT_THAT(complaint({"--config", config("[train]\nlr = 1\n")}), HasSubstr("top level"));
}

TEST_F(OptionSources, BadValuesNameTheirSource) {
  EXPECT_THAT(complaint({"--lr", "fast"}), HasSubstr("--lr fast on the command line: not a finite number"));
  EXPECT_THAT(complaint({"--batch-size", "0"}), AllOf(HasSubstr("--batch 0"), HasSubstr("from 1 to 1000")));
  EXPECT_THAT(complaint({"--quiet=perhaps"}), HasSubstr("--quiet perhaps"));
  EXPECT_THAT(complaint({}, {{"LOCKSTEP_LR", "fast"}}), HasSubstr("LOCKSTEP_LR=fast in the environment: not a"));
  const std::string file = config("lr = 'fast'");
  EXPECT_THAT(complaint({"--config", file}), HasSubstr(file + ":1: lr = fast: not a"));
  EXPECT_THAT(complaint({"--optimizer", "sdg"}), HasSubstr("did you mean sgd?"));
}

TEST_F(OptionSources, MissingValues) {
  EXPECT_THAT(complaint({"--lr"}), HasSubstr("--lr on the command line: the value is missing → give X"));
  EXPECT_THAT(complaint({"--lr", "--quiet"}), HasSubstr("the value is missing"));
  EXPECT_THAT(complaint({"--save="}), HasSubstr("the value is missing"));
  EXPECT_THAT(complaint({"--config"}), HasSubstr("the value is missing"));
  EXPECT_THAT(complaint({}, {{"LOCKSTEP_SAVE", ""}}), HasSubstr("LOCKSTEP_SAVE"));
}

TEST_F(OptionSources, TwiceInOneSource) {
  EXPECT_THAT(complaint({"--batch", "3", "--batch_size=4"}),
              HasSubstr("--batch is given twice on the command line, as 3 and 4"));
  EXPECT_THAT(complaint({"--quiet", "--quiet"}), HasSubstr("--quiet is given twice"));
  EXPECT_THAT(complaint({}, {{"LOCKSTEP_BATCH", "1"}, {"LOCKSTEP_BATCH_SIZE", "1"}}),
              AllOf(HasSubstr("LOCKSTEP_BATCH "), HasSubstr("LOCKSTEP_BATCH_SIZE")));
  EXPECT_THAT(complaint({"--config", config("batch = 1\nbatch_size = 2")}), HasSubstr(":2: batch_size sets --batch"));
}

TEST_F(OptionSources, Positionals) {
  EXPECT_THAT(complaint({"extra"}), AllOf(HasSubstr("unexpected argument 'extra'"), HasSubstr("put --")));
  takes_program_ = false;
  EXPECT_THAT(complaint({"extra"}), HasSubstr("takes one MODEL"));
  EXPECT_THROW(parse_exactly({}), UsageError);
  EXPECT_THROW(parse_exactly({""}), UsageError);
  parse_exactly({"--quiet", "cnn", "--lr=1"});
  EXPECT_EQ(example_.model, "cnn");
}

TEST_F(OptionSources, UnusableFiles) {
  EXPECT_THAT(complaint({"--config", directory_.path("none.toml")}), HasSubstr("No such file"));
  EXPECT_THAT(complaint({"--config", directory_.path()}), HasSubstr("is a directory"));
  const std::string broken = config("lr = 1\nsteps = = 2\n");
  EXPECT_THAT(complaint({"--config", broken}), HasSubstr(broken + ":2:"));
  EXPECT_THAT(complaint({"--config", config("lr = 2020-01-01")}), HasSubstr(":1: lr is neither"));
  EXPECT_THAT(complaint({"--config", config("config = 'x'")}), HasSubstr("cannot name another"));
  EXPECT_THAT(complaint({"--config", config("lr = \xff\xfe")}), HasSubstr("run.toml:1:"));
  EXPECT_THAT(complaint({"--config", config(std::string(2 << 20, ' '))}), HasSubstr("larger than 1 MiB"));
  EXPECT_THAT(complaint({"--config", config("lr = nan")}), HasSubstr("not a finite number"));
}

TEST_F(OptionSources, APipeIsNoConfigFile) {
  const std::string pipe = directory_.path("pipe.toml");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(complaint({"--config", pipe}), HasSubstr("cannot read config file " + pipe + ": not a regular file"));
  EXPECT_THAT(complaint({"--config", "/dev/null"}), HasSubstr("not a regular file"));
}

TEST_F(OptionSources, EmptyFileSetsNothing) {
  parse({"--config", config("")});
  EXPECT_EQ(example_.lr, 0.5);
}

TEST_F(OptionSources, VeryLongArguments) {
  const std::string text(100'000, 'x');
  parse({"--save", text});
  EXPECT_EQ(example_.save, text);
  EXPECT_LT(complaint({"--lr", text}).size(), 300u);
  EXPECT_LT(complaint({"--" + text}).size(), 300u);
  parse({"--save", "two\nlines"});
  EXPECT_EQ(example_.save, "two\nlines");
}

}  // namespace
}  // namespace lockstep::options
