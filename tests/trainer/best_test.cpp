#include "trainer/best.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"

namespace lockstep::trainer {
namespace {

EvalReport report(std::int64_t step, double loss, double accuracy) {
  EvalReport made;
  made.step = step;
  made.loss = loss;
  made.accuracy = accuracy;
  return made;
}

BestWatch watch_of(const std::string& metric, std::int64_t patience) {
  TrainConfig config;
  config.save_best = metric;
  config.patience = patience;
  return BestWatch(config);
}

TEST(BestWatch, FollowsItsMetric) {
  BestWatch accuracy = watch_of("accuracy", 0), loss = watch_of("", 0), largest = watch_of("loss:max", 0),
            perplexity = watch_of("perplexity", 0);
  for (const auto& each : {report(1, 2.0, 0.5), report(2, 1.0, 0.4), report(3, 3.0, 0.5)}) {
    accuracy.follow(each);
    loss.follow(each);
    largest.follow(each);
    perplexity.follow(each);
  }
  EXPECT_EQ(accuracy.history().best, (BestEvaluation{"accuracy", 0.5, 1})) << "as good is not better";
  EXPECT_EQ(loss.history().best, (BestEvaluation{"loss", 1.0, 2}));
  EXPECT_EQ(largest.history().best, (BestEvaluation{"loss", 3.0, 3}));
  EXPECT_EQ(perplexity.history().best, (BestEvaluation{"perplexity", std::exp(1.0), 2}));
}

TEST(BestWatch, TakesNoNaNForTheBest) {
  BestWatch watch = watch_of("accuracy", 2);
  EXPECT_FALSE(watch.follow(report(1, 1.0, std::nan(""))));
  EXPECT_FALSE(watch.history().best.has_value());
  EXPECT_TRUE(watch.follow(report(2, 1.0, 0.0)));
}

TEST(BestWatch, GivesUpAfterItsPatience) {
  BestWatch watch = watch_of("loss", 2);
  EXPECT_TRUE(watch.follow(report(1, 1.0, 0)));
  EXPECT_FALSE(watch.follow(report(2, 1.5, 0)));
  EXPECT_FALSE(watch.gives_up());
  EXPECT_TRUE(watch.follow(report(3, 0.5, 0)));
  watch.follow(report(4, 0.5, 0));
  watch.follow(report(5, 0.6, 0));
  EXPECT_TRUE(watch.gives_up());
}

TEST(BestWatch, ContinuesFromACheckpoint) {
  BestWatch watch = watch_of("loss", 3);
  watch.restore({.best = BestEvaluation{"loss", 0.5, 7}, .since_best = 2});
  EXPECT_FALSE(watch.follow(report(9, 0.6, 0)));
  EXPECT_TRUE(watch.gives_up());
  EXPECT_EQ(watch.history_before().since_best, 2);
  BestWatch other = watch_of("accuracy", 3);
  other.restore({.best = BestEvaluation{"loss", 0.5, 7}, .since_best = 2});
  EXPECT_FALSE(other.history().best.has_value()) << "another metric's";
}

// What torch.optim.lr_scheduler.ReduceLROnPlateau(factor=0.5, patience=1, threshold=0.1) makes of these losses.
TEST(BestWatch, LowersTheRateAtAPlateau) {
  TrainConfig config;
  config.schedule = "plateau";
  config.lr = 1.0;
  config.schedule_settings = {{"gamma", 0.5}, {"plateau-patience", 1}, {"plateau-threshold", 0.1}, {"min-lr", 0.2}};
  EXPECT_TRUE(watches_evaluations(config));
  BestWatch watch(config);
  const nn::LearningRate rate = schedule_of(config, 100, 1);
  const double losses[] = {1.0, 0.95, 0.91, 0.91, std::nan(""), 0.5, 0.44, 0.46, 0.46, 0.46};
  const std::int64_t wanted[] = {0, 0, 1, 1, 2, 2, 2, 2, 3, 3};
  for (std::size_t i = 0; i < std::size(losses); ++i) {
    watch.follow(report(static_cast<std::int64_t>(i) + 1, losses[i], 0));
    EXPECT_EQ(watch.history().reductions, wanted[i]) << "after evaluation " << i + 1;
  }
  EXPECT_EQ(watch.history().least_loss, 0.44);
  BestWatch again(config);
  again.restore(watch.history());
  again.follow(report(11, 0.46, 0));
  EXPECT_EQ(again.history().reductions, 4);
  EXPECT_EQ(again.history_before().reductions, 3);
  EXPECT_DOUBLE_EQ(rate.at(50, 1), 0.5);
  EXPECT_DOUBLE_EQ(rate.at(50, 4), 0.2) << "no lower than --min-lr";
  EXPECT_FALSE(watches_evaluations({}));
}

TEST(BestWatch, KnowsTheBestFew) {
  TrainConfig config;
  config.save_best = "accuracy";
  config.keep_best = 2;
  EXPECT_TRUE(watches_evaluations(config));
  BestWatch watch(config);
  const double accuracies[] = {0.5, 0.7, std::nan(""), 0.7, 0.6, 0.8};
  for (std::size_t i = 0; i < std::size(accuracies); ++i)
    watch.follow(report(static_cast<std::int64_t>(i) + 1, 1, accuracies[i]));
  const std::vector<BestEvaluation> best = {{"accuracy", 0.8, 6}, {"accuracy", 0.7, 2}};
  EXPECT_EQ(watch.history().kept, best) << "of equal ones the older";
  EXPECT_EQ(watch.history_before().kept.front().step, 2);
  EXPECT_EQ(describe(best), "step 6 (accuracy 0.8), step 2 (accuracy 0.7)");
  BestWatch again(config);
  again.restore(watch.history());
  EXPECT_EQ(again.history().kept, best);
  config.save_best = "loss";
  BestWatch other(config);
  other.restore(watch.history());
  EXPECT_TRUE(other.history().kept.empty());
}

TEST(BestWatch, RefusesWhatNoEvaluationHas) {
  for (const char* metric : {"f1", "loss:", "loss:least", "accuracy:max:min"})
    EXPECT_THROW(watch_of(metric, 0), UsageError) << metric;
}

}  // namespace
}  // namespace lockstep::trainer
