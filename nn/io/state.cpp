#include "lockstep/nn/io/state.h"

#include <fmt/ranges.h>
#include <fnmatch.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "base/scope.h"
#include "base/text.h"
#include "lockstep/nn/models/models.h"
#include "nn/io/other_names.h"

namespace lockstep::nn {
namespace {

std::vector<std::int64_t> file_shape(const Tensor& value, FileLayout layout) {
  const Shape& s = value.shape();
  if (layout == FileLayout::kOhwiToOihw) {
    std::vector<std::int64_t> shape = {s[0], s[s.size() - 1]};
    shape.insert(shape.end(), s.dims().begin() + 1, s.dims().end() - 1);
    return shape;
  }
  if (layout == FileLayout::kTransposed) return {s[1], s[0]};
  return {s.dims().begin(), s.dims().end()};
}

// Exchanges the last two axes of (O, rows, columns) f32: between (O, H·W, I) in memory and (O, I, H·W) in files.
std::vector<std::byte> swapped(std::span<const std::byte> from, std::int64_t outer, std::int64_t rows,
                               std::int64_t columns) {
  std::vector<std::byte> to(from.size());
  constexpr std::size_t kFloat = sizeof(float);
  for (std::int64_t o = 0; o < outer; ++o)
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < columns; ++c)
        std::memcpy(to.data() + static_cast<std::size_t>((o * columns + c) * rows + r) * kFloat,
                    from.data() + static_cast<std::size_t>((o * rows + r) * columns + c) * kFloat, kFloat);
  return to;
}

/// Kernel positions of a convolution's weight.
std::int64_t places_of(const Shape& s) { return s.size() == 3 ? s[1] : s[1] * s[2]; }
std::int64_t inputs_of(const Shape& s) { return s[s.size() - 1]; }

struct Target {
  const Tensor* value;
  Backend* backend;
  FileLayout layout;
  Parameter* parameter = nullptr;  // of which it is the value; nullptr: of none
};

HostTensor to_host(const std::string& name, const Target& target) {
  const Tensor& value = *target.value;
  const Shape& s = value.shape();
  HostTensor host{name, value.dtype(), file_shape(value, target.layout), std::vector<std::byte>(value.bytes())};
  target.backend->download(value, host.bytes);
  if (target.layout == FileLayout::kOhwiToOihw) host.bytes = swapped(host.bytes, s[0], places_of(s), inputs_of(s));
  if (target.layout == FileLayout::kTransposed) host.bytes = swapped(host.bytes, 1, s[0], s[1]);
  return host;
}

void from_host(const HostTensor& host, const Target& target) {
  const Shape& s = target.value->shape();
  if (target.layout == FileLayout::kOhwiToOihw)
    target.backend->upload(swapped(host.bytes, s[0], inputs_of(s), places_of(s)), *target.value);
  else if (target.layout == FileLayout::kTransposed)
    target.backend->upload(swapped(host.bytes, 1, s[1], s[0]), *target.value);
  else
    target.backend->upload(host.bytes, *target.value);
}

Target target_of(const NamedParameter& named) {
  return {&named.parameter->value(), &named.parameter->backend(), named.parameter->layout(), named.parameter};
}
Target target_of(const NamedBuffer& named) { return {named.tensor, named.backend, FileLayout::kSame}; }

constexpr std::string_view kWrapper = "module.", kCompiled = "_orig_mod.";
// Takes `part` off where all names begin so, but for those that are `alone`. Whether it did.
bool take_off(std::vector<std::string>& names, std::string_view part,
              const std::vector<FileNames::Renaming>& alone = {}) {
  const auto has_it = [&](const std::string& name) { return name.starts_with(part); };
  const auto is_alone = [&](const std::string& name) {
    return std::ranges::find(alone, name, &FileNames::Renaming::first) != alone.end();
  };
  if (!std::ranges::any_of(names, has_it) ||
      !std::ranges::all_of(names, [&](const std::string& name) { return has_it(name) || is_alone(name); }))
    return false;
  for (std::string& name : names)
    if (has_it(name)) name.erase(0, part.size());
  return true;
}

bool starts_with_one_of(const std::string& name, const std::vector<std::string>& starts) {
  return std::ranges::any_of(starts, [&](const std::string& start) { return name.starts_with(start); });
}

// Names of files, as the families of models say that they are.
void rename(std::vector<std::string>& names) {
  for (const auto* family : model_families()) {
    const FileNames& known = family->file_names;
    if (known.known_by.empty()) continue;
    if (!known.wrapper.empty()) take_off(names, known.wrapper, known.copies);
    const bool lacks =
        !known.lacked.empty() && std::ranges::find(names, known.known_by.substr(known.lacked.size())) != names.end();
    for (std::string& name : names) {
      if (lacks && starts_with_one_of(name, known.inner_parts)) name.insert(0, known.lacked);
      for (const auto& [old, now] : known.endings)
        if (name.ends_with(old)) name.replace(name.size() - old.size(), std::string::npos, now);
    }
  }
}

bool fits_one_of(const std::string& name, const std::vector<std::string>& patterns) {
  return std::ranges::any_of(
      patterns, [&](const std::string& pattern) { return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0; });
}

// PyTorch takes files without it: those before 0.4.1 have none, torchvision's published ones among them.
bool may_be_missing(const std::string& name) { return name.ends_with("num_batches_tracked"); }

// Of many the first ones: a line of kilobytes is of no use.
constexpr std::size_t kNamed = 5;

std::string first_of(const std::vector<std::string>& faults) {
  if (faults.size() <= kNamed) return join(faults, ", ");
  return fmt::format("{} and {} more", fmt::join(std::span(faults).first(kNamed), ", "), faults.size() - kNamed);
}

HostTensor as_type(const HostTensor& tensor, DType dtype) {
  if (tensor.dtype == dtype) return tensor;
  const std::size_t count = tensor.bytes.size() / size_of(tensor.dtype);
  HostTensor made{tensor.name, dtype, tensor.shape, std::vector<std::byte>(count * sizeof(float))};
  for (std::size_t i = 0; i < count; ++i) {
    float value = 0;
    if (tensor.dtype == DType::kF64) {
      double wide = 0;
      std::memcpy(&wide, tensor.bytes.data() + i * sizeof wide, sizeof wide);
      value = static_cast<float>(wide);
    } else {
      BFloat16 narrow;
      std::memcpy(&narrow, tensor.bytes.data() + i * sizeof narrow, sizeof narrow);
      value = narrow.to_float();
    }
    std::memcpy(made.bytes.data() + i * sizeof value, &value, sizeof value);
  }
  return made;
}

// Not a Shape: files may have more dimensions, and more than fit into a line.
std::string shape_text(const std::vector<std::int64_t>& shape) {
  return shown_name(fmt::format("[{}]", fmt::join(shape, ", ")));
}

// A parameter or buffer, and what a file has for it.
struct Slot {
  Target target;
  const HostTensor* given = nullptr;
};

struct Slots {
  std::vector<std::string> names;  // in registration order
  std::vector<Slot> slots;

