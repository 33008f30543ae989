// The file of results of bench scaling.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <set>

#include "base/file.h"
#include "base/json_value.h"
#include "base/text.h"
#include "bench/scaling.h"

namespace lockstep::bench {
namespace {

constexpr std::string_view kBegins = R"({"event":"scaling")";
constexpr int kFormat = 1;
// What may differ between the parts of one run.
const std::set<std::string> kOfTheMoment = {"date", "command", "load average"};

std::string header_of(const Facts& settings, const Facts& machine) {
  return JsonObject{{"event", "scaling"},
                    {"format", kFormat},
                    {"settings", facts_as_json(settings)},
                    {"machine", facts_as_json(machine)}}
      .text();
}

std::string line_of(const ScalingCase& one, std::int64_t round, const JobResult& r) {
  return JsonObject{{"event", "job"},
                    {"round", round},
                    {"mode", name_of(one.mode)},
                    {"model", one.model},
                    {"ranks", one.ranks},
                    {"batch", r.batch},
                    {"step_ms", r.step_ms},
                    {"samples_per_s", r.samples_per_s},
                    {"compute_ms", r.compute_ms},
                    {"exposed_comm_ms", r.exposed_comm_ms},
                    {"peak_memory_bytes", r.peak_memory_bytes},
                    {"backend", r.backend},
                    {"device", r.device},
                    {"precision", r.precision}}
      .text();
}

void read_job(const OrderedJsonMembers& line, ScalingFile& file) {
  ScalingCase one;
  const std::string mode = line.text("mode");
  if (mode == name_of(ScalingMode::kStrong))
    one.mode = ScalingMode::kStrong;
  else if (mode != name_of(ScalingMode::kWeak))
    line.refuse(fmt::format("'{}' is neither weak nor strong", printable(mode)));
  one.model = line.text("model");
  const auto whole = [&](const char* name, std::uint64_t least) {
    return static_cast<std::int64_t>(line.whole(name, least));
  };
  one.ranks = static_cast<int>(std::min<std::int64_t>(whole("ranks", 1), 1 << 20));
  const std::int64_t round = whole("round", 1);
  const JobResult result = {.step_ms = line.positive("step_ms"),
                            .samples_per_s = line.positive("samples_per_s"),
                            .compute_ms = line.number("compute_ms"),
                            .exposed_comm_ms = line.number("exposed_comm_ms"),
                            .batch = whole("batch", 1),
                            .peak_memory_bytes = whole("peak_memory_bytes", 0),
                            .backend = line.text("backend"),
                            .device = line.text("device"),
                            .precision = line.text("precision")};
  if (!file.results[one].emplace(round, result).second)
    line.refuse(fmt::format("round {} of {} is there twice", round, printable(text_of(one))));
}

/// The first name whose values differ, with both.
std::optional<std::array<std::string, 3>> difference(const Facts& a, const Facts& b) {
  const auto value_in = [](const Facts& facts, const std::string& name) {
    const auto found = std::ranges::find(facts, name, &Facts::value_type::first);
    return found == facts.end() ? std::string() : found->second;
  };
  for (const Facts* each : {&a, &b})
    for (const auto& [name, value] : *each) {
      const std::string left = value_in(a, name), right = value_in(b, name);
      if (left != right && !kOfTheMoment.contains(name)) return std::array{name, left, right};
    }
  return std::nullopt;
}

/// Settings are called as flags are, but for the models and for flags after "--".
std::string flag_of(const std::string& name) {
  return name == "models" || name.find(' ') != std::string::npos ? name : "--" + name;
}

std::string or_none(const std::string& value) { return value.empty() ? "none" : printable(value); }

}  // namespace

JsonObject facts_as_json(const Facts& facts) {
  JsonObject json;
  for (const auto& [name, value] : facts) json.add(name, value);
  return json;
}

const char* name_of(ScalingMode mode) { return mode == ScalingMode::kWeak ? "weak" : "strong"; }

std::string text_of(const ScalingCase& one) {
  return fmt::format("{}, {}, {} rank{}", one.model, name_of(one.mode), one.ranks, one.ranks == 1 ? "" : "s");
}

ScalingFile parse_scaling(std::string_view text, const std::string& path) {
  ScalingFile file;
  std::int64_t number = 0;
  for (std::size_t end = 0; (end = text.find('\n', file.whole_bytes)) != std::string_view::npos;) {
    const OrderedJsonMembers line(text.substr(file.whole_bytes, end - file.whole_bytes), /*deepest=*/2,
                                  fmt::format("{}, line {}", path, ++number),
                                  "give a file that lockstep bench scaling has written, or remove this one");
    if (const std::string event = line.text("event"); event != (number == 1 ? "scaling" : "job"))
      line.refuse(fmt::format("'{}' is no event of such a file at this place", printable(event)));
    if (number == 1) {
      if (line.whole("format", 1) != kFormat) line.refuse("the format is another version's");
      file.settings = line.texts("settings");
      file.machine = line.texts("machine");
    } else {
      read_job(line, file);
    }
    file.whole_bytes = end + 1;
  }
  // Of a first line that was cut the beginning is known.
  const std::size_t shared = std::min(text.size(), kBegins.size());
  if (number == 0 && text.substr(0, shared) != kBegins.substr(0, shared))
    throw IoError(path + " is no file of lockstep bench scaling", "give another file, or remove this one");
  return file;
}

ScalingJournal::ScalingJournal(const std::string& path, const Facts& settings, const Facts& machine) : path_(path) {
  fd_.reset(::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0666));
  if (!fd_) throw IoError(fmt::format("cannot write {}: {}", path, errno_text(errno)), "give --out another file");
  if (::flock(fd_.get(), LOCK_EX | LOCK_NB) != 0)
    throw IoError(fmt::format("{} is in use by another lockstep bench scaling", path),
                  "wait for its end, or give --out another file");
  const std::string text(MappedFile(path).text());
  file_ = parse_scaling(text, path);
  if (file_.whole_bytes > 0)
    if (const auto differs = difference(file_.settings, settings))
      throw UsageError(fmt::format("{} was measured with {} {}, and this is {}", path, flag_of((*differs)[0]),
                                   or_none((*differs)[1]), or_none((*differs)[2])),
                       "give the same flags to continue it, or --out another file");
  if (file_.whole_bytes < text.size() && ::ftruncate(fd_.get(), static_cast<off_t>(file_.whole_bytes)) != 0)
    throw IoError(fmt::format("cannot cut the last line off {}: {}", path, errno_text(errno)));
  if (file_.whole_bytes > 0) return;
  file_.settings = settings;
  file_.machine = machine;
  append(header_of(settings, machine));
}

