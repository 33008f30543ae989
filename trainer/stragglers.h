// Finds the rank, or the link between hosts, that holds the others up, and says why.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/trainer/metrics.h"

namespace lockstep::trainer {

/// Note [Stragglers]
/// All ranks' steps take the same time, because they wait for each other; what differs is what they spend it on. Each
/// rank adds up, over a window of steps, how long it waited for its data, computed, and waited for other ranks. At the
/// end of a window the ranks exchange these numbers, in one small allgather. The rank whose data and computation took
/// longest is a straggler where that exceeds the others' median by kLeastShare of a step. It is named when it did so in
/// the window before too, and has cost kLeastLostNs in windows without a break: a neighbour that is busy for a moment
/// is none. If no rank is slow and yet even the rank that waits least waits for more than half of the step, the links
/// between hosts are: among three or more hosts the one on whose links bytes were on their way for
/// kLinkFactor times as long as on the others'.
///
/// Windows end after 10 and 20 steps, so that what is slow from the start is said by step 20, and then every 20 steps.
/// The first kWarmUpSteps, in which memory and kernels are prepared, count for nothing. Computation is compared per
/// sample where ranks have different numbers of them. Where a device computes, only the wait for data is known.

/// Of one rank and one window.
struct StepTimes {
  double steps = 0;
  double samples = 0;
  double data_ns = 0;     // it waited for its batches
  double compute_ns = 0;  // the rest of its steps; zero where a device computes
  double wait_ns = 0;     // it waited for other ranks in its steps
  double delayed_ns = 0;  // its thread could have run, and had no processor
  /// For how long bytes were on their way to ranks of other hosts, those with the longest first.
  struct Peer {
    double rank = -1;  // -1: none
    double ns = 0;
  };
  std::array<Peer, 5> peers = {};
};
/// As it is sent.
inline constexpr std::size_t kStepTimesNumbers = sizeof(StepTimes) / sizeof(double);

enum class SlowBy : std::uint8_t { kNeighbour, kComputing, kData, kLink };

struct Straggler {
  SlowBy by = SlowBy::kComputing;
  int rank = -1;       // of kLink: the first rank of the host, or of the first of two
  double lost_ns = 0;  // by the job, in the window
  std::string text = {};

  /// Whether both are the same rank, or the same link.
  bool is_same_place(const Straggler& other) const;
  /// And in the same phase.
  bool is_same(const Straggler& other) const;
};

/// What one window shows, of all ranks by number, and the hosts that they are on. Nothing where it shows nothing. Pure.
std::optional<Straggler> find_straggler(std::span<const StepTimes> ranks, std::span<const std::string> hosts);

/// Adds up this rank's times and exchanges them. In a world of one there is nothing to find. The group must outlive it;
/// one thread.
class StragglerWatch {
 public:
  /// Collective. `on_device`: a device computes, and the host's times are not those of the steps.
  StragglerWatch(comm::ProcessGroup& group, bool on_device);

  /// Around the wait for a batch, and around a step with its outcome.
  void data_took(Clock::duration time);
  /// The last batch was not trained on.
  void forget_data();
  void begin_step();
  /// Collective at the end of a window. `step_time` is the step's; `samples` this rank's. What is new to say, on rank
  /// 0.
  std::optional<Straggler> end_step(Clock::duration step_time, std::uint64_t samples);

  /// Of all ranks, once after a window has ended; else empty. Until the next end_step().
  std::span<const StepTimes> take_window() {
    return std::exchange(ended_, false) ? std::span<const StepTimes>(all_) : std::span<const StepTimes>();
  }

  /// Of all whole windows, by rank, on rank 0; empty where there was none.
  std::vector<RankTimes> means() const;

  /// All that has been said, on rank 0.
  const std::vector<Straggler>& found() const { return found_; }

 private:
  void begin_window();
  std::optional<Straggler> exchange();

  comm::ProcessGroup& group_;
  const bool on_device_;
  std::vector<std::string> hosts_;
  StepTimes times_;
  std::vector<StepTimes> all_, totals_;
  std::int64_t steps_ = 0;  // of this process
  bool ended_ = false;      // a window, with the last of them, and nobody has taken it
  std::int64_t waited_before_ = 0;
  double last_data_ns_ = 0;
  double delayed_before_ = 0;
  std::vector<double> peers_before_;  // by rank
  std::optional<Straggler> suspect_;  // of the window before
  std::vector<Straggler> found_;
};

}  // namespace lockstep::trainer
