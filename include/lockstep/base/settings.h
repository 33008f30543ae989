// Settings by name: what a model family, an optimizer, a schedule or a data set lets users choose, declared once in its
// own file, and the values that were given.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace lockstep {

/// One value. Whole numbers are held as std::int64_t, others as double; a word is one of a few choices, or any text.
class SettingValue {
 public:
  using Any = std::variant<bool, std::int64_t, double, std::vector<std::int64_t>, std::vector<double>, std::string>;

  SettingValue(bool value) : any_(value) {}
  template <std::integral T>
  requires(!std::same_as<T, bool>) SettingValue(T value) : any_(static_cast<std::int64_t>(value)) {}
  SettingValue(double value) : any_(value) {}
  SettingValue(std::string word) : any_(std::move(word)) {}
  SettingValue(const char* word) : any_(std::string(word)) {}
  SettingValue(std::vector<std::int64_t> values) : any_(std::move(values)) {}
  SettingValue(std::vector<double> values) : any_(std::move(values)) {}
  SettingValue(std::initializer_list<int> values) : any_(std::vector<std::int64_t>(values.begin(), values.end())) {}
  SettingValue(std::initializer_list<double> values) : any_(std::vector<double>(values)) {}

  const Any& any() const { return any_; }
  friend bool operator==(const SettingValue&, const SettingValue&) = default;

 private:
  Any any_;
};

/// As a command line would have it: "true", "12", "0.5", "512,256", "0.9,0.999", "tanh".
std::string to_string(const SettingValue& value);

/// Values by name. The getters are for names that hold a value of that kind (else InternalError). What they and find()
/// return stays until that name is set again or the settings end.
class Settings {
 public:
  Settings() = default;
  Settings(std::initializer_list<std::pair<const std::string, SettingValue>> values) : values_(values) {}

  void set(const std::string& name, SettingValue value) { values_.insert_or_assign(name, std::move(value)); }
  bool has(const std::string& name) const { return values_.contains(name); }
  /// nullptr: there is none.
  const SettingValue* find(const std::string& name) const;

  bool flag(const std::string& name) const { return get<bool>(name); }
  std::int64_t integer(const std::string& name) const { return get<std::int64_t>(name); }
  double number(const std::string& name) const { return get<double>(name); }
  const std::string& word(const std::string& name) const { return get<std::string>(name); }
  const std::vector<std::int64_t>& integers(const std::string& name) const {
    return get<std::vector<std::int64_t>>(name);
  }
  const std::vector<double>& numbers(const std::string& name) const { return get<std::vector<double>>(name); }

  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }
  bool empty() const { return values_.empty(); }
  friend bool operator==(const Settings&, const Settings&) = default;

 private:
  template <class T>
  const T& get(const std::string& name) const;

  std::map<std::string, SettingValue> values_;
};

/// A condition beside the choice of the family under which a setting has an effect. Its texts are literals: they are
/// not copied.
struct SettingNeed {
  const char* what = nullptr;                    // "a momentum above 0"; nullptr: none
  const char* otherwise = nullptr;               // "the momentum is 0"
  bool (*holds)(const Settings& all) = nullptr;  // of the family's settings, defaults included
};

/// One setting, as its family declares it.
struct SettingSpec {
  /// The meaning of a setting, for code that does not know its name.
  enum class Role {
    kStructure,       // of what is computed and saved: files hold it, and a run that resumes cannot change it
    kTraining,        // how it is trained; a run that resumes may change it
    kInitialValues,   // of parameters that start from random values
    kSampleElements,  // numbers of a sample, which the data say
    kClasses,         // classes, which the data say
    kTokens,          // tokens of a sample
    kTolerance,       // a tolerance: a rank's own
    kAugmentation,    // how samples are changed at random: of training alone; a run that resumes cannot change it
  };
  static constexpr double kMost = std::numeric_limits<double>::max();

