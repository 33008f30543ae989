#include "cli/manual.h"

#include "base/text.h"
#include "base/version.h"

namespace lockstep::cli {
namespace {

/// As roff takes text: no character of it is a request.
std::string roff(const std::string& text) {
  std::string made;
  for (const char c : text) {
    if (c == '\\')
      made += "\\e";
    else if (c == '-')
      made += "\\-";
    else if (c == '\n')
      made += ' ';
    else
      made += c;
  }
  return !made.empty() && (made[0] == '.' || made[0] == '\'') ? "\\&" + made : made;
}

constexpr const char* kExitCodes[][2] = {
    {"0", "done"},
    {"2", "wrong usage"},
    {"3", "bad or missing input data"},
    {"4", "no such device, or the device or network failed"},
    {"5", "timed out or out of step with another rank"},
    {"6", "checkpoint unusable"},
    {"7", "training diverged (non-finite loss)"},
    {"75", "checkpointed on request: run the same command again"},
    {"128+n", "ended by signal n"},
};

}  // namespace

SubcommandText text_of(const options::OptionTable& table, const std::string& first_word, const std::string& summary) {
  SubcommandText text{.name = table.subcommand().empty() ? first_word : table.subcommand(),
                      .summary = summary,
                      .positionals = {},
                      .flags = {},
                      .program_words = table.program_words()};
  for (const auto& positional : table.positionals())
    text.positionals.emplace_back(positional.placeholder, positional.help);
  for (const auto& option : table.options()) {
    SubcommandText::Flag flag{.spellings = {"--" + option.name},
                              .placeholder = option.placeholder,
                              .help = option.help,
                              .default_text = option.default_text};
    for (const auto& synonym : option.synonyms) flag.spellings.push_back((synonym.size() > 1 ? "--" : "-") + synonym);
    text.flags.push_back(std::move(flag));
  }
  text.flags.push_back(
      {.spellings = {"--help", "-h"}, .placeholder = "", .help = "shows the flags", .default_text = ""});
  return text;
}

std::string manual() {
  std::string text = fmt::format(
      ".TH LOCKSTEP 1 \"\" \"lockstep {}\" \"User Commands\"\n.SH NAME\nlockstep \\- data\\-parallel training: one "
      "process per "
      "device, all in lockstep\n.SH SYNOPSIS\n",
      roff(version()));
  const auto all = texts_of_subcommands();
  for (const auto& each : all) {
    text += fmt::format(".B lockstep {}\n", roff(each.name));
    for (const auto& [placeholder, help] : each.positionals) text += fmt::format(".I {}\n", roff(placeholder));
    text += each.program_words.empty() ? "[flags]\n.br\n"
                                       : fmt::format("[flags] \\-\\- {}\n.br\n", roff(each.program_words));
  }
  text += ".SH DESCRIPTION\n";
  for (const auto& each : all) {
    text += fmt::format(".SS lockstep {}\n{}.\n", roff(each.name), roff(each.summary));
    for (const auto& [placeholder, help] : each.positionals)
      text += fmt::format(".TP\n.I {}\n{}\n", roff(placeholder), roff(help));
    for (const auto& flag : each.flags)
      text += fmt::format(".TP\n.B {}{}\n{}{}\n", roff(join(flag.spellings, ", ")),
                          flag.placeholder.empty() ? "" : " \\fI" + roff(flag.placeholder) + "\\fR", roff(flag.help),
                          flag.default_text.empty() ? "" : roff(fmt::format(" (default {})", flag.default_text)));
  }
  text +=
      ".SH FILES AND ENVIRONMENT\nEvery flag can also stand in a TOML file (\\-\\-config FILE, as \"flag\\-name = "
      "value\") and "
      "in the environment (LOCKSTEP_FLAG_NAME). The command line wins over the environment, and the environment over "
      "the file.\n.SH EXIT STATUS\n";
  for (const auto& [code, meaning] : kExitCodes) text += fmt::format(".TP\n.B {}\n{}\n", code, roff(meaning));
  return text;
}

}  // namespace lockstep::cli
