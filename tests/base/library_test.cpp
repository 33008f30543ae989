#include "base/cuda/library.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "base/error.h"
#include "tests/support/refusal.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(SharedLibrary, MissingLibraryListsTheFilesTried) {
  constexpr std::array names = {"liblockstep-none.so.2", "liblockstep-none.so.1"};
  const auto error =
      testing::thrown<CudaError>([&] { const SharedLibrary library("NCCL", names, "install libnccl2"); });
  EXPECT_THAT(error.what(),
              AllOf(HasSubstr("cannot load NCCL: liblockstep-none.so.2: "), HasSubstr("; liblockstep-none.so.1: ")));
  EXPECT_EQ(error.remedy(), "install libnccl2");
  EXPECT_EQ(error.code(), static_cast<int>(ExitCode::kDevice));
}

TEST(SharedLibrary, OpensTheFirstExistingFileAndBindsItsFunctions) {
  constexpr std::array names = {"liblockstep-none.so.2", "libm.so.6"};
  const SharedLibrary library("the mathematics library", names, "");
  double (*root)(double) = nullptr;
  library.bind(root, "sqrt");
  EXPECT_EQ(root(16.0), 4.0);
}

TEST(SharedLibrary, MissingFunctionIsNamed) {
  constexpr std::array names = {"libm.so.6"};
  const SharedLibrary library("cuDNN", names, "");
  const auto error = testing::thrown<CudaError>([&] { library.symbol("cudnnNoSuchFunction"); });
  EXPECT_STREQ(error.what(), "cuDNN has no cudnnNoSuchFunction");
  EXPECT_EQ(error.remedy(), "install a newer cuDNN");
}

}  // namespace
}  // namespace lockstep