  std::size_t place_of(const std::string& name) const {
    return static_cast<std::size_t>(std::ranges::find(names, name) - names.begin());
  }
  // nullptr: there is none.
  Slot* find(const std::string& name) {
    const std::size_t at = place_of(name);
    return at == names.size() ? nullptr : &slots[at];
  }
};

Slots slots_of(const Module& module) {
  Slots all;
  const auto add = [&](const auto& named) {
    all.names.push_back(named.name);
    all.slots.push_back({target_of(named)});
  };
  std::ranges::for_each(module.named_parameters(), add);
  std::ranges::for_each(module.named_buffers(), add);
  return all;
}

// What the file has, given to the slots; what does not fit, by kind.
class Assignment {
 public:
  // `names`: of `tensors`, as the model may know them.
  Assignment(Slots slots, const std::vector<HostTensor>& tensors, const std::vector<std::string>& names,
             const LoadOptions& options)
      : slots_(std::move(slots)), options_(&options) {
    for (const auto* family : model_families())
      if (const FileNames& known = family->file_names; !known.known_by.empty() && has(known.known_by)) known_ = &known;
    for (std::size_t i = 0; i < tensors.size(); ++i) give(names[i], tensors[i]);
    finish();
  }

  std::vector<std::string> faults() const {
    std::vector<std::string> all;
    if (options_->strict && !missed_.empty()) all.push_back("missing " + few_of(missed_));
    if (options_->strict && !report_.unexpected.empty()) all.push_back("unexpected " + few_of(report_.unexpected));
    if (!misshapen_.empty()) all.push_back(first_of(misshapen_));
    return all;
  }
  bool shapes_fit() const { return misshapen_.empty(); }
  const LoadReport& report() const { return report_; }
  const Slots& slots() const { return slots_; }

