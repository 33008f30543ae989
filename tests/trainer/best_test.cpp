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

TEST(BestWatch, FollowsItsMetric) {
  BestWatch accuracy("accuracy", 0), loss("", 0), largest("loss:max", 0), perplexity("perplexity", 0);
  for (const auto& each : {report(1, 2.0, 0.5), report(2, 1.0, 0.4), report(3, 3.0, 0.5)}) {
    accuracy.follow(each);
    loss.follow(each);
    largest.follow(each);
    perplexity.follow(each);
  }
  EXPECT_EQ(accuracy.best(), (BestEvaluation{"accuracy", 0.5, 1})) << "as good is not better";
  EXPECT_EQ(loss.best(), (BestEvaluation{"loss", 1.0, 2}));
  EXPECT_EQ(largest.best(), (BestEvaluation{"loss", 3.0, 3}));
  EXPECT_EQ(perplexity.best(), (BestEvaluation{"perplexity", std::exp(1.0), 2}));
}

TEST(BestWatch, TakesNoNaNForTheBest) {
  BestWatch watch("accuracy", 2);
  EXPECT_FALSE(watch.follow(report(1, 1.0, std::nan(""))));
  EXPECT_FALSE(watch.best().has_value());
  EXPECT_TRUE(watch.follow(report(2, 1.0, 0.0)));
}

TEST(BestWatch, GivesUpAfterItsPatience) {
  BestWatch watch("loss", 2);
  EXPECT_TRUE(watch.follow(report(1, 1.0, 0)));
  EXPECT_FALSE(watch.follow(report(2, 1.5, 0)));
  EXPECT_FALSE(watch.gives_up());
  EXPECT_TRUE(watch.follow(report(3, 0.5, 0)));
  watch.follow(report(4, 0.5, 0));
  watch.follow(report(5, 0.6, 0));
  EXPECT_TRUE(watch.gives_up());
}

TEST(BestWatch, ContinuesFromACheckpoint) {
  BestWatch watch("loss", 3);
  watch.restore(BestEvaluation{"loss", 0.5, 7}, 2);
  EXPECT_FALSE(watch.follow(report(9, 0.6, 0)));
  EXPECT_TRUE(watch.gives_up());
  BestWatch other("accuracy", 3);
  other.restore(BestEvaluation{"loss", 0.5, 7}, 2);
  EXPECT_FALSE(other.best().has_value()) << "another metric's";
}

TEST(BestWatch, RefusesWhatNoEvaluationHas) {
  for (const char* metric : {"f1", "loss:", "loss:least", "accuracy:max:min"})
    EXPECT_THROW(BestWatch(metric, 0), UsageError) << metric;
}

}  // namespace
}  // namespace lockstep::trainer
