// A rank that does not come to the store over MPI.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "base/error.h"
#include "comm/mpi/mpi_store.h"
#include "tests/support/ranks.h"
#include "tests/support/refusal.h"

namespace lockstep::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

TEST(MpiStoreFaults, ARankThatDoesNotComeIsNamed) {
  MpiStore store(testing::world(), Deadline::after(20s));
  const int last = store.size() - 1;
  if (store.rank() == last) {
    std::this_thread::sleep_for(2s);
  } else {
    const auto attempt = [&] {
      return testing::thrown<TimeoutError>([&] { store.barrier("the start", Deadline::after(500ms)); }).line();
    };
    const std::string line = attempt();
    EXPECT_THAT(line, AllOf(HasSubstr("the start timed out after "),
                            HasSubstr(fmt::format("waiting for rank {} (host ", last))));
    EXPECT_EQ(attempt(), line);
  }
  MPI_Finalize();
}

}  // namespace
}  // namespace lockstep::comm
