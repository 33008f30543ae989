#include "trainer/metrics.h"

#include <fcntl.h>
#include <fmt/ranges.h>

#include <cerrno>
#include <chrono>
#include <cmath>

#include "base/error.h"
#include "base/log.h"

namespace lockstep::trainer {
namespace {

// JSON has no NaN and no infinity.
std::string number(double value) { return std::isfinite(value) ? fmt::format("{}", value) : "null"; }

double unix_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

Metrics::Metrics(const std::string& path) : path_(path) {
  if (path.empty()) return;
  fd_.reset(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644));
  if (!fd_)
    throw IoError(fmt::format("cannot write metrics file {}: {}", path, errno_text(errno)),
                  "choose a path in an existing, writable directory");
}

void Metrics::write_line(std::string line) {
  if (!fd_ || !failure_.empty()) return;
  line += '\n';
  const ssize_t written = ::write(fd_.get(), line.data(), line.size());
  if (written == static_cast<ssize_t>(line.size())) return;
  failure_ =
      fmt::format("metrics file {} is cut: {}", path_, written < 0 ? errno_text(errno) : "no space left on device");
  log_warn("{}; training goes on without it", failure_);
}

void Metrics::write(const StepReport& r) {
  if (!fd_) return;
  write_line(fmt::format(
      R"({{"event":"step","step":{},"epoch":{},"loss":{},"lr":{},"grad_norm":{},"step_ms":{:.4f},"comm_wait_ms":{:.4f},"samples_per_s":{:.1f},"unix_s":{:.6f}}})",
      r.step, r.epoch, number(r.loss), number(r.lr), number(r.grad_norm), r.step_ms, r.comm_wait_ms, r.samples_per_s,
      unix_seconds()));
}

void Metrics::write(const EvalReport& r) {
  write_line(fmt::format(R"({{"event":"eval","step":{},"loss":{},"accuracy":{}{},"samples":{}}})", r.step,
                         number(r.loss), number(r.accuracy),
                         r.top5 ? fmt::format(R"(,"top5":{})", number(*r.top5)) : std::string(), r.samples));
}

void Metrics::write(const FinalReport& r) {
  write_line(fmt::format(
      R"({{"event":"final","steps":{},"epochs":{},"world_size":{},"wall_s":{:.4f},"loss":{},"accuracy":{},"params_sha256":"{}","peak_memory_bytes":[{}]}})",
      r.steps, r.epochs, r.world_size, r.wall_s, number(r.loss), number(r.accuracy), r.params_sha256,
      fmt::join(r.peak_memory_bytes, ",")));
}

}  // namespace lockstep::trainer
