#include "trainer/status_server.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/flight_record.h"
#include "base/flight_snapshot.h"
#include "base/log.h"
#include "base/network.h"
#include "base/text.h"
#include "comm/flight.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/env.h"
#include "trainer/http_server.h"
#include "trainer/scores.h"

namespace lockstep::trainer {
namespace {

constexpr const char* kTokenVariable = "LOCKSTEP_STATUS_TOKEN";
constexpr std::size_t kLeastToken = 16, kMostToken = 1024;

/// Of a file, which ends with a line's end or not.
std::string first_bytes_of(const std::string& path) {
  RegularFile file = open_regular(path);
  std::string text(kMostToken + 2, '\0');
  std::size_t length = 0;
  if (file.problem.empty()) file.problem = file.read(std::as_writable_bytes(std::span(text)), length);
  if (!file.problem.empty())
    throw IoError(fmt::format("cannot read the token in {}: {}", path, file.problem),
                  file.remedy_or("give --status-token-file a file with the token alone"));
  return std::string(trim(text.substr(0, length)));
}

/// Empty: there is none.
std::string token_of(const TrainConfig& config) {
  const bool in_file = !config.status_token_file.empty();
  const auto in_environment = env(kTokenVariable);
  if (!in_file && !in_environment) return {};
  std::string token = in_file ? first_bytes_of(config.status_token_file) : *in_environment;
  const bool sendable = std::ranges::all_of(token, [](char c) { return c > ' ' && c < 0x7f; });
  if (token.size() < kLeastToken || token.size() > kMostToken || !sendable)
    throw UsageError(fmt::format("the token in {} is not {} to {} letters, digits and signs of ASCII",
                                 in_file ? config.status_token_file : kTokenVariable, kLeastToken, kMostToken),
                     "make one with `openssl rand -hex 16`");
  return token;
}

UniqueFd listen(const TrainConfig& config, bool has_token) {
  const std::string host = config.status_address.empty() ? loopback_address() : config.status_address;
  const auto address = parse_address(host, *config.status_port);
  if (!address)
    throw UsageError(fmt::format("--status-address {} is no IP address", host),
                     "give one of this host, 0.0.0.0 for all of them, or leave it out for loopback");
  if (!address->is_loopback() && !has_token)
    throw UsageError(
        fmt::format("--status-address {} without a token: everybody who reaches that port could follow the run", host),
        fmt::format("set {} to a secret text, for example from `openssl rand -hex 16`, or give --status-token-file",
                    kTokenVariable));
  UniqueFd socket = listen_at(*address);
  if (socket) return socket;
  const int why = errno;
  if (why == EADDRINUSE)
    throw UsageError(fmt::format("--status-port {}: {} is in use", *config.status_port, address->text()),
                     "choose another port, or 0 for a free one");
  throw UsageError(
      fmt::format("--status-port {}: cannot listen at {}: {}", *config.status_port, address->text(), errno_text(why)),
      why == EADDRNOTAVAIL ? "give --status-address an address of the host that rank 0 is on"
                           : "choose another port, from 1024 on");
}

// Prometheus' text format, version 0.0.4.

std::string value_text(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  return fmt::format("{}", value);
}

std::string label(std::string_view name, std::string_view value) {
  std::string text = std::string(name) + "=\"";
  for (const char c : printable(value)) {
    if (c == '"' || c == '\\') text += '\\';
    text += c;
  }
  return text + '"';
}

class Metrics004 {
 public:
  /// The lines that begin a metric.
  void begin(std::string_view name, std::string_view type, std::string_view help) {
    name_ = fmt::format("lockstep_{}", name);
    text_ += fmt::format("# HELP {0} {1}\n# TYPE {0} {2}\n", name_, help, type);
  }
  void add(double value, std::string_view labels = {}) {
    text_ += labels.empty() ? fmt::format("{} {}\n", name_, value_text(value))
                            : fmt::format("{}{{{}}} {}\n", name_, labels, value_text(value));
  }
  void gauge(std::string_view name, double value, std::string_view help) {
    begin(name, "gauge", help);
    add(value);
  }
  const std::string& text() const { return text_; }

 private:
  std::string name_, text_;
};

class StatusServer final : public Follower {
 public:
  StatusServer(const TrainConfig& config, std::int64_t done)
      : patience_(duration_of(config.stall_warning_seconds)), state_{.step = {.step = done}} {
    std::string token = token_of(config);
    UniqueFd listener = listen(config, !token.empty());
    const auto address = own_address(listener);
    server_.emplace(std::move(listener), std::move(token),
                    [this](const HttpRequest& request) { return answer(request); });
    if (address) log_info("status of this run: http://{0}/metrics, http://{0}/healthz", address->text());
  }

  using Follower::write;
  void write(const RunReport& report) override {
    auto run = std::make_shared<const RunReport>(report);
    const std::lock_guard lock(mutex_);
    state_.run = std::move(run);
  }
  void write(const RestartReport& report) override {
    const std::lock_guard lock(mutex_);
    state_.restarts = report.attempt;
  }
  void write(const StepReport& report) override {
    const std::lock_guard lock(mutex_);
    const double norm = std::isnan(report.grad_norm) ? state_.step.grad_norm : report.grad_norm;
    state_.step = report;  // its phases say when
    state_.step.grad_norm = norm;
  }
  void write(const EvalReport& report) override {
    auto evaluation = std::make_shared<const EvalReport>(report);
    const std::lock_guard lock(mutex_);
    (report.of_average ? state_.of_average : state_.evaluation) = std::move(evaluation);
    state_.heard = Clock::now();
  }
  void write(const CheckpointReport& report) override {
    const std::lock_guard lock(mutex_);
    state_.checkpoint = report.step;
    state_.heard = Clock::now();
  }
  void write(const FinalReport& /*report*/) override {
    const std::lock_guard lock(mutex_);
    state_.heard = Clock::now();
  }