  std::string name;       // of the flag, without dashes, and in files
  SettingValue fallback;  // where nothing is given; its kind is the setting's
  std::string help;       // a few words, with the unit
  Role role = Role::kStructure;
  double low = 0, high = kMost;                  // of a number, or of each in a list
  bool open_low = false, open_high = false;      // the bound itself is not allowed
  std::string placeholder = "N";                 // "N", "X", "yes|no"; flags have none
  std::string default_text = {};                 // for help; empty: `fallback`
  std::size_t least_many = 0, most_many = 1024;  // of a list
  std::vector<std::string> choices = {};         // of a word; empty: any text
  std::vector<std::string> synonyms = {};        // other spellings of the flag
  std::optional<SettingValue> neutral = {};  // asks for nothing, so it is accepted where it has no effect; false is so
  SettingNeed need = {};
  bool is_flag = true;  // false: only files say it
};

/// The fault of a value ("not a number") and the remedy ("give a finite number"). Code that knows the value's place
/// makes an error of it.
struct Complaint {
  std::string what;
  std::string remedy;
};

/// Nothing: `value` is of this setting's kind and within its ranges.
std::optional<Complaint> complaint_about(const SettingSpec& spec, const SettingValue& value);
/// Whether `value`, which may have no effect where it is given, asks for nothing.
bool asks_for_nothing(const SettingSpec& spec, const SettingValue& value);

/// `given`, and the fallbacks of those that are not. Throws UsageError, naming `whose` ("optimizer sgd"), for a name
/// that is not declared, a value of another kind and one out of range.
Settings resolve(std::span<const SettingSpec> specs, const Settings& given, const std::string& whose);

/// Throws UsageError for a `what` ("optimizer") that nobody knows, with the nearest of `names`, or all of them.
[[noreturn]] void throw_unknown(const std::string& what, const std::string& name, std::span<const std::string> names);

/// Throws UsageError for a `what` ("model") whose name cannot be typed: of letters, digits, dots, '-' and '_'.
void check_family_name(const std::string& what, const std::string& name);
/// Throws UsageError: there is a `what` with this name, which cannot be replaced.
[[noreturn]] void throw_second(const std::string& what, const std::string& name);

/// The families of one kind, in the order of help texts: lockstep's own, and those that a program adds. A family has
/// one `name`, or several `names()`; no two have the same.
template <class Family>
class Registry {
 public:
  /// `what` they are, for errors: "optimizer". `families` live as long as the process.
  Registry(std::string what, std::vector<const Family*> families)
      : what_(std::move(what)), families_(std::move(families)) {}
  Registry(const Registry&) = delete;
  Registry& operator=(const Registry&) = delete;

  const std::vector<const Family*>& all() const { return families_; }

  /// Of all families.
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto* family : families_)
      for (auto& name : names_of(*family)) all.push_back(std::move(name));
    return all;
  }

  /// nullptr: there is none of that name.
  const Family* find(std::string_view name) const {
    for (const auto* family : families_)
      for (const auto& one : names_of(*family))
        if (one == name) return family;
    return nullptr;
  }

  /// Throws as throw_unknown() does.
  const Family& named(const std::string& name) const {
    if (const auto* family = find(name)) return *family;
    throw_unknown(what_, name, names());
  }

  /// Adds a program's own: at the end, or in the place of an earlier one of its own with the same names. It lives as
  /// long as the registry, as the replaced one does. Before threads read the registry. Throws as check_family_name()
  /// and throw_second() do.
  void add(Family family) {
    const auto names = names_of(family);
    const Family* replaced = nullptr;
    for (const auto& name : names) {
      check_family_name(what_, name);
      const Family* const other = find(name);
      if (other == nullptr) continue;
      if (!is_own(other) || names_of(*other) != names) throw_second(what_, name);
      replaced = other;
    }
    const Family* const added = &own_.emplace_back(std::move(family));
    const auto place = std::find(families_.begin(), families_.end(), replaced);
    if (place != families_.end())
      *place = added;
    else
      families_.push_back(added);
  }

 private:
  static std::vector<std::string> names_of(const Family& family) {
    if constexpr (requires { family.names(); })
      return family.names();
    else
      return {family.name};
  }
  bool is_own(const Family* family) const {
    return std::any_of(own_.begin(), own_.end(), [&](const Family& one) { return &one == family; });
  }

  const std::string what_;
  std::vector<const Family*> families_;
  std::deque<Family> own_;  // where it grows, families stay where they are
};

/// The one of `specs` with that name; nullptr: there is none.
const SettingSpec* find_setting(std::span<const SettingSpec> specs, std::string_view name);

}  // namespace lockstep