void ScalingJournal::check_machine(const Facts& machine) const {
  if (const auto differs = difference(file_.machine, machine))
    throw UsageError(fmt::format("{} was measured where '{}' was '{}', and here it is '{}'", path_,
                                 printable((*differs)[0]), or_none((*differs)[1]), or_none((*differs)[2])),
                     "give --out another file: --baseline compares the two");
}

void ScalingJournal::append(const std::string& line) {
  const std::string whole = line + "\n";
  for (std::size_t at = 0; at < whole.size();) {
    const ssize_t written = ::write(fd_.get(), whole.data() + at, whole.size() - at);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) throw IoError(fmt::format("cannot write {}: {}", path_, errno_text(errno)), "is the disk full?");
    at += static_cast<std::size_t>(written);
  }
  if (::fdatasync(fd_.get()) != 0) throw IoError(fmt::format("cannot write {}: {}", path_, errno_text(errno)));
}

void ScalingJournal::add(const ScalingCase& one, std::int64_t round, const JobResult& result) {
  append(line_of(one, round, result));
  file_.results[one].emplace(round, result);
}

void check_baseline(const ScalingFile& before, const Facts& settings, std::int64_t rounds, const std::string& path) {
  // Modes, models and ranks may be others: what both have is compared.
  const std::set<std::string> free = {"models", "mode", "ranks"};
  const auto defining = [&](Facts facts) {
    std::erase_if(facts, [&](const auto& fact) { return free.contains(fact.first); });
    return facts;
  };
  if (const auto differs = difference(defining(before.settings), defining(settings)))
    throw UsageError(fmt::format("--baseline {} was measured with {} {}, and this is {}", path, flag_of((*differs)[0]),
                                 or_none((*differs)[1]), or_none((*differs)[2])),
                     "give the same flags, or another baseline");
  std::size_t most = 0;
  for (const auto& [one, results] : before.results) most = std::max(most, results.size());
  if (most == 0) throw IoError(fmt::format("--baseline {} has no results", path), "let that run measure at least once");
  const double least = least_mann_whitney_p(most, static_cast<std::size_t>(rounds));
  if (least >= kSignificance)
    throw UsageError(fmt::format("--baseline {} has {} rounds, and --rounds is {}: no difference of those has p < {}",
                                 path, most, rounds, kSignificance),
                     "measure at least 5 rounds each");
}

}  // namespace lockstep::bench
