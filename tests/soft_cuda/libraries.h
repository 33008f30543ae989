// cuBLASLt and cuDNN's recurrent layers in software, for the soft device: plain loops in f32, and errors where they are
// used otherwise than documented. What can be set about them, and what they have counted.
#pragma once

#include <cublasLt.h>

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace lockstep::soft_cuda {

/// Fails what the real one may fail: layouts that do not fit together, arrays that are aligned worse than was said when
/// the kernel was chosen, kernels chosen for something else, unknown attributes.
struct CublasLtSettings {
  bool relu_loses_nan = false;          // what is below the ReLU's zero, and what cannot be compared, becomes 0
  bool relu_loses_infinity = false;     // the largest finite number instead
  bool reverses_masks = false;          // the first bit of a mask's byte is the highest
  float gelu_error = 0.0f;              // that results and slopes of GELU are off by
  bool other_gelu = false;              // x / (1 + exp(-1.702 x))
  std::uint32_t refused_epilogues = 0;  // bits of cublasLtEpilogue_t: there is no kernel for what has one of them
  bool calls_refused_invalid = false;   // and says that it was asked wrongly
  std::uint64_t workspace_bytes = 0;    // that every kernel wants, and then fills with garbage
  int kernels = 1;                      // that there are for each product; all but one take `slow` longer
  int fastest_kernel = 0;
  cublasLtEpilogue_t slow_epilogue = CUBLASLT_EPILOGUE_DEFAULT;  // of products that are slow; the default: of none
  bool slow_odd_sizes = false;                                   // products that count as odd_sizes are
  std::chrono::milliseconds slow{3};
};
void set_cublaslt(const CublasLtSettings& settings);

struct CublasLtCounts {
  std::uint64_t heuristics = 0, products = 0;
  // Of products, those with a matrix whose columns do not all begin at multiples of 16 bytes if the first does: kernels
  // that read such a one are several times slower.
  std::uint64_t odd_pitches = 0;
  // Of products, those with a matrix whose columns are no multiple of 16 bytes long: these have slow kernels alone.
  std::uint64_t odd_sizes = 0;
  double multiplications = 0, odd_multiplications = 0;  // of all products, and of those
  std::uint64_t live = 0;                               // handles and descriptors that are not destroyed
  cublasLtEpilogue_t last_epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  cublasComputeType_t last_compute = CUBLAS_COMPUTE_32F;
  int last_kernel = 0;
};
CublasLtCounts cublaslt_counts();

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
