#include "launcher/inspect.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <ctime>
#include <filesystem>
#include <optional>
#include <span>

#include "base/error.h"
#include "base/json.h"
#include "base/text.h"
#include "launcher/process.h"

namespace lockstep::launcher {
namespace {

using flight::RecordedOperation;
using flight::Snapshot;

/// Of "rank-12".
std::optional<std::int64_t> rank_of_name(const std::string& name) {
  constexpr std::string_view kPrefix = "rank-";
  if (!name.starts_with(kPrefix) || name.size() == kPrefix.size() || name[kPrefix.size()] == '-') return std::nullopt;
  return parse_int(std::string_view(name).substr(kPrefix.size()));
}

std::vector<std::string> records_in(const std::string& directory) {
  std::vector<std::pair<std::int64_t, std::string>> found;
  std::error_code error;
  for (auto entry = std::filesystem::directory_iterator(directory, error);
       !error && entry != std::filesystem::directory_iterator(); entry.increment(error))
    if (const auto rank = rank_of_name(entry->path().filename().string()))
      found.emplace_back(*rank, entry->path().string());
  std::ranges::sort(found);
  std::vector<std::string> paths;
  for (auto& [rank, path] : found) paths.push_back(std::move(path));
  return paths;
}

double seconds_after_start(const Snapshot& snapshot, std::int64_t at_ns) {
  return (static_cast<double>(at_ns) - static_cast<double>(snapshot.started_ns)) * 1e-9;
}

std::optional<double> took_ms(const RecordedOperation& operation) {
  if (operation.completed_ns == 0) return std::nullopt;
  return (static_cast<double>(operation.completed_ns) - static_cast<double>(operation.issued_ns)) * 1e-6;
}

std::span<const RecordedOperation> last_of(const Snapshot& snapshot, std::size_t last) {
  const std::span all(snapshot.operations);
  return all.last(std::min(last, all.size()));
}

std::string local_time(std::int64_t unix_ns) {
  // Years that no tm holds come from files that nobody wrote.
  constexpr std::int64_t kSecond = 1'000'000'000;
  const auto seconds = static_cast<std::time_t>(unix_ns / kSecond);
  std::tm parts = {};
  if (::localtime_r(&seconds, &parts) == nullptr) return "?";
  std::array<char, 32> text{};
  const auto length = std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S", &parts);
  return {text.data(), length};
}

std::string table_of(std::span<const RecordedOperation> operations, const Snapshot& snapshot) {
  std::string text = fmt::format("  {:<24} {:>10} {:>7} {:>8}  {:<10} {:>11} {:>10}\n", "operation", "bytes", "bucket",
                                 "step", "phase", "issued s", "took ms");
  const auto number = [](std::int64_t value) { return value >= 0 ? fmt::to_string(value) : std::string("-"); };
  for (const auto& each : operations) {
    std::string name = each.sequence == 0 ? std::string("(the group's own)")
                                          : fmt::format("{} #{}", flight::name_of(each.kind), each.sequence);
    if (each.group > 1) name += fmt::format(" of group {}", each.group);
    const auto took = took_ms(each);
    text += fmt::format("  {:<24} {:>10} {:>7} {:>8}  {:<10} {:>11.6f} {:>10}\n", name, each.bytes, number(each.bucket),
                        number(each.step), flight::name_of(each.phase), seconds_after_start(snapshot, each.issued_ns),
                        took ? fmt::format("{:.3f}", *took) : std::string("-"));
  }
  return text;
}

}  // namespace

std::vector<std::string> records_at(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(path, ignored)) return {path};
  for (const auto& directory : {path, path + "/flight"})
    if (auto paths = records_in(directory); !paths.empty()) return paths;
  throw IoError(fmt::format("{}: there is no flight record in it", path),
                "give a job's --log-dir, which has them after a failure, or the directory that LOCKSTEP_FLIGHT_DIR "
                "named");
}

std::string text_of(const Snapshot& snapshot, std::size_t last) {
  std::string text = fmt::format("rank {} of {} (host {}, pid {}){}, started {}\n  {}\n", snapshot.rank,
                                 snapshot.world_size, snapshot.host, snapshot.pid,
                                 snapshot.attempt > 0 ? fmt::format(", attempt {}", snapshot.attempt) : std::string(),
                                 local_time(snapshot.started_unix_ns), flight::describe_state(snapshot));
  if (snapshot.signal != 0) {
    text += fmt::format("  crashed by {}{}{}\n", signal_name(snapshot.signal),
                        snapshot.fault_address != 0 ? fmt::format(" at address {:#x}", snapshot.fault_address) : "",
                        snapshot.backtrace.empty() ? "" : ", in:");
    for (const auto& frame : snapshot.backtrace) text += "    " + frame + "\n";
  }
  text += fmt::format("  waited {:.3f} s for other ranks in all\n", static_cast<double>(snapshot.waited_ns) * 1e-9);
  const auto shown = last_of(snapshot, last);
  if (shown.empty()) return text + (snapshot.issued == 0 ? "  no operation\n" : "");
  return text + fmt::format("  the last {} of {} operations:\n", shown.size(), snapshot.issued) +
         table_of(shown, snapshot);
}

std::string json_of(const Snapshot& snapshot, std::size_t last) {
  const auto seconds = [&](std::int64_t at_ns) {
    return at_ns != 0 ? std::optional(seconds_after_start(snapshot, at_ns)) : std::nullopt;
  };
  const auto known = [](std::int64_t value) { return value >= 0 ? std::optional(value) : std::nullopt; };
  std::vector<JsonObject> operations, readings;
  for (const auto& each : last_of(snapshot, last))
    operations.push_back({{"sequence", each.sequence},
                          {"kind", flight::name_of(each.kind)},
                          {"group", each.group},
                          {"bytes", each.bytes},
                          {"bucket", known(each.bucket)},
                          {"step", known(each.step)},
                          {"phase", flight::name_of(each.phase)},
                          {"issued_s", seconds(each.issued_ns)},
                          {"took_ms", took_ms(each)}});
  for (const auto& each : snapshot.readings)
    readings.push_back({{"worker", each.worker}, {"sample", each.sample}, {"since_s", seconds(each.since_ns)}});
  const JsonObject object = {
      {"rank", snapshot.rank},
      {"world_size", snapshot.world_size},
      {"host", snapshot.host},
      {"pid", snapshot.pid},
      {"attempt", snapshot.attempt},
      {"started_unix_s", static_cast<double>(snapshot.started_unix_ns) * 1e-9},
      {"phase", flight::name_of(snapshot.phase)},
      {"phase_since_s", seconds(snapshot.phase_since_ns)},
      {"step", snapshot.step > 0 ? std::optional(snapshot.step) : std::nullopt},
      {"waits_since_s", seconds(snapshot.waits_since)},
      {"waits_for", snapshot.missing},
      {"waited_s", static_cast<double>(snapshot.waited_ns) * 1e-9},
      {"reads", readings},
      {"signal", snapshot.signal != 0 ? std::optional(signal_name(snapshot.signal)) : std::nullopt},
      {"fault_address", snapshot.fault_address != 0 ? std::optional(snapshot.fault_address) : std::nullopt},
      {"backtrace", snapshot.backtrace},
      {"operations_issued", snapshot.issued},
      {"operations", operations}};
  return object.text();
}

}  // namespace lockstep::launcher
