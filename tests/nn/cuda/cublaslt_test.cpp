// The installed cuBLASLt: all of its functions are found, and it takes what products are described with. No GPU needed.
#include "nn/ops/cuda/cublaslt.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "lockstep/base/device.h"

namespace lockstep::nn::cuda {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::StartsWith;

class InstalledCublasLt : public ::testing::Test {
 protected:
  void SetUp() override {
    try {
      cublaslt();
    } catch (const CudaError& error) {
      const std::string what = error.what();
      if (what.starts_with("cannot load")) GTEST_SKIP() << what;
      throw;  // one of its functions is missing
    }
  }
};

TEST_F(InstalledCublasLt, HasEveryFunction) {
  const CublasLt& library = cublaslt();
  const auto* const pointers = reinterpret_cast<void* const*>(&library);
  for (std::size_t i = 0; i < sizeof(library) / sizeof(void*); ++i) EXPECT_NE(pointers[i], nullptr) << "function " << i;
  EXPECT_STREQ(library.status_text(CUBLAS_STATUS_NOT_SUPPORTED), "the requested functionality is not supported");
}

TEST_F(InstalledCublasLt, TakesEveryDescription) {
  for (const DType input : {DType::kF32, DType::kBF16, DType::kF16})
    for (const DType output : {input, DType::kF32})
      for (const auto epilogue : {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_RELU_BIAS,
                                  CUBLASLT_EPILOGUE_RELU_AUX_BIAS, CUBLASLT_EPILOGUE_DRELU})
        for (const bool tf32 : {false, true}) {
          const ProductOptions options = {.input = input,
                                          .output = output,
                                          .epilogue = epilogue,
                                          .tf32 = tf32,
                                          .saved_preactivation_pitch = (epilogue & 128) != 0 ? 128 : 0};
          EXPECT_NO_THROW(ProductPlan(forward_product(3, 5, 7, 7), options));
          EXPECT_NO_THROW(ProductPlan(backward_input_product(3, 5, 7, 7), options));
          EXPECT_NO_THROW(ProductPlan(backward_weight_product(3, 5, 7, 7), options));
        }
}

TEST_F(InstalledCublasLt, WithoutAGpuItDoesNotStart) {
  if (probe_cuda().devices > 0) GTEST_SKIP() << "there is a GPU";
  EXPECT_THROW(make_cublaslt_handle(), CudaError);
}

TEST_F(InstalledCublasLt, ErrorsCarryItsWords) {
  try {
    check_cublaslt(CUBLAS_STATUS_NOT_SUPPORTED, "a matrix product");
    FAIL() << "no error";
  } catch (const CudaError& error) {
    EXPECT_THAT(error.what(), AllOf(StartsWith("a matrix product failed on "),
                                    EndsWith(": the requested functionality is not supported (cuBLAS status 15)")));
  }
}

}  // namespace
}  // namespace lockstep::nn::cuda
