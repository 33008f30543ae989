// What a person sees while it trains: a bar on a terminal, plain lines elsewhere, nothing on other ranks than 0.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/data/dataset.h"
#include "lockstep/sampler/sampler.h"
#include "lockstep/trainer/config.h"
#include "lockstep/trainer/metrics.h"
#include "session/saved_file.h"
#include "trainer/best.h"
#include "trainer/pace.h"
#include "trainer/progress_text.h"

namespace lockstep::trainer {

/// What `config` asks for. `validation`: nullptr where nothing is evaluated.
RunPlan plan_of_run(const TrainConfig& config, const sampler::DistributedSampler& sampler,
                    const data::Dataset* validation, std::int64_t first_steps, std::int64_t total_steps);

/// Only one may exist at a time: log lines, of any thread, take its bar off the terminal first. All else is for one
/// thread.
///
/// Note [The bar]
/// The cursor rests at the bar's first column. A terminal that becomes narrower may break the bar into rows; the cursor
/// stays at its first one, so writing from there and erasing all that follows leaves nothing of it, whatever the
/// terminal does. A thread looks at the terminal's width a few times in a second, for a step may take minutes, and
/// asking works where no SIGWINCH arrives: the terminal is the launcher's. A terminal that takes nothing (Ctrl-S) gets
/// no bar meanwhile; where stdout has no reader or no space, all of it is dropped, with one warning: training
/// continues.
class Progress {
 public:
  enum class Style { kNone, kLines, kBar };

  /// kBar on a terminal (or under a launcher that says it draws on one), kLines elsewhere, and where TERM is "dumb" or
  /// CI is set; kNone for rank > 0 or quiet.
  static Style style_for(int rank, bool quiet);

  /// `log_every`: steps between two lines.
  Progress(Style style, const RunPlan& plan, std::int64_t log_every);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// While it lives, training stands still for an evaluation or a checkpoint after `step`.
  class Pause {
   public:
    Pause(Progress& progress, Pace::Pause what, std::int64_t step);
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    Progress& progress_;
    Pace::Pause what_;
    std::int64_t step_;
  };

  /// A line that stays: "training cnn on digits …".
  void announce(const std::string& line);
  void step(const StepReport& report);
  /// `best`: so far, of a run that looks for it. Else the largest accuracy counts, or the least loss.
  void evaluation(const EvalReport& report, std::int64_t epoch, const std::optional<BestEvaluation>& best);
  /// At most one in ten seconds; the metrics file has all.
  void checkpoint(const CheckpointReport& report);
  /// Nothing where nothing was saved.
  void saved(const std::optional<session::SavedFile>& file);
  /// There is no bar from here on.
  void summary(const Summary& summary);

 private:
  // With mutex_ held.
  void say(const std::string& lines);
  void put(std::string_view text);
  void draw(Clock::time_point now);
  void clear();
  Standing standing(Clock::time_point now) const;
  /// ", the best so far", or which one is.
  std::string compare(const EvalReport& report, const std::optional<BestEvaluation>& best);

  void follow_terminal();
  void warn_of_failure();
  static void clear_current();

  const Style style_;
  const RunPlan plan_;
  const std::int64_t log_every_;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point next_checkpoint_{};  // when a line may follow the one before

  std::atomic<int> failure_ = 0;  // of writing to stdout: errno
  bool failure_told_ = false;

  std::mutex mutex_;  // for what follows
  Pace pace_{plan_, start_};
  std::optional<StepReport> latest_;
  std::string evaluated_, best_text_;
  std::optional<BestEvaluation> own_best_;
  bool of_average_ = false;  // evaluations of a moving average are the run's
  bool drawn_ = false;
  int columns_ = 0;                  // for which it was drawn
  Clock::time_point last_change_{};  // of the bar: drawn, or taken off
  bool ended_ = false;
  std::condition_variable wake_;
  std::thread thread_;
};

}  // namespace lockstep::trainer
