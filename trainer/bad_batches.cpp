#include "trainer/bad_batches.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "comm/agree.h"

namespace lockstep::trainer {
namespace {

constexpr std::int64_t kUsualMost = 10, kMost = 1'000'000;
constexpr std::size_t kMostNamed = 8;  // samples
const std::string kBefore = ", and before it ";

/// "samples 17, 203 and 30 more".
std::string samples_of(const data::Batch& batch) {
  const auto named = batch.indices.first(std::min(kMostNamed, batch.indices.size()));
  const std::string more =
      named.size() < batch.indices.size() ? fmt::format(" and {} more", batch.indices.size() - named.size()) : "";
  return fmt::format("samples {}{}", fmt::join(named, ", "), more);
}

std::string error_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    return caught.what();
  } catch (...) {
    return "the thrown object is no std::exception";
  }
}

}  // namespace

std::optional<std::int64_t> parse_limit(const std::string& text, const std::string& word, std::int64_t usual,
                                        std::int64_t most) {
  if (text == "stop") return 0;
  if (text == word) return usual;
  if (!text.starts_with(word + ":")) return std::nullopt;
  const auto given = parse_int(text.substr(word.size() + 1));
  return given && *given >= 1 && *given <= most ? given : std::nullopt;
}

BadBatchSetting parse_bad_batch(const std::string& text) {
  if (const auto most = parse_limit(text, "skip", kUsualMost, kMost)) return {.most = *most};
  throw UsageError(fmt::format("'{}' for bad batches", text),
                   fmt::format("give stop, skip, or skip:N of at most N batches, 1 to {}", kMost));
}

BadBatches::BadBatches(const std::string& setting, comm::ProcessGroup& group, nn::Backend& backend, nn::Module& model,
                       ddp::CommHook* hook, bool keeps)
    : group_(group),
      backend_(backend),
      most_(parse_bad_batch(setting).most),
      on_cpu_(backend.device().kind == DeviceKind::kCpu) {
  if (!skips_losses() && !keeps) return;
  comm::run_collectively(group_, [&] {
    if (skips_losses() && hook != nullptr && !hook->state().empty())
      throw UsageError(
          fmt::format("--on-bad-batch skip with --comm-hook {}, which keeps something from step to step", hook->name()),
          "use another hook, or leave one of the two out");
  });
  buffers_ = model.named_buffers();
  for (const auto& buffer : buffers_) before_.push_back(backend_.empty(buffer.tensor->shape(), buffer.tensor->dtype()));
}

std::optional<SkippedReport> BadBatches::look(std::int64_t step, const data::Batch& batch, bool stop) {
  if (!skips()) return std::nullopt;
  auto all = group_.all_gather_numbers((batch.error != nullptr ? 1 : 0) + (stop ? 2 : 0));
  const bool wanted = std::ranges::max(all) >= 2;
  for (auto& each : all) each &= 1;
  if (std::ranges::max(all) == 0) return std::nullopt;
  stop_wanted_ = wanted;
  if (count_ == most_)
    comm::run_collectively(group_, [&] {
      if (batch.error == nullptr) return;
      if (group_.rank() == std::ranges::find(all, 1) - all.begin())
        log_warn("--on-bad-batch has left out {} batches already, as many as it may", count_);
      std::rethrow_exception(batch.error);
    });
  return left_out(causes_of(step, batch, batch.error != nullptr ? error_of(batch.error) : std::string()));
}

void BadBatches::keep_statistics() {
  for (std::size_t i = 0; i < buffers_.size(); ++i) backend_.pointwise().copy(*buffers_[i].tensor, before_[i]);
}

void BadBatches::take_statistics_back() {
  for (std::size_t i = 0; i < buffers_.size(); ++i) backend_.pointwise().copy(before_[i], *buffers_[i].tensor);
}

std::optional<SkippedReport> BadBatches::look(const TrainingStep::Outcome& outcome, const data::Batch& batch, bool own,
                                              Find find) {
  if (!on_cpu_ || outcome.scaling || std::isfinite(outcome.totals.loss)) return std::nullopt;
  const bool skips = count_ < most_;
  std::string text;
  if (own) {
    const std::string first = find();
    text = fmt::format("{}{}{}", skips ? "the loss of " : "", samples_of(batch), skips ? " is not finite" : "") +
           (first.empty() ? "" : kBefore + first);
  }
  SkippedReport report = causes_of(outcome.step, batch, text);
  if (skips) {
    take_statistics_back();
    return left_out(std::move(report));
  }
  set_whose(report);
  return std::nullopt;
}

void BadBatches::look_at_gradients(const data::Batch& batch, Find find) {
  if (!on_cpu_) return;
  const std::string first = find();
  set_whose(causes_of(0, batch, first.empty() ? first : samples_of(batch) + kBefore + first));
}

void BadBatches::set_whose(const SkippedReport& report) {
  whose_.clear();
  if (std::ssize(report.causes) == group_.size() && group_.size() > 1) return;
  for (const auto& [rank, text] : report.causes)
    whose_ += fmt::format("{}rank {}, {}", whose_.empty() ? "" : "; ", rank, text);
}

SkippedReport BadBatches::causes_of(std::int64_t step, const data::Batch& batch, const std::string& own) {
  SkippedReport report{.step = step, .epoch = static_cast<std::int64_t>(batch.plan.epoch) + 1};
  const auto texts = group_.all_gather_text(own);
  for (std::size_t rank = 0; rank < texts.size(); ++rank)
    if (!texts[rank].empty()) report.causes.push_back({static_cast<int>(rank), texts[rank]});
  return report;
}

SkippedReport BadBatches::left_out(SkippedReport report) {
  report.count = ++count_;
  if (group_.rank() != 0) return report;
  const std::string which = fmt::format("step {} is left out, {} of at most {}", report.step, count_, most_);
  for (const auto& [rank, text] : report.causes) log_warn("{}: rank {}: {}", which, rank, text);
  if (report.causes.empty()) log_warn("{}: the sum of losses is not finite", which);
  return report;
}

}  // namespace lockstep::trainer
