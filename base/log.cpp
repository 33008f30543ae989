#include "base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <mutex>
#include <string>
#include <utility>

#include "base/signals.h"
#include "base/text.h"

namespace lockstep {
namespace {

struct LogState {
  std::mutex mutex;
  std::string prefix;
  void (*hook)() = nullptr;
  LogReceiver receiver;  // empty: the logger
  std::function<void(std::string_view)> warning_observer;
  std::shared_ptr<spdlog::logger> logger = [] {
    auto made = std::make_shared<spdlog::logger>("lockstep", std::make_shared<spdlog::sinks::stderr_sink_st>());
    made->set_pattern("%v");
    made->set_level(spdlog::level::trace);
    made->flush_on(spdlog::level::trace);
    return made;
  }();
};

LogState& state() {
  // Never destroyed: threads may log while the process exits.
  static auto* const made = new LogState;
  return *made;
}

constexpr int kNotChosen = -1;
std::atomic<int> g_level{kNotChosen};

const char* tag(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug: return "debug: ";
    case LogLevel::kWarn: return "warning: ";
    case LogLevel::kError: return "error: ";
    case LogLevel::kInfo: break;
  }
  return "";
}

}  // namespace

void set_log_identity(int rank, int world_size, std::string host) {
  auto& log = state();
  const std::lock_guard lock(log.mutex);
  log.prefix = world_size > 1 ? fmt::format("[rank {} host {}] ", rank, host) : std::string();
  if (rank > 0) set_log_level(LogLevel::kWarn);
}

void set_log_level(LogLevel level) { g_level = static_cast<int>(level); }

void choose_log_level(LogLevel level) {
  int expected = kNotChosen;
  g_level.compare_exchange_strong(expected, static_cast<int>(level));
}

bool log_enabled(LogLevel level) {
  const int least = g_level.load(std::memory_order_relaxed);
  return static_cast<int>(level) >= (least == kNotChosen ? static_cast<int>(LogLevel::kWarn) : least);
}

void set_log_receiver(LogReceiver receiver) {
  auto& log = state();
  const std::lock_guard lock(log.mutex);
  log.receiver = std::move(receiver);
}

void set_log_hook(void (*before_line)()) {
  auto& log = state();
  const std::lock_guard lock(log.mutex);
  log.hook = before_line;
}

void set_warning_observer(std::function<void(std::string_view text)> observer) {
  auto& log = state();
  const std::lock_guard lock(log.mutex);
  log.warning_observer = std::move(observer);
}

void log_text(LogLevel level, std::string_view text) {
  auto& log = state();
  const std::lock_guard lock(log.mutex);
  if (log.hook != nullptr) log.hook();
  // Whatever names, paths and messages of libraries hold, a warning or an error is one line.
  const bool is_one_line = level == LogLevel::kWarn || level == LogLevel::kError;
  if (level == LogLevel::kWarn && log.warning_observer) log.warning_observer(one_line(text));
  if (log.receiver) return log.receiver(level, one_line(text));
  const BrokenPipesTolerated tolerated;
  log.logger->log(spdlog::level::info, "{}{}{}", log.prefix, tag(level), is_one_line ? one_line(text) : text);
}

}  // namespace lockstep