 private:
  struct State {
    std::shared_ptr<const RunReport> run = {};
    int restarts = 0;
    StepReport step = {};
    std::shared_ptr<const EvalReport> evaluation = {}, of_average = {};
    std::optional<std::int64_t> checkpoint = {};
    Clock::time_point heard = Clock::now();
  };

  State state() const {
    const std::lock_guard lock(mutex_);
    return state_;
  }

  HttpAnswer answer(const HttpRequest& request) const {
    const bool metrics = request.path == "/metrics", health = request.path == "/healthz";
    if (!metrics && !health) return {.status = 404, .body = "there are /metrics and /healthz\n"};
    if (request.method != "GET") return {.status = 405, .body = "it answers GET\n", .header = "Allow: GET\r\n"};
    const State now = state();
    if (metrics) return {.body = metrics_of(now), .type = "text/plain; version=0.0.4; charset=utf-8"};
    const std::string stall = stall_of(now);
    return {.status = stall.empty() ? 200 : 503, .body = (stall.empty() ? "ok" : stall) + "\n"};
  }

  /// Empty, or one line (Note [Health]).
  std::string stall_of(const State& state) const {
    if (patience_ == Clock::duration::zero()) return {};
    const auto now = Clock::now();
    const Clock::time_point phase{std::chrono::nanoseconds(flight::phase_since_ns())};
    const auto patience = std::max(patience_, duration_of(3e-3 * state.step.step_ms));
    const Clock::time_point moved = std::max(state.heard, phase);
    if (now - moved <= patience) return {};
    std::string where = comm::where_is(0);
    if (where.empty()) where = fmt::format(", in phase {} ", flight::name_of(flight::phase()));
    return fmt::format("no step for {:.0f} s{}", seconds_between(moved, now), trim(where));
  }

  std::string metrics_of(const State& state) const {
    Metrics004 to;
    const StepReport& step = state.step;
    if (const auto& run = state.run) {
      to.begin("info", "gauge", "What the run is.");
      to.add(1, fmt::format("{},{},{},{}", label("version", run->version), label("model", run->model),
                            label("data", run->data), label("ranks", fmt::to_string(run->ranks.size()))));
      to.gauge("planned_steps", static_cast<double>(run->steps), "Steps of the whole run.");
    }
    to.gauge("healthy", stall_of(state).empty() ? 1 : 0, "0 when the run is stalled, as /healthz has it.");
    to.gauge("restarts", state.restarts, "How often the launcher has started the job again.");
    to.gauge("step", static_cast<double>(step.step), "Steps done.");
    if (step.epoch > 0) add_step(to, step);
    if (state.checkpoint)
      to.gauge("checkpoint_step", static_cast<double>(*state.checkpoint), "Step of the last checkpoint.");
    if (state.evaluation) add_evaluations(to, state);
    return to.text();
  }

  static void add_step(Metrics004& to, const StepReport& step) {
    to.gauge("epoch", static_cast<double>(step.epoch), "Epoch of the last step, from 1.");
    to.gauge("loss", step.loss, "Mean loss of the last step's global batch.");
    to.gauge("learning_rate", step.lr, "Learning rate of the last step.");
    to.gauge("gradient_norm", step.grad_norm,
             "L2 norm of all gradients before clipping, of the last step in which it was found.");
    if (step.scaling) to.gauge("loss_scale", step.scaling->scale, "Factor of the last step's loss.");
    to.begin("samples_total", "counter", "Samples of all ranks since the process began.");
    to.add(static_cast<double>(step.samples));
    to.gauge("samples_per_second", step.samples_per_s, "Samples of all ranks per second, in the last step.");
    to.gauge("step_seconds", 1e-3 * step.step_ms, "Time of the last step.");
    to.gauge("communication_wait_seconds", 1e-3 * step.comm_wait_ms,
             "Time that rank 0 waited for collectives in the last step.");
    to.gauge("memory_bytes", static_cast<double>(step.memory_bytes),
             "Resident memory of rank 0; on a GPU, what it holds there.");
  }

  static void add_evaluations(Metrics004& to, const State& state) {
    const auto each = [&](const auto& add) {
      add(*state.evaluation, label("weights", "last"));
      if (state.of_average) add(*state.of_average, label("weights", "average"));
    };
    to.begin("validation_step", "gauge", "Step of the last evaluation.");
    each([&](const EvalReport& report, const std::string& weights) {
      to.add(static_cast<double>(report.step), weights);
    });
    for (const auto& [name, value] : all_figures(*state.evaluation)) {
      if (std::isnan(value)) continue;
      to.begin("validation_" + name, "gauge", "Of the last evaluation.");
      each([&](const EvalReport& report, const std::string& weights) {
        for (const auto& [other, figure] : all_figures(report))
          if (other == name) to.add(figure, weights);
      });
    }
  }

  const Clock::duration patience_;
  mutable std::mutex mutex_;
  State state_;
  std::optional<HttpServer> server_;  // ends first: it asks this
};

}  // namespace

std::unique_ptr<Follower> make_status_server(const TrainConfig& config, std::int64_t done) {
  return std::make_unique<StatusServer>(config, done);
}

}  // namespace lockstep::trainer
