// The manual page and the completions of shells, which packages install, and what both are made of: the tables of
// flags.
#pragma once

#include <string>
#include <vector>

#include "options/table.h"

namespace lockstep::cli {

/// What they need of a table, which does not outlive its setters' targets.
struct SubcommandText {
  struct Flag {
    std::vector<std::string> spellings;  // "--batch", "--batch-size", "-n"
    std::string placeholder, help, default_text;
  };
  std::string name;                                              // "bench step"
  std::string summary;                                           // of the first word
  std::vector<std::pair<std::string, std::string>> positionals;  // placeholder and help
  std::vector<Flag> flags;
  std::string program_words;  // that follow "--", where there may be some: "PROGRAM ARGS…"
};
SubcommandText text_of(const options::OptionTable& table, const std::string& first_word, const std::string& summary);
/// Of all subcommands, in the order of the overview.
std::vector<SubcommandText> texts_of_subcommands();

/// lockstep(1), for man.
std::string manual();

// Completions.

/// For bash: source it, or have it as /usr/share/bash-completion/completions/lockstep.
std::string bash_completion();
/// For zsh: _lockstep in a directory of $fpath, /usr/share/zsh/vendor-completions say.
std::string zsh_completion();
/// For fish: /usr/share/fish/vendor_completions.d/lockstep.fish.
std::string fish_completion();

}  // namespace lockstep::cli
