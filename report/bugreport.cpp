// lockstep bugreport: what helps others to find out why a job failed, in one archive, without secrets.
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <zip.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <regex>

#include "base/error.h"
#include "base/file.h"
#include "base/flight_snapshot.h"
#include "base/text.h"
#include "launcher/inspect.h"
#include "lockstep/base/env.h"
#include "options/sources.h"
#include "options/values.h"
#include "report/report.h"

namespace lockstep::report {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostBytes = std::size_t{1} << 20;  // of a file's beginning, and of its end
constexpr std::size_t kMostFiles = 500;
constexpr int kMostInspected = 64;
constexpr const char* kOutputRemedy = "choose another --output";

struct Entry {
  std::string name, text;
};

/// The beginning and the end of a file that is long.
std::string excerpt_of(const std::string& path) {
  RegularFile file = open_regular(path);
  if (!file.problem.empty()) return fmt::format("(not read: {})\n", file.problem);
  std::string text(std::min<std::uint64_t>(file.size, 2 * kMostBytes), '\0');
  std::size_t count = 0;
  const bool cut = file.size > text.size();
  const std::size_t first = cut ? kMostBytes : text.size();
  if (const auto problem = file.read(std::as_writable_bytes(std::span(text).first(first)), count); !problem.empty())
    return fmt::format("(not read: {})\n", problem);
  if (!cut) {
    text.resize(count);
    return text;
  }
  const ssize_t last =
      ::pread(file.fd.get(), text.data() + first, kMostBytes, static_cast<off_t>(file.size - kMostBytes));
  text.resize(first + static_cast<std::size_t>(std::max<ssize_t>(last, 0)));
  text.insert(first, fmt::format("\n(… {} bytes are left out …)\n", file.size - 2 * kMostBytes));
  return text;
}

std::string environment() {
  std::string text;
  for (const char* prefix : {"LOCKSTEP", "NCCL_", "CUDA_", "OMP", "GOMP", "OMPI_", "PMIX_", "SLURM_", "ONEDNN_",
                             "DNNL_", "UCX_", "FI_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LD_", "MALLOC_"})
    for (const auto& name : env_names(prefix)) text += fmt::format("{}={}\n", name, env(name.c_str()).value_or(""));
  return text;
}

std::string host() {
  struct utsname name = {};
  if (::uname(&name) != 0) return {};
  std::string text = fmt::format("{} {} {} {}\n", name.sysname, name.release, name.version, name.machine);
  for (const char* path : {"/etc/os-release", "/proc/cpuinfo", "/proc/meminfo", "/proc/self/limits",
                           "/proc/self/cgroup", "/proc/driver/nvidia/version"}) {
    std::error_code none;
    if (!fs::exists(path, none)) continue;
    std::string content;
    if (std::ifstream in(path, std::ios::binary); in) content.assign(std::istreambuf_iterator<char>(in), {});
    // One processor stands for all.
    if (std::string_view(path) == "/proc/cpuinfo") content.resize(std::min(content.size(), content.find("\n\n")));
    text += fmt::format("\n== {}\n{}", path, content);
  }
  return text;
}

/// Logs, metrics and flight records in a directory, and in `flight` below it.
void add_directory(const fs::path& directory, const std::string& within, std::vector<Entry>& entries) {
  std::vector<fs::path> paths;
  std::error_code error;
  for (auto entry = fs::directory_iterator(directory, error); !error && entry != fs::directory_iterator();
       entry.increment(error))
    paths.push_back(entry->path());
  std::ranges::sort(paths);
  for (const auto& path : paths) {
    std::error_code none;
    const std::string name = path.filename().string();
    const bool wanted = path.extension() == ".log" || path.extension() == ".jsonl" || path.extension() == ".toml" ||
                        (name.ends_with(".csv") && begins_as_metrics(path.string()));
    if (wanted && fs::is_regular_file(path, none) && entries.size() < kMostFiles)
      entries.push_back({within + name, excerpt_of(path.string())});
  }
  std::error_code none;
  if (!fs::is_directory(directory / "flight", none)) return;
  std::string inspected;
  int count = 0;
  for (const auto& path : launcher::records_at((directory / "flight").string())) {
    if (++count > kMostInspected) break;
    try {
      inspected += launcher::text_of(flight::decode(flight::read_bytes(path), path), 50) + "\n";
    } catch (const IoError& refusal) {
      inspected += refusal.line() + "\n";
    }
  }
  entries.push_back({within + "flight.txt", inspected});
}

struct ZipCloser {
  void operator()(zip_t* archive) const { zip_discard(archive); }
};

void write_archive(const std::string& path, const std::vector<Entry>& entries) {
  const auto fail = [&](const std::string& why) {
    throw IoError(fmt::format("cannot write {}: {}", path, why), kOutputRemedy);
  };
  int code = 0;
  std::unique_ptr<zip_t, ZipCloser> archive(zip_open(path.c_str(), ZIP_CREATE | ZIP_TRUNCATE, &code));
  if (archive == nullptr) {
    zip_error_t error;
    zip_error_init_with_code(&error, code);
    const std::string why = zip_error_strerror(&error);
    zip_error_fini(&error);
    fail(why);
  }
  for (const auto& entry : entries) {
    zip_source_t* const source = zip_source_buffer(archive.get(), entry.text.data(), entry.text.size(), 0);
    if (source == nullptr ||
        zip_file_add(archive.get(), ("bugreport/" + entry.name).c_str(), source, ZIP_FL_ENC_UTF_8) < 0) {
      if (source != nullptr) zip_source_free(source);
      fail(zip_strerror(archive.get()));
    }
  }
  if (zip_close(archive.get()) != 0) fail(zip_strerror(archive.get()));
  static_cast<void>(archive.release());  // which closing has ended
}

}  // namespace