 private:
  void give(const std::string& name, const HostTensor& tensor) {
    if (starts_with_one_of(name, options_->without)) return;
    if (Slot* const slot = slots_.find(name)) {
      fill(*slot, name, tensor);
      return;
    }
    if (known_ != nullptr) {
      const auto copy = std::ranges::find(known_->copies, name, &FileNames::Renaming::first);
      if (copy != known_->copies.end() && has(copy->second)) {
        copies_.emplace_back(*copy, &tensor);
        return;
      }
      if (fits_one_of(name, known_->unused)) return;
    }
    report_.unexpected.push_back(name);
  }

  void finish() {
    for (const auto& [copy, tensor] : copies_) {
      Slot& slot = *slots_.find(copy.second);
      if (slot.given == nullptr)  // a file that has each tensor once may have kept this name of the two
        fill(slot, copy.first, *tensor);
      else if (!same_content(*slot.given, *tensor))
        report_.unexpected.push_back(copy.first);
    }
    for (std::size_t i = 0; i < slots_.names.size(); ++i) {
      const std::string& name = slots_.names[i];
      if (slots_.slots[i].given != nullptr || starts_with_one_of(name, options_->without) || may_be_missing(name))
        continue;
      report_.missing.push_back(name);
      if (!starts_with_one_of(name, options_->may_lack)) missed_.push_back(name);
    }
  }

  bool has(const std::string& name) { return slots_.find(name) != nullptr; }

  void fill(Slot& slot, const std::string& name, const HostTensor& tensor) {
    const Tensor& value = *slot.target.value;
    const auto wanted = file_shape(value, slot.target.layout);
    if (slot.given != nullptr)
      misshapen_.push_back(shown_name(name) + " is there twice");
    else if (tensor.shape != wanted || !converts(tensor.dtype, value.dtype()))
      misshapen_.push_back(fmt::format("{} is {} {}, not {} {}", shown_name(name), lockstep::name_of(tensor.dtype),
                                       shape_text(tensor.shape), lockstep::name_of(value.dtype()), shape_text(wanted)));
    else
      LOCKSTEP_ASSERT(tensor.bytes.size() == static_cast<std::size_t>(value.count()) * size_of(tensor.dtype),
                      "{} bytes of {}", tensor.bytes.size(), name);
    slot.given = &tensor;
  }

