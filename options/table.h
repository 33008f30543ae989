// The flags of one subcommand: their names, values and meanings, and the targets of the values.
#pragma once

#include <concepts>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/settings.h"

namespace lockstep::options {

using lockstep::Complaint;

/// Parses one value and stores it; says what is wrong, or nothing.
using Setter = std::function<std::optional<Complaint>(const std::string& value)>;

/// Where a setting is held, and how it is read from and written as text (options/values.h makes most of them). Only
/// `set` need be there.
struct Binding {
  Setter set;
  std::function<std::string()> text = {};                // as `set` takes it; "default" for none
  std::function<std::optional<Complaint>()> check = {};  // what is wrong with what it holds now
  std::function<bool()> asked = {};                      // it was given, and asks for something

  Binding() = default;
  Binding(Setter setter, std::function<std::string()> as_text, std::function<std::optional<Complaint>()> checker,
          std::function<bool()> was_asked)
      : set(std::move(setter)), text(std::move(as_text)), check(std::move(checker)), asked(std::move(was_asked)) {}
  template <std::invocable<const std::string&> F>
  Binding(F setter) : set(std::move(setter)) {}
};

enum class OptionKind {
  kFlag,        // --quiet; the setter gets "true" or "false"
  kValue,       // --lr 0.1; at most once
  kList,        // --hidden 512,256; commas separate, or a list in a config file; at most once
  kRepeatable,  // --export A --export B,C: a list that each one adds to, joined by commas
};

/// Which runs a setting has an effect on. One that is asked for elsewhere is refused: nothing is taken in silence. What
/// depends on how long a run is or on how many ranks it has is not looked at: the same command is run at several sizes.
struct Applies {
  std::string to = {};  // "GPUs"; empty: to all
  /// What this run is instead ("the model is cnn"); nothing where it has an effect. Called when all values are set.
  std::function<std::optional<std::string>()> unless = {};
  std::string remedy = "leave it out";
  /// Takes the value back where a file or the environment, which serve other subcommands too, has given it.
  std::function<void()> forget = {};
};

/// What the ranks of a job compare before the first step.
enum class Agree {
  kNo,  // each may have its own: paths, patience, what is printed
  kValue,
  kPresence,  // whether it was given
};

/// Plain names: lower case, words joined by '-', no leading dashes. People may write '_' for '-'.
struct Option {
  std::string name;                        // at least two letters
  std::vector<std::string> synonyms = {};  // may be one letter: "n"
  OptionKind kind = OptionKind::kValue;
  std::string placeholder = {};   // "B", "constant|cosine|step"; empty for flags
  std::string help = {};          // a few words, with the unit
  std::string default_text = {};  // "32"; empty: none worth a mention
  Binding value;
  Applies applies = {};
  Agree agree = Agree::kNo;
  /// A run that resumes may have another value, which is logged.
  bool may_change = false;
  /// What checkpoints call it that only the same run resumes from; empty: they do not compare it.
  std::string identity = {};
  /// The value of which they do not speak: the one of all checkpoints that were written before there was a choice.
  std::string not_in_identity = {};
};

/// A flag that people know from another program (torchrun, horovodrun, mpirun, PyTorch's examples) and that is none
/// here. It is in no help, and refused with what to type, unless it asks for what is done anyway.
struct OtherProgramsFlag {
  std::vector<std::string> names;  // as an option's
  std::string why;                 // "one command starts all hosts"
  std::string remedy;              // "name them: --hosts a:4,b:4"
  bool takes_value = true;
  std::function<bool(const std::string& value)> is_done_anyway = {};  // of one that takes none, `value` is empty
};

struct Positional {
  std::string placeholder;  // "MODEL"
  std::string help;
  Binding value;
  bool repeats = false;  // of the last one: there may be more of it, and each is set
};

/// Why an option that was asked for has no effect, and what to do; nothing where it has one.
std::optional<Complaint> inapplicable(const Option& option);

inline constexpr const char* kProgramWords = "PROGRAM ARGS…";

/// Filled once, then only read. The setters' targets must outlive it. Not thread-safe while it is being filled.
class OptionTable {
 public:
  /// `subcommand` is "train"; `about` says in one or two sentences what it does.
  OptionTable(std::string subcommand, std::string about);

  /// Options that follow belong under this heading of the help text.
  void group(std::string title);
  void add(Option option);
  void add(OtherProgramsFlag flag);
  void positional(Positional positional);
  /// The subcommand takes "-- PROGRAM ARGS…", or words of another kind, which help names so.
  void takes_program(std::string words = kProgramWords) { program_words_ = std::move(words); }
  /// At most one of these may be given by one source; a stronger source's silences a weaker one's.
  void exclusive(std::vector<std::string> names);
  /// The option with this name or synonym, '_' or '-'; nullptr if there is none.
  const Option* find(std::string_view name) const;
  /// nullptr: nobody is known to have one of this name, '_' or '-'.
  const OtherProgramsFlag* find_elsewhere(std::string_view name) const;
  /// All names and synonyms.
  std::vector<std::string> names() const;
  /// Names that `name` excludes.
  std::vector<std::string> excluded_by(std::string_view name) const;

  /// Throws UsageError for the first option with a value out of range, or set where it has no effect: for callers that
  /// fill the targets without text.
  void check() const;
  /// Makes it the table of a program of its own called `program`, which fills the positionals itself and has no options
  /// of these names.
  void become_program(std::string program, std::string about, const std::set<std::string>& without);

  const std::string& subcommand() const { return subcommand_; }
  /// What people type: "lockstep train", or the program's name.
  const std::string& command() const { return command_; }
  const std::vector<Option>& options() const { return options_; }
  const std::vector<Positional>& positionals() const { return positionals_; }
  bool accepts_program() const { return !program_words_.empty(); }
  const std::string& program_words() const { return program_words_; }

  /// What --help prints: at most 100 columns wide, ends with a newline.
  std::string help() const;

 private:
  struct Group {
    std::string title;
    std::size_t first;  // index of its first option
  };
  std::string subcommand_;
  std::string command_;
  std::string about_;
  std::vector<Option> options_;
  std::vector<OtherProgramsFlag> elsewhere_;
  std::vector<Group> groups_;
  std::vector<Positional> positionals_;
  std::vector<std::vector<std::string>> exclusive_;
  std::string program_words_;
};

/// For Applies::unless: what this run is instead, where a setting has no effect.
inline std::optional<std::string> when(bool elsewhere, std::string instead) {
  return elsewhere ? std::optional(std::move(instead)) : std::nullopt;
}

/// "batch_size" → "batch-size".
std::string with_dashes(std::string_view name);

/// "global-batch" → "LOCKSTEP_GLOBAL_BATCH".
std::string environment_name(std::string_view name);

struct NormalisedArgs {
  std::vector<std::string> words;    // "--batch=64", "--quiet", "cnn": a flag and its value are one word
  std::vector<std::string> program;  // everything after the first "--", untouched
  bool has_program = false;          // there was a "--"
};

/// Flags, typed with one dash or two, get two, '-' for '_' and their canonical name; the value of a flag that takes one
/// is joined to it by '=', also when it is a negative number or "-". A flag whose value is missing stays alone. Flags
/// that `table` does not know are passed on for the parser to complain about.
NormalisedArgs normalise(const OptionTable& table, std::span<const std::string> args);

}  // namespace lockstep::options
