#include "cli/manual.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "base/text.h"
#include "base/version.h"
#include "lockstep/nn/models/models.h"

namespace lockstep::cli {
namespace {

/// The choices of a placeholder such as "auto|yes|no"; none where a value may be anything.
std::vector<std::string> choices_of(const std::string& placeholder) {
  if (placeholder.find('|') == std::string::npos) return {};
  std::vector<std::string> words;
  for (const auto& word : split(placeholder, '|'))
    if (!word.empty() && std::ranges::none_of(word, [](char c) { return c >= 'A' && c <= 'Z'; })) words.push_back(word);
  return words;
}

/// What a positional argument of a subcommand may be, as far as that is known.
std::vector<std::string> words_in_place(const SubcommandText& subcommand) {
  for (const auto& [placeholder, help] : subcommand.positionals) {
    if (placeholder == "MODEL") return nn::model_names();
    if (auto choices = choices_of(placeholder); !choices.empty()) return choices;
  }
  return {};
}

/// Of subcommands of two words ("bench step"), by the first: all second ones.
std::map<std::string, std::vector<std::string>> second_words() {
  std::map<std::string, std::vector<std::string>> all;
  for (const auto& each : texts_of_subcommands())
    if (const auto words = split(each.name, ' '); words.size() > 1) all[words[0]].push_back(words[1]);
  return all;
}

/// In single quotes, for all three shells: '\'' stands for a quote.
std::string quoted_text(const std::string& text) {
  std::string made = "'";
  for (const char c : text) made += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return made + "'";
}

std::string quoted(const std::vector<std::string>& words) { return quoted_text(join(words, " ")); }

/// With each of `characters` after a backslash.
std::string escaped(const std::string& text, std::string_view characters) {
  std::string made;
  for (const char c : text) {
    if (characters.find(c) != std::string_view::npos) made += '\\';
    made += c;
  }
  return made;
}

/// One argument of zsh's _arguments: "--batch=[samples for each rank]:B:_files".
std::string zsh_flag(const SubcommandText::Flag& flag, const std::string& spelling) {
  const bool is_long = spelling.starts_with("--");
  std::string spec = spelling + (flag.placeholder.empty() ? "" : is_long ? "=" : "+");
  spec += fmt::format("[{}]", escaped(flag.help, "[]:"));
  if (flag.placeholder.empty()) return quoted_text(spec);
  const auto choices = choices_of(flag.placeholder);
  return quoted_text(fmt::format("{}:{}:{}", spec, escaped(flag.placeholder, ":"),
                                 choices.empty() ? "_files" : "(" + join(choices, " ") + ")"));
}

}  // namespace

std::string bash_completion() {
  std::vector<std::string> first_words;
  std::string cases, values;
  for (const auto& each : texts_of_subcommands()) {
    const auto words = split(each.name, ' ');
    if (std::ranges::find(first_words, words[0]) == first_words.end()) first_words.push_back(words[0]);
    std::vector<std::string> flags;
    for (const auto& flag : each.flags) {
      flags.insert(flags.end(), flag.spellings.begin(), flag.spellings.end());
      if (const auto choices = choices_of(flag.placeholder); !choices.empty())
        for (const auto& spelling : flag.spellings)
          values += fmt::format("    '{} {}') words={} ;;\n", each.name, spelling, quoted(choices));
    }
    cases += fmt::format("    '{}') flags={} places={} ;;\n", each.name, quoted(flags), quoted(words_in_place(each)));
  }
  std::string seconds;
  for (const auto& [first, words] : second_words())
    seconds += fmt::format("    {}) seconds={} ;;\n", first, quoted(words));
  return fmt::format(R"(# lockstep {version}: completion for bash
_lockstep() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} name=${{COMP_WORDS[1]}} seconds= flags= places= words= i
  COMPREPLY=()
  for ((i = 2; i < COMP_CWORD; ++i)); do  # what follows -- is another program's
    [[ ${{COMP_WORDS[i]}} != -- ]] || {{ compopt -o default; return; }}
  done
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W {subcommands} -- "$word"))
    return
  fi
  case $name in
{seconds}  esac
  if [[ -n $seconds ]]; then
    if ((COMP_CWORD == 2)); then
      COMPREPLY=($(compgen -W "$seconds" -- "$word"))
      return
    fi
    name="$name ${{COMP_WORDS[2]}}"
  fi
  case $name in
{cases}  esac
  case "$name $before" in
{values}  esac
  if [[ -n $words ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
  elif [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$word"))
  elif [[ $before != -* ]]; then
    COMPREPLY=($(compgen -W "$places" -- "$word"))
  fi
  ((${{#COMPREPLY[@]}})) || compopt -o default
}}
complete -F _lockstep lockstep
)",
                     fmt::arg("version", version()), fmt::arg("subcommands", quoted(first_words)),
                     fmt::arg("seconds", seconds), fmt::arg("cases", cases), fmt::arg("values", values));
}

std::string zsh_completion() {
  std::vector<std::string> subcommands;
  std::string cases, seconds;
  std::string before;  // the first word of the one before
  for (const auto& each : texts_of_subcommands()) {
    const auto words = split(each.name, ' ');
    if (words[0] != std::exchange(before, words[0]))
      subcommands.push_back(quoted_text(escaped(words[0], ":") + ":" + each.summary));
    cases += fmt::format("    {})\n      _arguments -S", quoted_text(each.name));
    if (const auto places = words_in_place(each); !places.empty())
      cases += " " + quoted_text(fmt::format("1:{}:({})", escaped(each.positionals[0].first, ":"), join(places, " ")));
    for (const auto& flag : each.flags)
      for (const auto& spelling : flag.spellings) cases += " \\\n        " + zsh_flag(flag, spelling);
    cases += " \\\n        '*:file:_files' ;;\n";
  }
  for (const auto& [first, words] : second_words())
    seconds += fmt::format("    {}) seconds=({}) ;;\n", first, join(words, " "));
  return fmt::format(R"(#compdef lockstep
# lockstep {version}: completion for zsh
_lockstep() {{
  local name=$words[2] i
  local -a seconds
  local -a subcommands=({subcommands})
  for ((i = 2; i < CURRENT; ++i)); do  # what follows -- is another program's
    [[ $words[i] != -- ]] || {{ shift $i words; ((CURRENT -= i)); _normal; return; }}
  done
  if ((CURRENT == 2)); then
    _describe subcommand subcommands
    return
  fi
  case $name in
{seconds}  esac
  if (($#seconds)); then
    if ((CURRENT == 3)); then
      compadd -- $seconds
      return
    fi
    name="$name $words[3]"
    shift words
    ((--CURRENT))
  fi
  shift words
  ((--CURRENT))
  case $name in
{cases}  esac
}}
[[ $funcstack[1] != _lockstep ]] || _lockstep "$@"
)",
                     fmt::arg("version", version()), fmt::arg("subcommands", join(subcommands, " ")),
                     fmt::arg("seconds", seconds), fmt::arg("cases", cases));
}

std::string fish_completion() {
  std::string text = fmt::format(R"(# lockstep {}: completion for fish
function __lockstep_is -d 'Whether these words follow lockstep, and no -- does: what follows that is another program\'s'
  set -l words (commandline -opc)
  contains -- -- $words; and return 1
  set -l last (math 1 + (count $argv))
  test (count $words) -ge $last; and test "$words[2..$last]" = "$argv"
end
function __lockstep_has -d 'How many words there are'
  test (count (commandline -opc)) = $argv[1]
end
)",
                                 version());
  std::string before;
  for (const auto& each : texts_of_subcommands()) {
    const auto words = split(each.name, ' ');
    if (words[0] != std::exchange(before, words[0]))
      text += fmt::format("complete -c lockstep -n '__lockstep_has 1' -f -a {} -d {}\n", words[0],
                          quoted_text(each.summary));
    if (words.size() > 1)
      text += fmt::format("complete -c lockstep -n '__lockstep_is {}; and __lockstep_has 2' -f -a {}\n", words[0],
                          words[1]);
    const std::string condition = fmt::format("-n '__lockstep_is {}'", each.name);
    if (const auto places = words_in_place(each); !places.empty())
      text += fmt::format("complete -c lockstep {} -a {}\n", condition, quoted(places));
    for (const auto& flag : each.flags) {
      text += fmt::format("complete -c lockstep {}", condition);
      for (const auto& spelling : flag.spellings)
        text += spelling.starts_with("--") ? " -l " + spelling.substr(2) : " -s " + spelling.substr(1);
      const auto choices = choices_of(flag.placeholder);
      if (!choices.empty())
        text += " -x -a " + quoted(choices);
      else if (!flag.placeholder.empty())
        text += " -r";
      text += fmt::format(" -d {}\n", quoted_text(flag.help));
    }
  }
  return text;
}

}  // namespace lockstep::cli
