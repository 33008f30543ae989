// Ranks whose loops do not run the same steps. Every test leaves its group broken, so each one is run in processes of
// its own: see CMakeLists.txt.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include "base/error.h"
#include "lockstep/comm/make_group.h"
#include "lockstep/ddp/reducer.h"
#include "tests/support/ranks.h"

namespace lockstep::ddp {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class OutOfStep : public ::testing::Test {
 protected:
  void SetUp() override {
    comm::GroupOptions options = testing::group_options();
    options.timeout_seconds = 30;
    group_ = comm::make_group(testing::world(), options);
    reducer_.emplace(*group_, std::vector<SlotSpec>{{"a", 3000}, {"b", 5000}, {"c", 7}},
                     BucketLimits{.first_bucket_bytes = 1 << 10, .bucket_bytes = 1 << 10});
  }

  // mpirun wants a word of farewell from every rank.
  void TearDown() override {
    reducer_.reset();
    group_.reset();
    int started = 0;
    MPI_Initialized(&started);
    if (started != 0) MPI_Finalize();
  }

  bool is_last() const { return group_->rank() == group_->size() - 1; }

  void run(std::int64_t step) {
    reached_ = step;
    reducer_->begin_step(step);
    for (std::size_t slot = 0; slot < reducer_->slots(); ++slot) reducer_->mark_ready(slot);
    reducer_->finish({}, [](auto) {});
  }

  std::unique_ptr<comm::ProcessGroup> group_;
  std::optional<Reducer> reducer_;
  std::int64_t reached_ = 0;
};

TEST_F(OutOfStep, AStepLeftOut) {
  std::string what;
  try {
    for (std::int64_t step = 1; step <= 100; ++step)
      if (step != 5 || !is_last()) run(step);
    group_->shutdown();
    FAIL() << "nobody has seen it";
  } catch (const OutOfStepError& error) {
    what = error.what();
  }
  EXPECT_LE(reached_, 6) << "no gradients of other steps are summed";
  EXPECT_THAT(what, AllOf(HasSubstr("step 5, bucket 0"), HasSubstr("step 6, bucket 0")));
  if (!is_last()) {
    EXPECT_THAT(what, HasSubstr(fmt::format("rank {} (host ", group_->size() - 1)));
  }
}

}  // namespace
}  // namespace lockstep::ddp
