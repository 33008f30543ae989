// cuDNN's recurrent layers in software: what can be set about them and what they have counted.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::soft_cuda {

struct CudnnRnnSettings {
  std::size_t version = 91900;
  /// Weights lie in reverse, with gaps that hold what nobody has written; otherwise all in one row, as cuDNN has them
  /// on the GPUs that there are.
  bool scattered = true;
  /// By cudnnRNNAlgo_t, a bit each: the existing ones; ones that refuse to run; ones with other bits each time; slow
  /// ones.
  std::uint32_t algorithms = 1, refusing = 0, unrepeatable = 0, slow = 0;
};

/// For plans that are made from now on.
void set_cudnn_rnn(const CudnnRnnSettings& settings);

struct CudnnRnnCounts {
  std::int64_t live = 0;  // handles and descriptors
  std::uint64_t forwards = 0, backwards = 0, weight_gradients = 0;
  std::uint64_t bf16 = 0;  // forwards of that type
  int last_algorithm = 0;  // cudnnRNNAlgo_t
};
CudnnRnnCounts cudnn_rnn_counts();

}  // namespace lockstep::soft_cuda