  Slots slots_;
  const LoadOptions* options_;
  const FileNames* known_ = nullptr;  // of the model; nullptr: names are what they are
  std::vector<std::pair<FileNames::Renaming, const HostTensor*>> copies_;
  LoadReport report_;
  std::vector<std::string> missed_;  // of those that are missing
  std::vector<std::string> misshapen_;
};

// Names that are not the model's, and what they are if there is one way to see it.
struct Other {
  std::optional<Assignment> assignment;  // without faults
  std::string prefix, why_not;
  std::vector<LoadReport::Renamed> renamed;
};

Other by_shape(const Assignment& failed, const Slots& slots, const std::vector<HostTensor>& tensors,
               std::vector<std::string> names, const LoadOptions& options) {
  const auto is_among = [](const std::vector<std::string>& all, const std::string& name) {
    return std::ranges::find(all, name) != all.end();
  };
  if (failed.report().missing.size() != failed.report().unexpected.size()) return {};
  std::vector<TensorHeader> wanted, given;
  std::vector<std::size_t> places;  // of `given` in `tensors`
  for (const std::string& name : failed.report().missing) {
    const Target& target = slots.slots[slots.place_of(name)].target;
    wanted.push_back({name, target.value->dtype(), file_shape(*target.value, target.layout), target.value->bytes()});
  }
  for (std::size_t i = 0; i < names.size(); ++i)
    if (is_among(failed.report().unexpected, names[i])) {
      given.push_back({names[i], tensors[i].dtype, tensors[i].shape, tensors[i].bytes.size()});
      places.push_back(i);
    }
  const ShapeMatch match = match_by_shape(wanted, given);
  Other other{.assignment = {}, .prefix = {}, .why_not = match.why_not, .renamed = {}};
  if (match.pairs.empty()) return other;
  for (const auto& [to, from] : match.pairs) {
    other.renamed.push_back({tensors[places[from]].name, wanted[to].name});
    names[places[from]] = wanted[to].name;
  }
  Assignment assignment(slots, tensors, names, options);
  if (assignment.faults().empty()) other.assignment.emplace(std::move(assignment));
  return other;
}

Other under_other_names(const Assignment& failed, const Slots& slots, const std::vector<HostTensor>& tensors,
                        const std::vector<std::string>& names, const LoadOptions& options) {
  for (const auto& [prefix, shorter] : possible_names(tensors)) {
    if (prefix.empty()) continue;
    Assignment assignment(slots, tensors, shorter, options);
    if (assignment.faults().empty())
      return {.assignment = std::move(assignment), .prefix = prefix, .why_not = {}, .renamed = {}};
  }
  return failed.shapes_fit() ? by_shape(failed, slots, tensors, names, options) : Other{};
}

// If tensors may be missing, a common prefix of all names causes no error: choose the prefix with which most names fit.
Other under_fitting_prefix(const Assignment& failed, const Slots& slots, const std::vector<HostTensor>& tensors,
                           const LoadOptions& options) {
  Other best;
  std::size_t least = failed.report().missing.size();
  for (const auto& [prefix, shorter] : possible_names(tensors)) {
    if (prefix.empty()) continue;
    Assignment assignment(slots, tensors, shorter, options);
    if (!assignment.shapes_fit() || assignment.report().missing.size() >= least) continue;
    least = assignment.report().missing.size();
    best = {.assignment = std::move(assignment), .prefix = prefix, .why_not = {}, .renamed = {}};
  }
  return best;
}

}  // namespace

bool same_content(const HostTensor& a, const HostTensor& b) {
  return a.dtype == b.dtype && a.shape == b.shape && a.bytes == b.bytes;
}

std::string few_of(const std::vector<std::string>& names) {
  std::vector<std::string> quoted;
  for (const auto& name : std::span(names).first(std::min(names.size(), kNamed + 1)))
    quoted.push_back('"' + shown_name(name) + '"');
  if (names.size() <= kNamed) return join(quoted, ", ");
  return fmt::format("{} and {} more", join(std::span(quoted).first(kNamed), ", "), names.size() - kNamed);
}

std::vector<std::string> plain_names(const std::vector<HostTensor>& tensors) {
  std::vector<std::string> names;
  for (const auto& tensor : tensors) names.push_back(tensor.name);
  const bool compiled = take_off(names, kCompiled);
  take_off(names, kWrapper);
  if (!compiled) take_off(names, kCompiled);
  rename(names);
  return names;
}

