#include "launcher/restart_history.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <ctime>

#include "base/error.h"

namespace lockstep::launcher {
namespace {

std::string utc_now() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() % 1000;
  std::tm parts = {};
  ::gmtime_r(&seconds, &parts);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", parts.tm_year + 1900, parts.tm_mon + 1,
                     parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec, ms);
}

}  // namespace

RestartHistory::RestartHistory(const std::string& directory) : path_(directory + "/restarts.jsonl") {
  file_.reset(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!file_)
    throw IoError(fmt::format("--log-dir: cannot write {}: {}", path_, errno_text(errno)), "choose another directory");
}

std::string RestartHistory::add(const char* event, std::initializer_list<std::pair<const char*, JsonText>> more) {
  if (!file_) return {};
  JsonObject object({{"event", event}, {"time", utc_now()}});
  for (const auto& [name, value] : more) object.add(name, value);
  const std::string line = object.text() + "\n";
  // One write, so that another launcher that appends to the same file cuts no line.
  if (::write(file_.get(), line.data(), line.size()) == static_cast<ssize_t>(line.size())) return {};
  const int error = errno;
  file_.reset();
  return fmt::format("cannot write {}: {}; the job continues without it", path_, errno_text(error));
}

}  // namespace lockstep::launcher
