#include "lockstep/session/session.h"
#include "session/opening.h"

#include <gtest/gtest.h>

#include "lockstep/base/env.h"
#include "tests/support/ranks.h"

namespace lockstep::session {
namespace {

// A process can join its ranks once.
TEST(Session, OnTheCpu) {
  unset_env("CUDA_DEVICE_ORDER");
  const bool inline_mpi = env("LOCKSTEP_TEST_GROUP") == "inline" && testing::world().size > 1;
  SessionOptions options;
  options.device = "cpu";
  options.threads = 1;
  if (inline_mpi) options.backend = "mpi";
  Session session = open_session(options, {});
  EXPECT_EQ(session.device, Device{});
  EXPECT_EQ(session.backend->device(), Device{});
  EXPECT_EQ(session.threads, 1);
  EXPECT_EQ(session.gradient_group, nullptr);
  EXPECT_EQ(&session.gradients(), session.group.get());
  EXPECT_EQ(session.group->size(), session.world.size);
  // NVML's order, for who asks CUDA later.
  EXPECT_EQ(env("CUDA_DEVICE_ORDER"), "PCI_BUS_ID");
  EXPECT_EQ(session.mean(session.world.rank), (session.world.size - 1) / 2.0);
  session.shutdown();
}

}  // namespace
}  // namespace lockstep::session