std::vector<PossibleNames> possible_names(const std::vector<HostTensor>& tensors) {
  std::vector<PossibleNames> all = {{.prefix = {}, .names = plain_names(tensors)}};
  const std::vector<std::string> plain = all.front().names;
  for (auto& shorter : without_common_parts(plain)) {
    const std::string& longest = plain.front();
    PossibleNames names{.prefix = longest.substr(0, longest.size() - shorter.front().size()),
                        .names = std::move(shorter)};
    rename(names.names);  // what a family's files have before some of their names only shows now
    all.push_back(std::move(names));
  }
  return all;
}

std::vector<HostTensor> state_of(const Module& module) {
  Slots all = slots_of(module);
  take_off(all.names, kWrapper);
  std::vector<HostTensor> state;
  for (std::size_t i = 0; i < all.names.size(); ++i) state.push_back(to_host(all.names[i], all.slots[i].target));
  return state;
}

LoadReport load_state(Module& module, const std::vector<HostTensor>& tensors, const std::string& source,
                      const LoadOptions& options) {
  Slots slots = slots_of(module);
  std::vector<std::string> names;
  if (options.keep_prefix) {
    for (const auto& tensor : tensors) names.push_back(tensor.name);
  } else {
    take_off(slots.names, kWrapper);
    names = plain_names(tensors);
  }
  Assignment assignment(slots, tensors, names, options);
  auto faults = assignment.faults();
  Other other;
  if (options.match_other_names && !options.keep_prefix && (!faults.empty() || !options.strict)) {
    other = options.strict ? under_other_names(assignment, slots, tensors, names, options)
                           : under_fitting_prefix(assignment, slots, tensors, options);
    if (other.assignment) {
      assignment = *std::move(other.assignment);
      faults.clear();
    } else if (!other.why_not.empty()) {
      faults.push_back(other.why_not);
    }
  }
  if (!faults.empty())
    throw UsageError(fmt::format("weights {} do not fit the model: {}", source, join(faults, "; ")),
                     options.keep_prefix
                         ? "leave --keep-prefix out, or load them into the model that they were saved from"
                         : "load them into the model that they were saved from");

  {
    const OnExit changed([&] {  // also where a part of them has been copied
      for (const Slot& slot : assignment.slots().slots)
        if (slot.target.parameter != nullptr) slot.target.parameter->changed();
    });
    for (const Slot& slot : assignment.slots().slots)
      if (slot.given != nullptr) from_host(as_type(*slot.given, slot.target.value->dtype()), slot.target);
  }
  LoadReport report = assignment.report();
  report.prefix = std::move(other.prefix);
  report.renamed = std::move(other.renamed);
  return report;
}

TensorHeader StateEntry::header() const {
  return {.name = name, .dtype = value.dtype(), .shape = file_shape(value, layout), .bytes = value.bytes()};
}

std::vector<std::byte> StateEntry::in_file_order(std::span<const std::byte> memory) const {
  check_usage(memory.size() == value.bytes(), "another number of bytes than a value has, to be put in a file's order",
              "give a copy of all of them");
  const Shape& s = value.shape();
  if (layout == FileLayout::kOhwiToOihw) return swapped(memory, s[0], places_of(s), inputs_of(s));
  if (layout == FileLayout::kTransposed) return swapped(memory, 1, s[0], s[1]);
  return {};
}

std::vector<StateEntry> entries_of(const Module& module) {
  Slots all = slots_of(module);
  take_off(all.names, kWrapper);
  std::vector<StateEntry> entries;
  for (std::size_t i = 0; i < all.names.size(); ++i) {
    const Target& target = all.slots[i].target;
    entries.push_back({all.names[i], *target.value, target.backend, target.layout, target.parameter});
  }
  return entries;
}

