#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "lockstep/base/device.h"
#include "lockstep/base/env.h"
#include "lockstep/base/job_secret.h"
#include "lockstep/comm/make_group.h"
#include "tests/support/ranks.h"

namespace lockstep::testing {
namespace {

std::unique_ptr<comm::ProcessGroup> g_below;  // of a layer
std::unique_ptr<comm::ProcessGroup> g_group;
std::unique_ptr<comm::ProcessGroup> (*g_make_layer)(comm::ProcessGroup& below) = nullptr;
comm::World g_world;
bool g_own_groups = false;
bool g_needs_gpu = false;

constexpr int kSkipped = 77;  // lockstep_test() sets it for ctest

/// Prints nothing but failures, with the rank that they belong to. While it hears of one, GoogleTest holds the lock
/// that its current_test_info() takes.
class FailurePrinter final : public ::testing::EmptyTestEventListener {
 public:
  explicit FailurePrinter(int rank) : rank_(rank) {}

 private:
  void OnTestStart(const ::testing::TestInfo& test) override {
    test_ = fmt::format("{}.{}", test.test_suite_name(), test.name());
  }
  void OnTestEnd(const ::testing::TestInfo&) override { test_ = "-"; }
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "[rank %d] %s failed at %s:%d\n%s\n", rank_, test_.c_str(),
                 result.file_name() ? result.file_name() : "?", result.line_number(), result.message());
  }

  int rank_;
  std::string test_ = "-";
};

/// Ranks other than 0 print failures alone: N copies of the same progress help nobody. And --gtest_output names one
/// file.
void quieten(int rank) {
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  if (rank == 0) return;
  delete listeners.Release(listeners.default_result_printer());
  delete listeners.Release(listeners.default_xml_generator());  // of JSON, too
  listeners.Append(new FailurePrinter(rank));
}

std::string test_group() { return env("LOCKSTEP_TEST_GROUP").value_or(g_world.size == 1 ? "inline" : ""); }

std::string expected_group() {
  const std::string value = test_group();
  if (value.starts_with("hosts")) return "hosts";
  return value == "shm" || value == "tcp" ? "shm" : "mpi";
}

/// True if the tests passed on every rank.
bool passed_everywhere(bool passed_here) {
  const auto passed = g_group->all_gather_numbers(passed_here ? 1 : 0);
  return std::ranges::find(passed, 0) == passed.end();
}

int run(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  g_world = comm::discover_world(env);
  if (test_group().ends_with("-encrypt")) g_world.rendezvous.secret = JobSecret::of_text("the secret of a test");
  set_log_identity(g_world.rank, g_world.size, host_name());
  quieten(g_world.rank);
  if (g_needs_gpu && probe_cuda().devices == 0) {
    std::printf("skipped: %s\n", probe_cuda().problem.c_str());
    return kSkipped;
  }
  if (g_own_groups) return RUN_ALL_TESTS();

  comm::GroupOptions options = group_options();
  options.timeout_seconds = 60;
  g_group = comm::make_group(g_world, options);
  LOCKSTEP_ASSERT(g_world.size == 1 || g_group->name() == expected_group(), "asked for another group");
  LOCKSTEP_ASSERT(g_group->encrypts() == options.encrypt);
  if (g_make_layer != nullptr) {
    g_below = std::move(g_group);
    g_group = g_make_layer(*g_below);
  }
  const bool passed = passed_everywhere(RUN_ALL_TESTS() == 0);
  for (auto* group : {&g_group, &g_below}) {
    if (*group == nullptr) continue;
    (*group)->shutdown();
    group->reset();
  }
  return passed ? 0 : 1;
}

}  // namespace

comm::ProcessGroup& group() {
  LOCKSTEP_ASSERT(g_group != nullptr, "this test has no group");
  return *g_group;
}
const comm::World& world() { return g_world; }

comm::GroupOptions group_options() {
  using Options = comm::GroupOptions;
  const std::string value = test_group();
  const bool hosts = value.starts_with("hosts");
  Options options;
  options.backend = value == "shm" || value == "tcp" ? "shm" : "mpi";
  if (hosts) options.backend = "auto";
  options.encrypt = value.ends_with("-encrypt");
  options.progress = value.ends_with("thread") ? Options::Progress::kThread : Options::Progress::kInline;
  if (value != "shm" && value != "tcp" && value != "thread" && value != "inline" && !hosts)
    throw UsageError(fmt::format("LOCKSTEP_TEST_GROUP={} is neither inline, thread, shm, tcp nor hosts…", value),
                     "set it: a test that took one of them by default would not show that it ran on the others");
  const bool without_mpi = value == "tcp" || (hosts && !value.ends_with("-mpi"));
  if (g_world.size > 1 && g_world.mpi_joins == without_mpi)
    throw UsageError(fmt::format("LOCKSTEP_TEST_GROUP={}, but MPI {} these ranks", value,
                                 g_world.mpi_joins ? "joins" : "does not join"),
                     "start them with tests/support/run_ranks");
  return options;
}

GroupLayer::GroupLayer(std::unique_ptr<comm::ProcessGroup> (*make)(comm::ProcessGroup& below)) { g_make_layer = make; }
NeedsGpu::NeedsGpu() { g_needs_gpu = true; }
OwnGroups::OwnGroups() { g_own_groups = true; }

}  // namespace lockstep::testing

int main(int argc, char** argv) {
  try {
    return lockstep::testing::run(argc, argv);
  } catch (const lockstep::Error& error) {
    lockstep::log_error("{}", error.line());
    return error.code();
  } catch (const std::exception& error) {
    lockstep::log_error("{}", error.what());
    return 1;
  }
}
