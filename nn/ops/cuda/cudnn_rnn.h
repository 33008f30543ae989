// cuDNN's recurrent layers: those of its functions that are called, and layers as plans.
#pragma once

#include <cudnn.h>

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/base/device.h"
#include "lockstep/base/dtype.h"
#include "lockstep/nn/ops/rnn.h"
#include "lockstep/nn/tensor/tensor.h"
#include "nn/ops/cuda/plan_choices.h"

namespace lockstep::nn::cuda {

struct CudnnRnn {
  decltype(&::cudnnGetVersion) version = nullptr;
  decltype(&::cudnnGetErrorString) status_text = nullptr;
  decltype(&::cudnnGetLastErrorString) last_error = nullptr;
  decltype(&::cudnnCreate) create = nullptr;
  decltype(&::cudnnDestroy) destroy = nullptr;
  decltype(&::cudnnSetStream) set_stream = nullptr;
  decltype(&::cudnnCreateTensorDescriptor) tensor_create = nullptr;
  decltype(&::cudnnDestroyTensorDescriptor) tensor_destroy = nullptr;
  decltype(&::cudnnSetTensorNdDescriptor) tensor_set = nullptr;
  decltype(&::cudnnGetTensorNdDescriptor) tensor_get = nullptr;
  decltype(&::cudnnCreateDropoutDescriptor) dropout_create = nullptr;
  decltype(&::cudnnDestroyDropoutDescriptor) dropout_destroy = nullptr;
  decltype(&::cudnnSetDropoutDescriptor) dropout_set = nullptr;
  decltype(&::cudnnCreateRNNDescriptor) rnn_create = nullptr;
  decltype(&::cudnnDestroyRNNDescriptor) rnn_destroy = nullptr;
  decltype(&::cudnnSetRNNDescriptor_v8) rnn_set = nullptr;
  decltype(&::cudnnBuildRNNDynamic) rnn_build_dynamic = nullptr;
  decltype(&::cudnnCreateRNNDataDescriptor) data_create = nullptr;
  decltype(&::cudnnDestroyRNNDataDescriptor) data_destroy = nullptr;
  decltype(&::cudnnSetRNNDataDescriptor) data_set = nullptr;
  decltype(&::cudnnGetRNNTempSpaceSizes) temp_space = nullptr;
  decltype(&::cudnnGetRNNWeightSpaceSize) weight_space = nullptr;
  decltype(&::cudnnGetRNNWeightParams) weight_params = nullptr;
  decltype(&::cudnnRNNForward) forward = nullptr;
  decltype(&::cudnnRNNBackwardData_v8) backward_data = nullptr;
  decltype(&::cudnnRNNBackwardWeights_v8) backward_weights = nullptr;
};

/// Of the library, which is opened at the first call and stays open. Throws CudaError where there is none.
const CudnnRnn& cudnn_rnn();

/// Throws CudaError naming `what`, this thread's GPU and cuDNN's own words, unless `status` is success.
void check_cudnn_rnn(cudnnStatus_t status, const std::string& what,
                     std::source_location where = std::source_location::current());

/// Owns one of cuDNN's handles or descriptors.
template <class Pointer>
using CudnnOwner = std::unique_ptr<std::remove_pointer_t<Pointer>, cudnnStatus_t (*)(Pointer)>;
/// For this thread's GPU, in `stream`.
CudnnOwner<cudnnHandle_t> make_cudnn_rnn_handle(StreamView stream);

/// What cuDNN can do a layer by: kernels for each step, or ones that keep the weights on the multiprocessors through
/// all steps, of which each takes some shapes. Their numbers are cuDNN's.
struct RnnAlgorithm {
  cudnnRNNAlgo_t native;
  const char* name;
};
inline constexpr std::array<RnnAlgorithm, 4> kRnnAlgorithms = {
    {{CUDNN_RNN_ALGO_STANDARD, "standard"},
     {CUDNN_RNN_ALGO_PERSIST_STATIC, "persistent"},
     {CUDNN_RNN_ALGO_PERSIST_STATIC_SMALL_H, "persistent, few features"},
     {CUDNN_RNN_ALGO_PERSIST_DYNAMIC, "persistent, compiled"}}};

/// A layer as in rnn.h from the first step to the last, as cuDNN is asked for it. Nothing is empty.
struct RnnProblem {
  RnnCell cell = RnnCell::kLstm;
  DType dtype = DType::kF32;  // of all arrays
  bool tf32 = false;          // f32 products may be rounded to 10 bits of mantissa
  bool training = false;      // backward will follow
  std::int64_t samples = 0, steps = 0, inputs = 0, width = 0;

  PlanKey key() const;
  /// "an LSTM of 256 to 256 features over [8, 128], bf16"
  std::string describe() const;
};

/// A stretch of a weight space: elements of one of the parameters, 0 to 3 in the order of RnnWeights.
struct WeightPiece {
  std::size_t parameter = 0;
  std::int64_t first = 0, count = 0;  // elements of the parameter
  std::size_t offset = 0;             // bytes from the begin of the space

  friend bool operator==(const WeightPiece&, const WeightPiece&) = default;
};

/// Where a layer finds its numbers; nullptr where it has none. Forward does not read dy, dx.
struct RnnArrays {
  const void* x = nullptr;
  void* y = nullptr;
  const void* h_first = nullptr;
  const void* c_first = nullptr;
  void* h_last = nullptr;
  void* c_last = nullptr;
  const void* dy = nullptr;
  void* dx = nullptr;
  const void* weights = nullptr;  // a weight space
  void* workspace = nullptr;
  void* reserve = nullptr;
};

/// All descriptors of a layer for cuDNN. Running it queries the library for nothing and allocates nothing of ours.
class RnnPlan {
 public:
  /// Nothing where this cuDNN does not compute in the problem's type, or not by this algorithm, as far as it says so
  /// before it runs. `allocator` provides memory while it is made. Throws CudaError.
  static std::optional<RnnPlan> make(cudnnHandle_t handle, const RnnProblem& problem, CachingAllocator& allocator,
                                     const RnnAlgorithm& algorithm = kRnnAlgorithms[0]);

  std::size_t workspace_bytes() const { return workspace_bytes_; }
  std::size_t reserve_bytes() const { return reserve_bytes_; }
  std::size_t weight_bytes() const { return weight_bytes_; }
  /// All parameters, in as few pieces as there are gaps between them.
  const std::vector<WeightPiece>& pieces() const { return pieces_; }

  void forward(cudnnHandle_t handle, const RnnArrays& arrays) const;
  /// dx, which must be there; comes before backward_weights(), which reads what this leaves in the reserve space.
  void backward_data(cudnnHandle_t handle, const RnnArrays& arrays) const;
  /// Added to what `gradients`, a weight space, holds.
  void backward_weights(cudnnHandle_t handle, const RnnArrays& arrays, void* gradients) const;

 private:
  explicit RnnPlan(const RnnProblem& problem);
  bool describe_to(cudnnHandle_t handle, const RnnAlgorithm& algorithm);
  void find_weights(cudnnHandle_t handle, std::byte* space);

  RnnProblem problem_;
  CudnnOwner<cudnnDropoutDescriptor_t> dropout_;
  CudnnOwner<cudnnRNNDescriptor_t> rnn_;
  CudnnOwner<cudnnRNNDataDescriptor_t> x_, y_;
  CudnnOwner<cudnnTensorDescriptor_t> state_;
  std::size_t workspace_bytes_ = 0, reserve_bytes_ = 0, weight_bytes_ = 0;
  std::vector<WeightPiece> pieces_;
};

}  // namespace lockstep::nn::cuda
