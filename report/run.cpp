#include "report/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <span>
#include <tuple>

#include "base/error.h"
#include "base/file.h"
#include "base/json_value.h"
#include "base/text.h"

namespace lockstep::report {
namespace {

constexpr std::array<std::string_view, kFields> kNames = {"step",      "epoch",        "loss",         "lr",
                                                          "grad_norm", "step_ms",      "comm_wait_ms", "samples_per_s",
                                                          "samples",   "memory_bytes", "loss_scale",   "unix_s"};
constexpr const char* kMetricsRemedy = "give the file that --metrics FILE.jsonl or FILE.csv has written";
constexpr std::size_t kPiece = std::size_t{1} << 20;
constexpr int kDeepest = 4;
constexpr std::size_t kMostLine = std::size_t{1} << 24;

using StepRow = std::array<double, kFields>;

double parse_double(std::string_view text) {
  double value = kNone;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? value : kNone;
}

/// The place of `name` in kNames, tried first at `next`: a step's line has them in order.
std::optional<std::size_t> field_named(std::string_view name, std::size_t next) {
  for (std::size_t k = 0; k < kFields; ++k)
    if (const std::size_t at = (next + k) % kFields; kNames[at] == name) return at;
  return std::nullopt;
}

/// Of a line that is `{"event":"step","a":1,…}` with plain names, numbers, `null`, `true` and `false`: the numbers that
/// have a field. Nothing for any other.
bool read_step(std::string_view line, StepRow& row) {
  constexpr std::string_view kBegin = R"({"event":"step")";
  if (!line.starts_with(kBegin) || !line.ends_with('}')) return false;
  row.fill(kNone);
  std::size_t next = 0;
  for (std::size_t at = kBegin.size(); at + 1 < line.size();) {
    if (line.substr(at, 2) != ",\"") return false;
    const std::size_t name = at + 2, quote = line.find('"', name);
    if (quote == std::string_view::npos || quote + 1 >= line.size() || line[quote + 1] != ':') return false;
    const std::size_t value = quote + 2, end = std::min(line.find(',', value), line.size() - 1);
    const std::string_view text = line.substr(value, end - value);
    if (const auto field = field_named(line.substr(name, quote - name), next)) {
      row[*field] = parse_double(text);
      if (std::isnan(row[*field]) && text != "null") return false;
      next = *field + 1;
    } else if (text.empty() || text.find_first_of("\"{}[]\\") != std::string_view::npos) {
      return false;
    }
    at = end;
  }
  return !std::isnan(row[0]);
}

using Json = nlohmann::json;

double number_of(const Json& json, const char* name) {
  const auto found = json.find(name);
  return found != json.end() && found->is_number() ? found->get<double>() : kNone;
}

std::string text_of(const Json& json, const char* name) {
  const auto found = json.find(name);
  return found != json.end() && found->is_string() ? found->get<std::string>() : std::string();
}

std::vector<double> numbers_of(const Json& json, const char* name) {
  std::vector<double> numbers;
  const auto found = json.find(name);
  if (found == json.end() || !found->is_array()) return numbers;
  for (const auto& value : *found)
    if (value.is_number()) numbers.push_back(value.template get<double>());
  return numbers;
}

bool is_true(const Json& json, const char* name) {
  const auto found = json.find(name);
  return found != json.end() && found->is_boolean() && found->get<bool>();
}

/// The objects of a list, or of an object with their names.
template <class F>
void each_object(const Json& json, const char* name, F&& use) {
  const auto found = json.find(name);
  if (found == json.end() || !found->is_structured()) return;
  for (const auto& [key, value] : found->items())
    if (value.is_object()) use(key, value);
}

Start start_of(const Json& json) {
  Start start = {.command = text_of(json, "command"),
                 .version = text_of(json, "lockstep"),
                 .model = text_of(json, "model"),
                 .data = text_of(json, "data"),
                 .data_sha256 = text_of(json, "data_sha256"),
                 .instruction_set = text_of(json, "instruction_set"),
                 .parameters = number_of(json, "parameters"),
                 .trained_parameters = number_of(json, "trained_parameters"),
                 .planned_steps = number_of(json, "planned_steps"),
                 .unix_s = number_of(json, "unix_s")};
  each_object(json, "ranks", [&](const std::string&, const Json& rank) {
    start.ranks.push_back({text_of(rank, "host"), text_of(rank, "device")});
  });
  each_object(json, "settings", [&](const std::string& name, const Json& setting) {
    start.settings.push_back({name, text_of(setting, "value"), text_of(setting, "from")});
  });
  if (const auto git = json.find("git"); git != json.end() && git->is_object()) {
    start.git = text_of(*git, "commit");
    if (const std::string branch = text_of(*git, "branch"); !branch.empty()) start.git += " (" + branch + ")";
  }
  return start;
}

bool is_figure(const std::string& name) {
  constexpr std::string_view kOthers[] = {"event",
                                          "step",
                                          "epoch",
                                          "unix_s",
                                          "samples",
                                          "steps",
                                          "epochs",
                                          "world_size",
                                          "wall_s",
                                          "comm_bytes",
                                          "comm_bytes_without_hook",
                                          "comm_fallbacks",
                                          "loss_scale",
                                          "good_steps",
                                          "skipped_steps"};
  return std::ranges::find(kOthers, name) == std::end(kOthers);
}

/// The loss, and then the others by name.
Figures figures_of(const Json& json) {
  Figures figures = {{"loss", number_of(json, "loss")}};
  for (const auto& [name, value] : json.items())
    if (name != "loss" && value.is_number() && is_figure(name)) figures.emplace_back(name, value.get<double>());
  return figures;
}

Final final_of(const Json& json) {
  Final final = {.figures = figures_of(json),
                 .steps = number_of(json, "steps"),
                 .wall_s = number_of(json, "wall_s"),
                 .world_size = number_of(json, "world_size"),
                 .params_sha256 = text_of(json, "params_sha256")};
  if (const auto memory = json.find("peak_memory_bytes"); memory != json.end() && memory->is_array())
    for (const auto& bytes : *memory)
      final.peak_memory_bytes.push_back(bytes.is_number() ? bytes.get<double>() : kNone);
  each_object(json, "times", [&](const std::string&, const Json& times) {
    final.times.push_back({.data_ms = number_of(times, "data_ms"),
                           .compute_ms = number_of(times, "compute_ms"),
                           .wait_ms = number_of(times, "wait_ms")});
  });
  if (const auto best = json.find("best"); best != json.end() && best->is_object())
    final.best = fmt::format("{} {:.6g}, at step {:.0f}", text_of(*best, "metric"), number_of(*best, "value"),
                             number_of(*best, "step"));
  return final;
}

}  // namespace

const char* name_of(Field field) { return kNames[static_cast<std::size_t>(field)].data(); }

RunReader::RunReader(std::string path) : run_{.path = std::move(path)}, table_(run_.path.ends_with(".csv")) {}

void RunReader::refuse(const std::string& problem) const {
  throw IoError(fmt::format("{}, line {}: {}", run_.path, line_, problem), kMetricsRemedy);
}

void RunReader::add(std::string_view bytes) {
  while (!bytes.empty()) {
    const std::size_t end = bytes.find('\n');
    if (end == std::string_view::npos) {
      if (rest_.size() + bytes.size() > kMostLine) {
        ++line_;
        refuse("no event is so long");
      }
      rest_ += bytes;
      return;
    }
    ++line_;
    if (rest_.empty()) {
      add_line(bytes.substr(0, end));
    } else {
      rest_ += bytes.substr(0, end);
      const std::string line = std::exchange(rest_, {});
      add_line(line);
    }
    bytes.remove_prefix(end + 1);
  }
}

void RunReader::add_line(std::string_view line) {
  if (table_) return add_row(line);
  StepRow row;
  if (!read_step(line, row)) return add_event(line);
  for (std::size_t k = 0; k < kFields; ++k) run_.steps[k].push_back(row[k]);
}

void RunReader::add_event(std::string_view line) {
  Json json;
  try {
    json = parse_json(line, kDeepest);
  } catch (const JsonError& error) {
    refuse(error.what());
  }
  if (!json.is_object()) refuse("is no event");
  const std::string event = text_of(json, "event");
  if (event.empty()) refuse("has no 'event'");
  const double step = number_of(json, "step"), last = run_.size() > 0 ? run_.of(Field::kStep).back() : 0;
  if (event == kStepEvent) {
    if (std::isnan(step)) refuse("has no step");
    for (std::size_t k = 0; k < kFields; ++k) run_.steps[k].push_back(number_of(json, kNames[k].data()));
  } else if (event == "eval") {
    run_.evaluations.push_back({.step = step,
                                .epoch = number_of(json, "epoch"),
                                .unix_s = number_of(json, "unix_s"),
                                .split = text_of(json, "split"),
                                .of_average = is_true(json, "ema"),
                                .best = is_true(json, "best"),
                                .figures = figures_of(json)});
  } else if (event == "run") {
    run_.starts.push_back(start_of(json));
    run_.data.clear();
    run_.final.reset();
  } else if (event == "data") {
    run_.data.push_back({text_of(json, "name"), number_of(json, "samples"), number_of(json, "classes")});
  } else if (event == "checkpoint") {
    run_.checkpoints.push_back(
        {step, number_of(json, "bytes"), number_of(json, "write_ms"), number_of(json, "held_up_ms")});
  } else if (event == "warning") {
    run_.incidents.push_back({event, last, number_of(json, "unix_s"), text_of(json, "text")});
  } else if (event == "restart") {
    run_.incidents.push_back({event, last, number_of(json, "unix_s"),
                              fmt::format("attempt {:.0f}: {}", number_of(json, "attempt"), text_of(json, "cause"))});
  } else if (event == "balance") {
    run_.incidents.push_back({event, step, number_of(json, "unix_s"),
                              "shares by rank: " + fmt::to_string(fmt::join(numbers_of(json, "shares"), ", "))});
  } else if (event == "skipped") {
    std::string text;
    each_object(json, "causes", [&](const std::string&, const Json& cause) {
      text +=
          fmt::format("{}rank {:.0f}: {}", text.empty() ? "" : "; ", number_of(cause, "rank"), text_of(cause, "text"));
    });
    run_.incidents.push_back({event, step, number_of(json, "unix_s"), text});
  } else if (event == "rewind") {
    run_.incidents.push_back({event, step, number_of(json, "unix_s"),
                              fmt::format("back to step {:.0f}: {}", number_of(json, "to"), text_of(json, "cause"))});
  } else if (event == "resume") {
    run_.incidents.push_back(
        {event, step, kNone, fmt::format("at step {:.0f}, by ranks: {:.0f}", step, number_of(json, "world_size"))});
  } else if (event == "final") {
    run_.final = final_of(json);
  }  // others are for readers that know them
}

void RunReader::add_row(std::string_view line) {
  std::vector<std::string_view> cells;
  for (std::size_t at = 0; at <= line.size();) {
    const std::size_t end = std::min(line.find(',', at), line.size());
    cells.push_back(line.substr(at, end - at));
    at = end + 1;
  }
  if (columns_.empty()) {
    columns_.assign(cells.begin(), cells.end());
    if (columns_.size() < 2 || columns_[0] != "event" || columns_[1] != kStepEvent)
      refuse("its columns do not begin with event,step");
    return;
  }
  if (cells.size() != columns_.size()) refuse(fmt::format("{} cells under {} columns", cells.size(), columns_.size()));
  if (cells[0] == kStepEvent) {
    if (std::isnan(parse_double(cells[1]))) refuse("has no step");
    for (auto& values : run_.steps) values.push_back(kNone);
    std::size_t next = 0;
    for (std::size_t k = 1; k < cells.size(); ++k) {
      if (cells[k].empty()) continue;
      const auto field = field_named(columns_[k], next);
      if (!field) continue;
      run_.steps[*field].back() = parse_double(cells[k]);
      next = *field + 1;
    }
    return;
  }
  if (cells[0] != "eval" && cells[0] != "final") refuse("the event of a row is step, eval or final");
  JsonObject event = {{"event", cells[0]}};
  for (std::size_t k = 1; k < cells.size(); ++k) {
    const std::string& name = cells[0] == "final" && k == 1 ? "steps" : columns_[k];
    if (cells[k] == "true")
      event.add(name, true);
    else if (const double value = parse_double(cells[k]); !std::isnan(value))
      event.add(name, value);
    else if (!cells[k].empty())
      event.add(name, cells[k]);
  }
  add_event(event.text());
}

Run read_run(const std::string& path) {
  RegularFile file = open_regular(path);
  const auto refuse = [&](const std::string& problem) {
    throw IoError(fmt::format("{}: {}", path, problem), file.remedy_or(kMetricsRemedy));
  };
  if (!file.problem.empty()) refuse(file.problem);
  RunReader reader(path);
  std::string piece(kPiece, '\0');
  for (;;) {
    std::size_t count = 0;
    if (const std::string problem = file.read(std::as_writable_bytes(std::span(piece)), count); !problem.empty())
      refuse(problem);
    if (count == 0) break;
    reader.add(std::string_view(piece).substr(0, count));
  }
  Run run = reader.take();
  if (run.size() == 0 && run.evaluations.empty() && run.starts.empty()) refuse("has no event of a run");
  return run;
}

std::vector<Bin> binned(const std::vector<double>& x, const std::vector<double>& y, std::size_t most) {
  std::vector<std::size_t> finite;
  for (std::size_t i = 0; i < x.size(); ++i)
    if (std::isfinite(x[i]) && std::isfinite(y[i])) finite.push_back(i);
  const std::size_t count = std::min(most, finite.size());
  std::vector<Bin> bins;
  for (std::size_t b = 0; b < count; ++b) {
    const std::size_t from = b * finite.size() / count, to = (b + 1) * finite.size() / count;
    Bin bin = {.x = x[finite[to - 1]], .least = y[finite[from]], .most = y[finite[from]]};
    for (std::size_t i = from; i < to; ++i) {
      const double value = y[finite[i]];
      bin.mean += value / static_cast<double>(to - from);
      bin.least = std::min(bin.least, value);
      bin.most = std::max(bin.most, value);
    }
    bins.push_back(bin);
  }
  return bins;
}

Extent extent_of(const std::vector<double>& x, const std::vector<double>& y) {
  Extent extent;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (!std::isfinite(x[i]) || !std::isfinite(y[i])) continue;
    if (extent.points++ == 0) extent.first = y[i];
    extent.last = y[i];
    if (!(y[i] >= extent.least)) std::tie(extent.least, extent.least_at) = std::pair(y[i], x[i]);
    if (!(y[i] <= extent.most)) std::tie(extent.most, extent.most_at) = std::pair(y[i], x[i]);
  }
  return extent;
}

std::string split_text(const std::string& split) { return split == "val" || split.empty() ? "validation" : split; }

Curve curve_of(const Run& run, std::string_view figure, std::string_view split, bool of_average) {
  Curve curve;
  for (const auto& evaluation : run.evaluations) {
    if (evaluation.of_average != of_average || evaluation.split != split) continue;
    for (const auto& [name, value] : evaluation.figures)
      if (name == figure) {
        curve.x.push_back(evaluation.step);
        curve.y.push_back(value);
      }
  }
  return curve;
}

}  // namespace lockstep::report
