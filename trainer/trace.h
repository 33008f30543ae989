// What every rank did when, in the format of Chrome's and Perfetto's trace viewers; and how far the ranks' clocks are
// apart, for one time in all of it.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/ddp/reducer.h"
#include "lockstep/nn/layers/module.h"
#include "session/saved_file.h"

namespace lockstep::trainer {

/// What two ranks know of one exchange of clock readings, each on its own clock: both read their clock and send it,
/// then note when the other's reading has come.
struct ClockExchange {
  Clock::time_point sent_by_0, received_by_0;
  Clock::time_point sent, received;  // by the other rank
};

/// What must be added to the other rank's clock to get rank 0's lies within these bounds: nothing arrives before it was
/// sent (Cristian, "Probabilistic clock synchronization", 1989).
struct ClockBounds {
  Clock::duration least, most;
};
ClockBounds clock_bounds(const std::vector<ClockExchange>& exchanges);

/// Collective: `rounds` exchanges of every rank with rank 0; this rank's.
std::vector<ClockExchange> exchange_clocks(comm::ProcessGroup& group, int rounds);

/// Collective: what to add to this rank's clock to get rank 0's. Ranks under one kernel share a clock: exactly zero.
/// Otherwise the middle of clock_bounds, wrong by at most half of the fastest exchange.
Clock::duration ahead_of_this_clock(comm::ProcessGroup& group);

/// Collects the events of this rank; at the end rank 0 writes those of all ranks into one file, on one clock. A rank is
/// a process there (`pid`), a row is one of its threads (`tid`). One thread uses it.
///
/// It keeps the first kMostEvents events of a rank (about 40 MB); later ones are dropped, and the file says so.
class Trace {
 public:
  static constexpr std::size_t kMostEvents = std::size_t{1} << 19;

  /// The rows of a rank, from the top. Spans of one row do not overlap, unless one holds the other.
  enum Row : std::int32_t {
    kSteps = 0,          // steps, evaluations
    kComputation = 1,    // data, operators, optimizer, waiting
    kFirstLoader = 10,   // kFirstLoader + w: what loader thread w does
    kFirstBucket = 1000  // kFirstBucket + b: bucket b's collectives
  };

  /// Collective: compares the ranks' clocks.
  Trace(std::string path, comm::ProcessGroup& group);
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  /// Throws IoError unless a file can be written there: to know before hours of training.
  static void check_path(const std::string& path);

  /// A copy of `name` that lives as long as the trace.
  std::string_view keep(std::string name);

  /// `name` must live as long as the trace. `bytes` of -1 are not shown.
  void span(std::int32_t row, std::string_view name, Clock::time_point begin, Clock::time_point end,
            std::int64_t bytes = -1);
  void instant(std::int32_t row, std::string_view name, Clock::time_point when);
  /// When each bucket was ready, and when its collective started and ended.
  void buckets(const ddp::StepTimeline& timeline);

  /// The training step that events recorded from now on belong to.
  void set_step(std::int64_t step) { step_ = step; }

  /// Collective: rank 0 writes the file, which it returns. Throws IoError there, and PeerError elsewhere.
  std::optional<session::SavedFile> write(comm::ProcessGroup& group);
  /// After a failure: rank 0 writes what it has itself seen. Never throws.
  void write_own() noexcept;

 private:
  struct Event {
    std::string_view name;
    Clock::time_point begin, end;  // equal: an instant
    std::int64_t step, bytes;
    std::int32_t row;
    bool is_instant;
  };

  void add(const Event& event);
  /// This rank's events from `from` on, as JSON objects with a comma before each; at most `most_bytes`, at least one.
  std::string encode(std::size_t& from, std::size_t most_bytes) const;
  std::string encode_names() const;
  double microseconds(Clock::time_point when) const;

  std::string path_, host_;
  int rank_;
  Clock::duration ahead_{};  // what is added to this rank's clock to get rank 0's
  Clock::time_point zero_;   // the file's time 0, on rank 0's clock
  std::int64_t step_ = -1;
  bool full_ = false;
  std::vector<Event> events_;
  std::deque<std::string> names_;
};

/// Records a span from here to the end of the scope; nothing where `trace` is nullptr.
class TraceSpan {
 public:
  TraceSpan(Trace* trace, std::int32_t row, std::string_view name)
      : trace_(trace), row_(row), name_(name), begin_(trace != nullptr ? Clock::now() : Clock::time_point{}) {}
  ~TraceSpan() {
    if (trace_ != nullptr) trace_->span(row_, name_, begin_, Clock::now());
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  Trace* trace_;
  std::int32_t row_;
  std::string_view name_;
  Clock::time_point begin_;
};

/// Records every operator of a tape, forward and backward, as "conv1 conv2d" and "conv1 conv2d backward"; those without
/// parameters go by the operator alone. The trace must outlive it.
class LayerTrace final : public nn::TapeObserver {
 public:
  LayerTrace(Trace& trace, const nn::Module& module);

  void op_begins() override { begin_ = Clock::now(); }
  void op_ended(const nn::OpLabel& label, bool backward) override;

 private:
  using Key = std::pair<const void*, bool>;  // a parameter or, of an operator without, its name; backward

  Trace& trace_;
  std::map<const nn::Parameter*, std::string> layers_;
  std::map<Key, std::string_view> names_;
  Clock::time_point begin_;
};

}  // namespace lockstep::trainer