std::string without_secrets(const std::string& text) {
  // Names that say that their value is one, with = or : and quotes; tokens in headers; passwords in addresses.
  // All begin with a word of their own: what begins with any letters would try them from each letter on.
  static const std::regex kNamed(
      R"re(((?:SECRET|TOKEN|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIAL)[A-Za-z0-9_-]*"?\s*[=:]\s*"?)([^\s"',}]+))re",
      std::regex::icase | std::regex::optimize);
  static const std::regex kHeader(R"re(((?:Bearer|Basic)\s+)([A-Za-z0-9._~+/=-]{8,}))re",
                                  std::regex::icase | std::regex::optimize);
  static const std::regex kAddress(R"re((://[^\s/:@]*:)([^\s/@]+)(@))re", std::regex::optimize);
  static const std::regex kKnown(
      R"re(\b(?:AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{20,}|hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,})\b)re",
      std::regex::optimize);
  std::string safe;
  // In pieces, which end with a line or at least at a comma: expressions take stack for each byte.
  constexpr std::size_t kPiece = 4096;
  for (std::size_t at = 0; at < text.size();) {
    std::string_view piece = std::string_view(text).substr(at, kPiece);
    if (const auto end = piece.rfind('\n'); end != std::string_view::npos)
      piece = piece.substr(0, end + 1);
    else if (const auto comma = piece.rfind(','); piece.size() == kPiece && comma != std::string_view::npos)
      piece = piece.substr(0, comma + 1);
    std::string line(piece);
    line = std::regex_replace(line, kNamed, "$1(removed)");
    line = std::regex_replace(line, kHeader, "$1(removed)");
    line = std::regex_replace(line, kAddress, "$1(removed)$3");
    safe += std::regex_replace(line, kKnown, "(removed)");
    at += piece.size();
  }
  if (const auto secret = env("LOCKSTEP_JOB_SECRET"); secret && secret->size() >= 16)
    for (auto at = safe.find(*secret); at != std::string::npos; at = safe.find(*secret, at))
      safe.replace(at, secret->size(), "(removed)");
  return safe;
}

options::OptionTable bugreport_options(BugreportOptions& options) {
  options::OptionTable table("bugreport",
                             "Packs what helps others to find out why a job failed: logs, flight records, metrics, "
                             "settings, versions, the host. Values whose names say that they are secret are removed; "
                             "look into the archive before you send it.");
  table.positional(
      {"RUN", "the --log-dir of the job, a directory with its metrics file, or that file", options::text(options.run)});
  table.group("Flags");
  table.add({.name = "output",
             .synonyms = {"o"},
             .placeholder = "FILE.zip",
             .help = "the archive; no file that is there",
             .default_text = options.output,
             .value = options::text(options.output)});
  options::add_config_option(table);
  return table;
}

std::string bugreport(const BugreportOptions& options, const std::string& version) {
  std::error_code none;
  if (!fs::exists(options.run, none))
    throw IoError(fmt::format("{}: No such file or directory", options.run),
                  "give the job's --log-dir or metrics file");
  if (fs::exists(options.output, none))
    throw UsageError(fmt::format("--output {} is there already", options.output), "name another file, or remove it");
  std::vector<Entry> entries = {{"version.txt", version}, {"host.txt", host()}, {"environment.txt", environment()}};
  const std::size_t own = entries.size();
  if (fs::is_directory(options.run, none)) {
    add_directory(options.run, "", entries);
    if (fs::is_directory(fs::path(options.run) / "logs", none))
      add_directory(fs::path(options.run) / "logs", "logs/", entries);
  } else {
    entries.push_back({fs::path(options.run).filename().string(), excerpt_of(options.run)});
  }
  if (entries.size() == own)
    throw IoError(fmt::format("{}: no log, metrics file or flight record is in it", options.run),
                  "give the job's --log-dir or metrics file");
  std::string list;
  for (auto& entry : entries) {
    entry.text = without_secrets(entry.text);
    list += fmt::format("  {} ({})\n", entry.name, human_bytes(static_cast<double>(entry.text.size())));
  }
  write_archive(options.output, entries);
  return fmt::format("{}\n{}look into it before you send it\n", options.output, list);
}

}  // namespace lockstep::report
