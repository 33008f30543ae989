#include "bench/scaling.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <set>

#include "base/cpu.h"
#include "base/file.h"
#include "base/json_value.h"
#include "base/log.h"
#include "base/network.h"
#include "base/signals.h"
#include "base/text.h"
#include "bench/own_processes.h"
#include "devices/machine.h"
#include "devices/nvml.h"
#include "lockstep/base/env.h"
#include "lockstep/comm/world.h"

namespace lockstep::bench {
namespace {

std::string first_line_of(const std::string& path, const std::string& key = {}) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(key)) return line.substr(key.size());
  return {};
}

std::string gpus_in_words() {
  std::map<std::string, int> counts;
  for (const auto& gpu : devices::read_gpus(devices::Detail::kChoice).list) ++counts[gpu.name.value_or("unknown")];
  std::vector<std::string> words;
  for (const auto& [name, count] : counts) words.push_back(count == 1 ? name : fmt::format("{} × {}", count, name));
  return join(words, ", ");
}

/// "eth0 at 10 Gbit/s": interfaces that are up, with the speed that the kernel knows.
std::string links_in_words() {
  std::set<std::string> words;
  for (const auto& one : list_interfaces()) {
    if (!one.is_up || one.is_loopback) continue;
    const auto mbit = parse_int(trim(first_line_of("/sys/class/net/" + one.name + "/speed")));
    words.insert(mbit && *mbit > 0 ? fmt::format("{} at {:g} Gbit/s", one.name, static_cast<double>(*mbit) / 1000)
                                   : one.name);
  }
  return join(std::vector<std::string>(words.begin(), words.end()), ", ");
}

std::string now_in_words() {
  const std::time_t now = std::time(nullptr);
  std::tm utc = {};
  ::gmtime_r(&now, &utc);
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%d %H:%M UTC", &utc)};
}

/// The last line of what a job wrote to stderr, which says what was wrong.
std::string last_line(const std::string& text) {
  const auto lines = split(trim(text), '\n');
  constexpr std::string_view kPrefix = "error: ";
  const std::string line = one_line(lines.back());
  return line.starts_with(kPrefix) ? line.substr(kPrefix.size()) : line;
}

std::string words_of_modes(const std::vector<ScalingMode>& modes) {
  std::vector<std::string> words;
  for (const ScalingMode mode : modes) words.emplace_back(name_of(mode));
  return join(words, ",");
}

std::string words_of_ranks(const std::vector<int>& ranks) {
  std::vector<std::string> words;
  for (const int n : ranks) words.push_back(std::to_string(n));
  return join(words, ",");
}

JobResult result_of(const std::string& text) {
  using Json = nlohmann::json;
  Json json;
  try {
    json = parse_json(trim(text), /*deepest=*/4);
    JobResult result = {.step_ms = json.at("step_ms"),
                        .samples_per_s = json.at("samples_per_s"),
                        .compute_ms = json.at("compute_ms"),
                        .exposed_comm_ms = json.at("exposed_comm_ms"),
                        .batch = json.at("batch"),
                        .peak_memory_bytes = 0,
                        .backend = json.at("backend"),
                        .device = json.at("device"),
                        .precision = json.at("precision")};
    for (const Json& bytes : json.at("peak_memory_bytes"))
      result.peak_memory_bytes = std::max(result.peak_memory_bytes, bytes.get<std::int64_t>());
    return result;
  } catch (const std::exception& error) {  // the library's, of several kinds
    throw InternalError(fmt::format("a job printed what is no result: {}", error.what()));
  }
}

void complete(ScalingOptions& options) {
  if (options.ranks.empty()) {
    if (options.places == 0)
      throw UsageError("how many ranks the hosts take is not known here",
                       "say how many: --hosts a:4,b:4, or --ranks 1,2,4");
    for (int n = 1; n <= options.places; n *= 2) options.ranks.push_back(n);
  }
  std::ranges::sort(options.ranks);
  const auto same = std::ranges::unique(options.ranks);
  options.ranks.erase(same.begin(), same.end());
  const int most = options.ranks.back();
  if (std::ranges::find(options.modes, ScalingMode::kStrong) != options.modes.end() && options.global_batch < most)
    throw UsageError(fmt::format("--global-batch {} is too small for {} ranks", options.global_batch, most),
                     fmt::format("give at least {}, or --mode weak", most));
}

