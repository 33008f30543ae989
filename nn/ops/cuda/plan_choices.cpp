#include "nn/ops/cuda/plan_choices.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <limits>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "base/cuda/runtime.h"
#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/log.h"
#include "lockstep/base/deadline.h"
#include "nn/ops/cuda/context.h"

namespace lockstep::nn::cuda {
namespace {

constexpr std::string_view kTitle = "lockstep: the fastest kernels, 1, ";
constexpr std::uint64_t kMostBytes = std::uint64_t{16} << 20;
// Longer than the file is written by far. Who has waited so long does without.
constexpr auto kPatience = std::chrono::seconds(60);
constexpr auto kNap = std::chrono::milliseconds(1);

std::uint32_t crc_of(std::string_view text) { return crc32c(std::as_bytes(std::span(text))); }

// Of the file beside it, which stays: the file itself is replaced.
class FileLock {
 public:
  explicit FileLock(const std::string& path) : fd_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
    if (!fd_) throw IoError(fmt::format("cannot open {}: {}", path, std::strerror(errno)), "");
    const auto deadline = Deadline::after(kPatience);
    while (::flock(fd_.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK && errno != EINTR)
        throw IoError(fmt::format("cannot lock {}: {}", path, std::strerror(errno)), "");
      if (deadline.expired()) throw IoError(fmt::format("another process holds {} for a minute", path), "");
      std::this_thread::sleep_for(kNap);
    }
  }

 private:
  UniqueFd fd_;  // closing it lets go
};

}  // namespace

PlanChoices::PlanChoices(std::string file) : file_(std::move(file)) {}

std::size_t PlanChoices::find(const std::string& problem, const std::vector<std::string>& names) const {
  const auto at = chosen_.find(problem);
  if (at == chosen_.end()) return names.size();
  return static_cast<std::size_t>(std::ranges::find(names, at->second) - names.begin());
}

void PlanChoices::give_up(const std::string& why) {
  usable_ = false;
  log_warn(
      "kernels are not timed, and the libraries' first ones are taken: {} → make {} writable, or give --autotune no",
      why, file_);
}

std::size_t PlanChoices::choose(const std::string& problem, const std::vector<std::string>& names,
                                FunctionRef<double(std::size_t)> seconds_of) {
  LOCKSTEP_ASSERT(!names.empty(), "no kernel to choose for {}", problem);
  if (names.size() == 1) return 0;
  const std::lock_guard lock(mutex_);
  if (const std::size_t known = find(problem, names); known < names.size()) return known;
  if (!usable_) return 0;
  std::size_t best = 0;
  try {
    read();
    if (const std::size_t known = find(problem, names); known < names.size()) return known;
    double least = PlanChoices::kClearlyFaster * seconds_of(0);
    for (std::size_t i = 1; i < names.size(); ++i) {
      const double seconds = seconds_of(i);
      if (seconds >= least) continue;
      least = seconds;
      best = i;
    }
    std::filesystem::create_directories(std::filesystem::path(file_).parent_path());
    const FileLock held(file_ + ".lock");
    read();
    if (const std::size_t known = find(problem, names); known < names.size()) return known;
    chosen_[problem] = names[best];
    write();
    return best;
  } catch (const IoError& error) {
    give_up(error.what());
  } catch (const std::filesystem::filesystem_error& error) {
    give_up(fmt::format("cannot create the directory of {}: {}", file_, error.code().message()));
  }
  // Not noted: the next run would choose anew.
  chosen_.erase(problem);
  return 0;
}

std::size_t PlanChoices::noted(const std::string& problem, const std::vector<std::string>& names) {
  const std::lock_guard lock(mutex_);
  if (const std::size_t known = find(problem, names); known < names.size()) return known;
  try {
    if (usable_) read();
  } catch (const IoError& error) {
    give_up(error.what());
  }
  const std::size_t known = find(problem, names);
  return known < names.size() ? known : 0;
}

// Lines "problem<tab>name" after the title, which ends with their checksum.
void PlanChoices::read() {
  auto opened = open_regular(file_);
  if (!opened.fd) {
    if (!std::filesystem::exists(file_)) return;
    throw IoError(fmt::format("cannot read {}: {}", file_, opened.problem), "");
  }
  std::string text(static_cast<std::size_t>(std::min(opened.size, kMostBytes)), '\0');
  std::size_t count = 0;
  const std::string problem = opened.read(std::as_writable_bytes(std::span(text)), count);
  if (!problem.empty()) throw IoError(fmt::format("cannot read {}: {}", file_, problem), "");
  text.resize(count);
  const std::size_t end = text.find('\n');
  const std::string_view body = end == std::string::npos ? "" : std::string_view(text).substr(end + 1);
  if (std::string_view(text).substr(0, end) != fmt::format("{}{:08x}", kTitle, crc_of(body))) {
    if (!std::exchange(warned_, true))
      log_warn("{} is cut, or no list of kernels: it is ignored, and replaced with the next one that is timed", file_);
    return;
  }
  for (std::size_t begin = 0; begin < body.size();) {
    const std::size_t stop = std::min(body.find('\n', begin), body.size());
    const std::string_view line = body.substr(begin, stop - begin);
    if (const std::size_t tab = line.rfind('\t'); tab != std::string_view::npos)
      chosen_.try_emplace(std::string(line.substr(0, tab)), line.substr(tab + 1));  // what is in use stays
    begin = stop + 1;
  }
}

void PlanChoices::write() const {
  std::string body;
  for (const auto& [problem, name] : chosen_) body += fmt::format("{}\t{}\n", problem, name);
  const std::string title = fmt::format("{}{:08x}\n", kTitle, crc_of(body));
  AtomicFile file(file_);
  file.write(std::as_bytes(std::span(title)));
  file.write(std::as_bytes(std::span(body)));
  file.commit();
}

namespace {

constexpr int kRounds = 3, kShortRuns = 4;
constexpr double kLongMs = 1.0;

double ms_of(const Context& context, int runs, FunctionRef<void()> run) {
  CudaEvent begin(CudaEvent::Timing::kOn), end(CudaEvent::Timing::kOn);
  const cudaStream_t stream = native(context.stream);
  begin.record(stream);
  for (int i = 0; i < runs; ++i) run();
  end.record(stream);
  end.synchronize();
  return CudaEvent::ms_between(begin, end) / runs;
}

}  // namespace

double seconds_of(Context& context, FunctionRef<void()> run) {
  const int runs = ms_of(context, 1, run) < kLongMs ? kShortRuns : 1;
  double least = std::numeric_limits<double>::infinity();
  for (int round = 0; round < kRounds; ++round) least = std::min(least, ms_of(context, runs, run));
  return least * 1e-3;
}

std::size_t choose_kernel(Context& context, const std::string& problem, const std::vector<std::string>& names,
                          FunctionRef<double(std::size_t)> seconds_of_kernel) {
  if (names.size() == 1) return 0;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(native(context.stream), &status), "asking whether work is being captured");
  const std::string here = fmt::format("{}, {}", context.gpu, problem);
  if (status != cudaStreamCaptureStatusNone) return context.choices->noted(here, names);
  try {
    return context.choices->choose(here, names, seconds_of_kernel);
  } catch (const OutOfMemoryError&) {
    return 0;
  }
}

}  // namespace lockstep::nn::cuda
