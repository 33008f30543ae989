// main() of tests that need a GPU: without one they are skipped, and say why.
#include <gtest/gtest.h>

#include <cstdio>

#include "lockstep/base/device.h"

namespace {
constexpr int kSkipped = 77;  // lockstep_test() sets it for ctest
}

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (const lockstep::CudaProbe& probe = lockstep::probe_cuda(); probe.devices == 0) {
    std::printf("skipped: %s\n", probe.problem.c_str());
    return kSkipped;
  }
  return RUN_ALL_TESTS();
}