/// Shows how far it is, on one line of a terminal.
class Progress {
 public:
  explicit Progress(std::size_t jobs) : jobs_(jobs), shows_(::isatty(STDERR_FILENO) == 1) {}
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(std::size_t job, const ScalingJob& what, std::int64_t rounds) {
    if (!shows_) return;
    std::fprintf(
        stderr, "\r\033[K%s",
        fmt::format("job {} of {}: round {} of {}, {}", job, jobs_, what.round, rounds, printable(text_of(what.one)))
            .c_str());
    std::fflush(stderr);
  }
  void clear() {
    if (shows_) std::fputs("\r\033[K", stderr);
  }

 private:
  std::size_t jobs_;
  bool shows_;
};

/// Runs what the journal lacks. Returns the exit code of the first job that failed, and why cases have.
int measure(const ScalingOptions& options, const Facts& machine, ScalingJournal& journal,
            std::map<ScalingCase, std::string>& failures) {
  std::vector<ScalingJob> missing = plan_of(options);
  const std::size_t all = missing.size();
  std::erase_if(missing, [&](const ScalingJob& job) {
    const auto found = journal.file().results.find(job.one);
    return found != journal.file().results.end() && found->second.contains(job.round);
  });
  if (missing.empty()) {
    log_warn("{} has all {} jobs: nothing is measured anew. Remove it, or give --out another file, to measure again",
             options.out, all);
    return 0;
  }
  journal.check_machine(machine);
  if (missing.size() < all) log_info("{} has {} of {} jobs: continuing", options.out, all - missing.size(), all);
  double load[1] = {0};
  if (::getloadavg(load, 1) == 1 && load[0] > kBusy)
    log_warn("this host is busy (load average {:.1f}): times will be off, and ratios less certain", load[0]);
  if (options.places > 0 && options.places_are == "cores" && options.ranks.back() * options.threads > options.places)
    log_warn("{} ranks with {} thread{} share {} core{}: such cases are marked", options.ranks.back(), options.threads,
             options.threads == 1 ? "" : "s", options.places, options.places == 1 ? "" : "s");
  Progress progress(all);
  std::size_t done = all - missing.size();
  int code = 0;
  for (const ScalingJob& job : missing) {
    progress.show(++done, job, options.rounds);
    if (failures.contains(job.one)) continue;  // it would fail again
    ProgramResult ended;
    try {
      throw_if_stopped("measuring");
      ended = run_program(command_of(options, job.one));
    } catch (const InterruptedError&) {
      progress.clear();
      throw InterruptedError(stop_signal(), fmt::format("measuring; {} has {} of {} jobs, and the same command "
                                                        "continues",
                                                        options.out, done - 1, all));
    }
    if (ended.code == 0) {
      journal.add(job.one, job.round, result_of(ended.out));
      continue;
    }
    progress.clear();
    if (ended.code == static_cast<int>(ExitCode::kUsage))
      throw UsageError(fmt::format("{} was refused: {}", text_of(job.one), last_line(ended.err)));
    std::fputs(ended.err.c_str(), stderr);
    log_error("{} failed with exit code {}; the others continue", text_of(job.one), ended.code);
    failures[job.one] = fmt::format("exit code {}, {}", ended.code, last_line(ended.err));
    if (code == 0) code = ended.code;
  }
  return code;
}

}  // namespace

Facts settings_of(const ScalingOptions& options) {
  return {{"models", join(options.models, ",")},
          {"mode", words_of_modes(options.modes)},
          {"ranks", words_of_ranks(options.ranks)},
          {"hosts", options.hosts},
          {"device", options.device},
          {"batch", fmt::to_string(options.batch)},
          {"global-batch", fmt::to_string(options.global_batch)},
          {"threads", fmt::to_string(options.threads)},
          {"steps", fmt::to_string(options.steps)},
          {"warmup-steps", fmt::to_string(options.warmup_steps)},
          {"flags of bench step", join(options.step_flags, " ")}};
}

