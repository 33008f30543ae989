#include "trainer/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/kernel.h"
#include "base/log.h"
#include "comm/agree.h"
#include "lockstep/base/env.h"

namespace lockstep::trainer {
namespace {

constexpr int kClockRounds = 16;

/// Names the kernel that this process's clock belongs to: a boot, and a time namespace of it.
std::string clock_identity() { return boot_id() + namespace_id("time"); }

struct Readings {
  Clock::time_point sent;      // this round's
  Clock::time_point received;  // when the round before had ended
};
static_assert(std::is_trivially_copyable_v<Readings>);

constexpr std::size_t kCacheBlockBytes = std::size_t{1} << 20;  // what a rank hands to rank 0 at a time
constexpr const char* kBegin = R"({"displayTimeUnit":"ms","traceEvents":[)";
// The format has no place for it, but a list that begins with a comma is no JSON: an event without meaning comes first.
constexpr const char* kFirst = R"({"name":"lockstep","ph":"M","pid":0,"tid":0,"args":{}})";
constexpr const char* kEnd = "\n]}\n";

std::string json_text(std::string_view text) { return JsonText(text).text(); }

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string row_name(std::int32_t row) {
  if (row == Trace::kSteps) return "steps";
  if (row == Trace::kComputation) return "computation";
  if (row < Trace::kFirstBucket) return fmt::format("data loader {}", row - Trace::kFirstLoader);
  return fmt::format("bucket {}", row - Trace::kFirstBucket);
}

}  // namespace

ClockBounds clock_bounds(const std::vector<ClockExchange>& exchanges) {
  LOCKSTEP_ASSERT(!exchanges.empty());
  ClockBounds bounds{Clock::duration::min(), Clock::duration::max()};
  for (const auto& e : exchanges) {
    bounds.least = std::max(bounds.least, e.sent_by_0 - e.received);
    bounds.most = std::min(bounds.most, e.received_by_0 - e.sent);
  }
  return bounds;
}

std::vector<ClockExchange> exchange_clocks(comm::ProcessGroup& group, int rounds) {
  std::vector<ClockExchange> exchanges(static_cast<std::size_t>(rounds));
  Clock::time_point received{};
  // One more: each round also shows when the one before had ended.
  for (int round = 0; round <= rounds; ++round) {
    group.barrier().wait_host();
    const Readings mine{Clock::now(), received};
    const auto all = group.all_gather_objects(std::as_bytes(std::span(&mine, 1)));
    received = Clock::now();
    Readings first;
    LOCKSTEP_ASSERT(all[0].size() == sizeof(first));
    std::memcpy(&first, all[0].data(), sizeof(first));
    if (round > 0) exchanges[static_cast<std::size_t>(round - 1)].received_by_0 = first.received;
    if (round == rounds) break;
    auto& exchange = exchanges[static_cast<std::size_t>(round)];
    exchange.sent_by_0 = first.sent;
    exchange.sent = mine.sent;
    exchange.received = received;
  }
  return exchanges;
}

Clock::duration ahead_of_this_clock(comm::ProcessGroup& group) {
  const auto identities = group.all_gather_text(clock_identity());
  const auto same = [&](const std::string& identity) { return identity == identities[0] && identity.size() > 1; };
  if (std::ranges::all_of(identities, same)) return {};
  const ClockBounds bounds = clock_bounds(exchange_clocks(group, kClockRounds));
  return bounds.least + (bounds.most - bounds.least) / 2;
}

void Trace::check_path(const std::string& path) { const AtomicFile probe(path); }

Trace::Trace(std::string path, comm::ProcessGroup& group)
    : path_(std::move(path)), host_(host_name()), rank_(group.rank()), ahead_(ahead_of_this_clock(group)) {
  // Time 0 is when the last rank comes here: no later event is before it.
  const auto now = Clock::now() + ahead_;
  zero_ =
      Clock::time_point(Clock::duration(std::ranges::max(group.all_gather_numbers(now.time_since_epoch().count()))));
}

std::string_view Trace::keep(std::string name) { return names_.emplace_back(std::move(name)); }

void Trace::add(const Event& event) {
  if (events_.size() < kMostEvents) {
    events_.push_back(event);
    return;
  }
  if (std::exchange(full_, true)) return;
  const std::string what = fmt::format("the trace is full after {} events: it ends with step {}", kMostEvents, step_);
  if (rank_ == 0) log_warn("{}; train fewer steps to see all of them", what);
}

void Trace::span(std::int32_t row, std::string_view name, Clock::time_point begin, Clock::time_point end,
                 std::int64_t bytes) {
  add({name, begin, end, step_, bytes, row, false});
}

void Trace::instant(std::int32_t row, std::string_view name, Clock::time_point when) {
  add({name, when, when, step_, -1, row, true});
}

void Trace::buckets(const ddp::StepTimeline& timeline) {
  for (std::size_t b = 0; b < timeline.buckets.size(); ++b) {
    const auto& bucket = timeline.buckets[b];
    const auto row = kFirstBucket + static_cast<std::int32_t>(b);
    instant(row, "ready", bucket.ready);
    if (bucket.end == Clock::time_point{}) continue;  // a device's: the host has not seen it
    span(row, "allreduce", bucket.start, bucket.end, static_cast<std::int64_t>(bucket.bytes));
  }
}

double Trace::microseconds(Clock::time_point when) const {
  return std::chrono::duration<double, std::micro>(when + ahead_ - zero_).count();
}

std::string Trace::encode(std::size_t& from, std::size_t most_bytes) const {
  std::string text;
  for (; from < events_.size() && text.size() < most_bytes; ++from) {
    const Event& event = events_[from];
    text += fmt::format(",\n{{\"name\":{},\"pid\":{},\"tid\":{},\"ts\":{:.3f},", json_text(event.name), rank_,
                        event.row, microseconds(event.begin));
    if (event.is_instant)
      text += R"("ph":"i","s":"t",)";
    else
      text += fmt::format(R"("ph":"X","dur":{:.3f},)", microseconds(event.end) - microseconds(event.begin));
    text += fmt::format("\"args\":{{\"step\":{}", event.step);
    if (event.bytes >= 0) text += fmt::format(",\"bytes\":{}", event.bytes);
    text += "}}";
  }
  return text;
}

std::string Trace::encode_names() const {
  const auto entry = [&](const char* what, std::int32_t row, const std::string& args) {
    return fmt::format(",\n{{\"name\":\"{}\",\"ph\":\"M\",\"pid\":{},\"tid\":{},\"args\":{{{}}}}}", what, rank_, row,
                       args);
  };
  std::string text = entry("process_name", 0, "\"name\":" + json_text(fmt::format("rank {} (host {})", rank_, host_)));
  text += entry("process_sort_index", 0, fmt::format("\"sort_index\":{}", rank_));
  std::vector<std::int32_t> rows;
  for (const Event& event : events_)
    if (std::ranges::find(rows, event.row) == rows.end()) rows.push_back(event.row);
  for (const auto row : rows) {
    text += entry("thread_name", row, "\"name\":" + json_text(row_name(row)));
    text += entry("thread_sort_index", row, fmt::format("\"sort_index\":{}", row));
  }
  return text;
}

std::optional<session::SavedFile> Trace::write(comm::ProcessGroup& group) {
  const auto begun = Clock::now();
  std::optional<AtomicFile> file;
  std::optional<IoError> failure;  // thrown when the other ranks no longer wait for this one
  const auto write = [&](std::string_view text) {
    if (failure) return;
    try {
      if (!file) file.emplace(path_);
      file->write(bytes_of(text));
    } catch (const IoError& error) {
      failure = error;
    }
  };
  if (rank_ == 0) write(std::string(kBegin) + kFirst);
  std::string piece = encode_names();
  std::size_t next = 0;
  for (bool more = true; more;) {
    for (const auto& part : group.gather_objects(bytes_of(piece), 0)) {
      write({reinterpret_cast<const char*>(part.data()), part.size()});
    }
    piece = encode(next, kCacheBlockBytes);
    more = std::ranges::max(group.all_gather_numbers(static_cast<std::int64_t>(piece.size()))) > 0;
  }
  comm::run_collectively(group, [&] {
    if (rank_ != 0) return;
    write(kEnd);
    if (!failure) file->commit();
    if (failure)
      throw IoError(fmt::format("training is complete, but its trace is lost: {}", failure->what()), failure->remedy());
  });
  return rank_ == 0 ? std::optional(session::saved_file(path_, begun)) : std::nullopt;
}

void Trace::write_own() noexcept {
  if (rank_ != 0) return;
  try {
    AtomicFile file(path_);
    file.write(bytes_of(std::string(kBegin) + kFirst + encode_names()));
    for (std::size_t next = 0; next < events_.size();) file.write(bytes_of(encode(next, kCacheBlockBytes)));
    file.write(bytes_of(kEnd));
    file.commit();
    log_warn("the run ended early: {} holds what rank 0 did", path_);
  } catch (const std::exception& error) {
    log_warn("no trace: {}", error.what());
  }
}

LayerTrace::LayerTrace(Trace& trace, const nn::Module& module) : trace_(trace) {
  for (const auto& [name, parameter] : module.named_parameters()) layers_[parameter] = name.substr(0, name.rfind('.'));
}

void LayerTrace::op_ended(const nn::OpLabel& label, bool backward) {
  const auto end = Clock::now();
  const void* const identity = label.parameter != nullptr ? static_cast<const void*>(label.parameter) : label.op;
  std::string_view& name = names_[{identity, backward}];
  if (name.empty()) {
    const auto layer = layers_.find(label.parameter);
    const std::string prefix = layer != layers_.end() ? layer->second + " " : "";
    name = trace_.keep(prefix + label.op + (backward ? " backward" : ""));
  }
  trace_.span(Trace::kComputation, name, begin_, end);
}

}  // namespace lockstep::trainer
