// The flags of one subcommand: their names, what they take, what they mean and where their values go.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::cli {

/// What is wrong with a value ("not a number") and what would be right ("give a finite number"). Whoever knows where
/// the value stood makes an error of it.
struct Complaint {
  std::string what;
  std::string remedy;
};

/// Parses one value and stores it; says what is wrong, or nothing.
using Setter = std::function<std::optional<Complaint>(const std::string& value)>;

enum class OptionKind {
  kFlag,        // --quiet; the setter gets "true" or "false"
  kValue,       // --lr 0.1; at most once
  kList,        // --hidden 512,256; commas separate, or a list in a config file; at most once
  kRepeatable,  // --export A --export B,C: a list that each one adds to, joined by commas
};

/// Plain names: lower case, words joined by '-', no leading dashes. People may write '_' for '-'.
struct Option {
  std::string name;                        // at least two letters
  std::vector<std::string> synonyms = {};  // may be one letter: "n"
  OptionKind kind = OptionKind::kValue;
  std::string placeholder = {};   // "B", "constant|cosine|step"; empty for flags
  std::string help = {};          // a few words, with the unit
  std::string default_text = {};  // "32"; empty: none worth telling
  Setter set;
};

struct Positional {
  std::string placeholder;  // "MODEL"
  std::string help;
  Setter set;
};

/// Filled once, then only read. The setters' targets must outlive it. Not thread-safe while it is being filled.
class OptionTable {
 public:
  /// `subcommand` is "train"; `about` says in one or two sentences what it does.
  OptionTable(std::string subcommand, std::string about);

  /// Options that follow belong under this heading of the help text.
  void group(std::string title);
  void add(Option option);
  void positional(Positional positional);
  /// The subcommand takes "-- PROGRAM ARGS…".
  void takes_program() { takes_program_ = true; }
  /// At most one of these may be given by one source; a stronger source's silences a weaker one's.
  void exclusive(std::vector<std::string> names);
  /// Says of an option that was given, once all setters have run, why it would have no effect, or nothing. `typed`: on
  /// the command line, which is for this subcommand alone, as an environment or a file may not be.
  using Applicability = std::function<std::optional<Complaint>(const std::string& name, bool typed)>;
  void applicability(Applicability check) { applicability_ = std::move(check); }

  /// The option with this name or synonym, '_' or '-'; nullptr if there is none.
  const Option* find(std::string_view name) const;
  /// All names and synonyms.
  std::vector<std::string> names() const;
  /// Names that `name` excludes.
  std::vector<std::string> excluded_by(std::string_view name) const;

  const Applicability& applicability() const { return applicability_; }

  const std::string& subcommand() const { return subcommand_; }
  const std::vector<Option>& options() const { return options_; }
  const std::vector<Positional>& positionals() const { return positionals_; }
  bool accepts_program() const { return takes_program_; }

  /// What --help prints: at most 100 columns wide, ends with a newline.
  std::string help() const;

 private:
  struct Group {
    std::string title;
    std::size_t first;  // index of its first option
  };
  std::string subcommand_;
  std::string about_;
  std::vector<Option> options_;
  std::vector<Group> groups_;
  std::vector<Positional> positionals_;
  std::vector<std::vector<std::string>> exclusive_;
  Applicability applicability_;
  bool takes_program_ = false;
};

}  // namespace lockstep::cli
