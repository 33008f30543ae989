// What is said to cuDNN itself about a layer, as far as it listens without a GPU.
#include <gtest/gtest.h>

#include "base/error.h"
#include "nn/ops/cuda/cudnn_rnn.h"

namespace lockstep::nn::cuda {
namespace {

/// Without the library there is nobody to ask.
class CudnnRnnCalls : public ::testing::Test {
 protected:
  void SetUp() override {
    try {
      cudnn_rnn();
    } catch (const CudaError& error) {
      GTEST_SKIP() << error.what();
    }
  }
};

TEST_F(CudnnRnnCalls, HasAllFunctions) {
  const auto& cudnn = cudnn_rnn();
  EXPECT_GE(cudnn.version(), 90000u);
  EXPECT_NE(cudnn.forward, nullptr);
  EXPECT_NE(cudnn.backward_weights, nullptr);
}

TEST_F(CudnnRnnCalls, AcceptsLayerDescriptions) {
  const auto& cudnn = cudnn_rnn();
  const bool knows_bf16 = cudnn.version() >= 91300;
  for (const cudnnDataType_t type : {CUDNN_DATA_FLOAT, CUDNN_DATA_BFLOAT16})
    for (const cudnnMathType_t math : {CUDNN_DEFAULT_MATH, CUDNN_FMA_MATH}) {
      if (type == CUDNN_DATA_BFLOAT16 && (!knows_bf16 || math == CUDNN_FMA_MATH)) continue;
      for (const cudnnRNNMode_t mode : {CUDNN_RNN_TANH, CUDNN_RNN_RELU, CUDNN_LSTM, CUDNN_GRU}) {
        cudnnRNNDescriptor_t rnn = nullptr;
        ASSERT_EQ(cudnn.rnn_create(&rnn), CUDNN_STATUS_SUCCESS);
        EXPECT_EQ(cudnn.rnn_set(rnn, CUDNN_RNN_ALGO_STANDARD, mode, CUDNN_RNN_DOUBLE_BIAS, CUDNN_UNIDIRECTIONAL,
                                CUDNN_LINEAR_INPUT, type, CUDNN_DATA_FLOAT, math, 37, 33, 33, 1, nullptr,
                                CUDNN_RNN_PADDED_IO_ENABLED),
                  CUDNN_STATUS_SUCCESS);
        EXPECT_EQ(cudnn.rnn_destroy(rnn), CUDNN_STATUS_SUCCESS);
      }
      cudnnRNNDataDescriptor_t data = nullptr;
      ASSERT_EQ(cudnn.data_create(&data), CUDNN_STATUS_SUCCESS);
      const int lengths[] = {7, 7, 7};
      EXPECT_EQ(cudnn.data_set(data, type, CUDNN_RNN_DATA_LAYOUT_BATCH_MAJOR_UNPACKED, 7, 3, 37, lengths, nullptr),
                CUDNN_STATUS_SUCCESS);
      EXPECT_EQ(cudnn.data_destroy(data), CUDNN_STATUS_SUCCESS);
    }
}

}  // namespace
}  // namespace lockstep::nn::cuda