Facts describe_machine(const ScalingOptions& options) {
  const devices::Cpu cpu = devices::read_cpu();
  utsname system = {};
  ::uname(&system);
  double load[1] = {0};
  if (::getloadavg(load, 1) != 1) load[0] = 0;
  std::string distribution = first_line_of("/etc/os-release", "PRETTY_NAME=");
  std::erase(distribution, '"');
  Facts facts = {
      {"date", now_in_words()},
      {"host", system.nodename},
      {"CPU", cpu.model.value_or("unknown")},
      {"instruction set", cpu_instruction_set()},
      {"cores", fmt::format("{} of {} usable", cpu.usable_processors.value_or(0), cpu.processors.value_or(0))},
      {"memory", human_bytes(static_cast<double>(cpu.memory_bytes.value_or(0)))}};
  if (const std::string gpus = gpus_in_words(); !gpus.empty()) facts.emplace_back("GPUs", gpus);
  if (!options.hosts.empty()) facts.emplace_back("hosts", options.hosts);
  facts.emplace_back(kPlaces, fmt::format("{} {}", options.places, options.places_are));
  facts.emplace_back("network", links_in_words());
  facts.emplace_back("system", fmt::format("{}, {} {}", distribution, system.sysname, system.release));
  facts.emplace_back("load average", fmt::format("{:.2f}", load[0]));
  facts.emplace_back("command", options.command);
  for (const auto& version : options.versions)
    if (value_of(facts, version.first).empty()) facts.push_back(version);  // "instruction set" is among them
  return facts;
}

bool is_main_fact(std::string_view name) {
  static const std::set<std::string, std::less<>> kMain = {"date",    "host",         "CPU",     "instruction set",
                                                           "cores",   "memory",       "GPUs",    "hosts",
                                                           "network", "load average", "command", "lockstep"};
  return kMain.contains(name);
}

std::vector<ScalingJob> plan_of(const ScalingOptions& options) {
  std::vector<ScalingCase> cases;
  for (const ScalingMode mode : options.modes)
    for (const std::string& model : options.models)
      for (const int ranks : options.ranks) cases.push_back({mode, model, ranks});
  std::vector<ScalingJob> jobs;
  for (std::int64_t round = 1; round <= options.rounds; ++round) {
    for (const ScalingCase& one : cases) jobs.push_back({round, one});
    std::ranges::reverse(cases);
  }
  return jobs;
}

std::vector<std::string> command_of(const ScalingOptions& options, const ScalingCase& one) {
  std::vector<std::string> words = {options.program, "launch", "-n", std::to_string(one.ranks), "--no-prefix"};
  if (!options.hosts.empty()) words.insert(words.end(), {"--hosts", options.hosts});
  const bool weak = one.mode == ScalingMode::kWeak;
  words.insert(words.end(),
               {"--", "lockstep", "bench", "step", one.model, weak ? "--batch" : "--global-batch",
                std::to_string(weak ? options.batch : options.global_batch), "--threads",
                std::to_string(options.threads), "--steps", std::to_string(options.steps), "--warmup-steps",
                std::to_string(options.warmup_steps), "--device", options.device, "--json"});
  words.insert(words.end(), options.step_flags.begin(), options.step_flags.end());
  return words;
}

int bench_scaling(ScalingOptions options) {
  watch_for_stops();
  check_usage(comm::discover_world(env).size == 1, "bench scaling as one of several ranks",
              "start it without a launcher: it starts its jobs itself");
  complete(options);
  const Facts settings = settings_of(options);
  // What can be refused is refused before hours of measuring.
  std::optional<ScalingFile> before;
  if (!options.baseline.empty()) {
    check_usage(!is_same_file(options.baseline, options.out), "--baseline is the file of --out",
                "give --out another file: the baseline is an earlier run's");
    before = parse_scaling(MappedFile(options.baseline).text(), options.baseline);
    check_baseline(*before, settings, options.rounds, options.baseline);
  }
  for (const std::string& path : {options.html, options.svg})
    if (!path.empty()) AtomicFile{path};
  const Facts machine = describe_machine(options);
  ScalingJournal journal(options.out, settings, machine);
  std::map<ScalingCase, std::string> failures;
  const int code = measure(options, machine, journal, failures);

  ScalingReport report = report_of(options, journal.file(), failures);
  bool slower = false;
  if (before) {
    report.baseline = options.baseline;
    report.baseline_machine = before->machine;
    report.slower_by = options.slower_by;
    report.changes = compare(*before, journal.file(), options.slower_by);
    slower = std::ranges::any_of(report.changes,
                                 [](const auto& change) { return change.outcome == ScalingChange::Outcome::kSlower; });
  }
  std::fputs(text_of(report, options.format).c_str(), stdout);
  if (!options.html.empty()) write_whole_file(options.html, page_of(report));
  if (!options.svg.empty()) write_whole_file(options.svg, figure_of(report));
  return code != 0 ? code : slower ? 1 : 0;
}

}  // namespace lockstep::bench