std::vector<StateEntry> entries_of(const Optimizer& optimizer) {
  std::vector<StateEntry> entries;
  for (auto& [name, parameter, value] : optimizer.moments()) {
    const Tensor whole = optimizer.is_sliced() ? Tensor::view_of(nullptr, parameter->value().shape()) : value;
    entries.push_back({std::move(name), whole, &parameter->backend(), parameter->layout()});
  }
  return entries;
}

std::vector<StateEntry> entries_of(const Module& module, const MovingAverage& average) {
  auto entries = entries_of(module);
  for (const auto& [name, parameter, value] : average.values())
    for (StateEntry& entry : entries)
      if (entry.parameter == parameter) {
        entry.value = value;
        entry.parameter = nullptr;
      }
  return entries;
}

std::vector<StateEntry> entries_of(const MovingAverage& average) {
  std::vector<StateEntry> entries;
  for (const auto& [name, parameter, value] : average.values())
    entries.push_back({name, value, &parameter->backend(), parameter->layout()});
  return entries;
}

void load_entries(const std::vector<StateEntry>& entries, const std::vector<HostTensor>& tensors,
                  const std::string& source) {
  std::vector<const HostTensor*> given;
  std::vector<std::string> faults;
  for (const auto& entry : entries) {
    const auto found = std::ranges::find(tensors, entry.name, &HostTensor::name);
    const TensorHeader wanted = entry.header();
    if (found == tensors.end())
      faults.push_back("missing " + entry.name);
    else if (found->dtype != wanted.dtype || found->shape != wanted.shape)
      faults.push_back(fmt::format("{} is {} {}, not {} {}", entry.name, lockstep::name_of(found->dtype),
                                   shape_text(found->shape), lockstep::name_of(wanted.dtype),
                                   shape_text(wanted.shape)));
    else if (found->bytes.size() != wanted.bytes)
      faults.push_back(fmt::format("{} has {} bytes, not {}", entry.name, found->bytes.size(), wanted.bytes));
    else
      given.push_back(&*found);
  }
  for (const auto& tensor : tensors)
    if (std::ranges::find(entries, tensor.name, &StateEntry::name) == entries.end())
      faults.push_back("unexpected " + shown_name(tensor.name));
  if (!faults.empty())
    throw UsageError(fmt::format("{} does not fit: {}", source, first_of(faults)),
                     "load it into what it was saved from");
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const OnExit changed([&] {  // also where a part of it has been copied
      if (entries[i].parameter != nullptr) entries[i].parameter->changed();
    });
    from_host(*given[i], Target{&entries[i].value, entries[i].backend, entries[i].layout});
  }
}

namespace {

constexpr std::int64_t kAtOnce = std::int64_t{1} << 20;  // elements

// As to_host() has them; a piece at a time, where they lie as in files: a copy of the largest parameter may be what a
// run's memory has no space for.
void add_content(Sha256& hash, const std::string& name, const Target& target) {
  if (target.layout != FileLayout::kSame) return hash.update(to_host(name, target).bytes);
  const Tensor all = target.value->reshaped({target.value->count()});
  std::vector<std::byte> piece;
  for (std::int64_t begin = 0; begin < all.count(); begin += kAtOnce) {
    const Tensor part = all.slice(begin, std::min(begin + kAtOnce, all.count()));
    piece.resize(part.bytes());
    target.backend->download(part, piece);
    hash.update(piece);
  }
}

}  // namespace

std::string parameters_sha256(const Module& module) {
  auto parameters = module.named_parameters();
  std::sort(parameters.begin(), parameters.end(),
            [](const NamedParameter& a, const NamedParameter& b) { return a.name < b.name; });
  Sha256 hash;
  for (const auto& named : parameters) {
    hash.update(named.name);
    add_content(hash, named.name, target_of(named));
  }
  return hash.finish();
}

}  // namespace lockstep::nn
