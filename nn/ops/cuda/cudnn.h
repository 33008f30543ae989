// cuDNN's convolutions and attention as plans. All that knows cuDNN's headers is in cudnn.cpp; what needs none of them
// is in cudnn_problems.cpp.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/device.h"
#include "lockstep/base/dtype.h"
#include "lockstep/nn/ops/conv.h"
#include "nn/ops/cuda/plan_choices.h"

namespace lockstep::nn::cuda {

/// A convolution as cuDNN is asked for it. x is (N, H, W, C), w (O, Kh, Kw, C / groups), y (N, H', W', O), b (O), as in
/// conv.h, none of them empty; all are of one type, also w's gradient, and lie at multiples of 16 bytes (Note
/// [Alignment for cuDNN]).
struct ConvProblem {
  enum class What : std::uint8_t {
    kForward,        // y = x * w, + b where `bias`, and then ReLU where `relu`
    kBackwardInput,  // x is the gradient that is computed, y the one that is given
    kBackwardWeight  // the same of w and y
  };
  What what = What::kForward;
  DType dtype = DType::kF32;
  Shape x, w, y;
  Window window;
  bool bias = false, relu = false;
  bool tf32 = false;  // f32 products may be rounded to 10 bits of mantissa

  PlanKey key() const;
  /// "the input's gradient of a 3x3 convolution of [64, 28, 28, 32] to [64, 28, 28, 64], bf16"
  std::string describe() const;
};

/// Where a convolution finds its numbers.
struct ConvArrays {
  void* x = nullptr;
  void* w = nullptr;
  void* y = nullptr;
  void* b = nullptr;  // nullptr: none
};

/// Attention in bf16 or f16 as cuDNN is asked for it, with queries, keys and values side by side: all as in
/// attention.h. Nothing is empty, and all arrays lie at multiples of 16 bytes.
struct AttentionProblem {
  enum class What : std::uint8_t { kForward, kBackward };
  What what = What::kForward;
  std::int64_t samples = 0, tokens = 0, heads = 0, width = 0;  // width: features of a head
  std::int64_t pitch = 0;  // elements from a row of queries, keys or values, and of their gradients, to the next
  bool causal = true;
  bool padded = false;         // samples have lengths
  bool deterministic = true;   // the same bits each time; forward has them always
  DType dtype = DType::kBF16;  // or kF16

  PlanKey key() const;
  /// "attention with 12 heads of 64 over [8, 1024], bf16"
  std::string describe() const;
};

/// Addresses of attention's operands. Forward has no gradients.
struct AttentionArrays {
  void* q = nullptr;
  void* k = nullptr;
  void* v = nullptr;
  void* y = nullptr;
  void* log_sums = nullptr;
  void* dy = nullptr;
  void* dq = nullptr;
  void* dk = nullptr;
  void* dv = nullptr;
  void* lengths = nullptr;  // where the problem is padded
};

class Cudnn;

/// A kernel that cuDNN has chosen: it gives the same bits each time, sums in f32, and rounds nothing more than the
/// problem allows. CUDA graphs of it need it to live on.
class ConvPlan {
 public:
  ConvPlan(ConvPlan&&) noexcept;
  ConvPlan& operator=(ConvPlan&&) noexcept;
  ~ConvPlan();

  std::size_t workspace_bytes() const;
  /// Which kernel of cuDNN's, with its parameters, and what cuDNN notes about its arithmetic: "eng40_k2=16 tensor
  /// core".
  std::string describe() const;
  /// In the order of `cudnn`'s stream. `workspace` is 256-byte aligned. Throws CudaError.
  void run(const Cudnn& cudnn, const ConvArrays& arrays, void* workspace) const;

 private:
  friend class Cudnn;
  friend class ConvKernelList;
  struct Chosen;
  explicit ConvPlan(std::unique_ptr<Chosen> chosen);
  std::unique_ptr<Chosen> chosen_;
};

/// The kernels that cuDNN has for a convolution and that are as exact, its favourite first.
class ConvKernelList {
 public:
  ConvKernelList(ConvKernelList&&) noexcept;
  ConvKernelList& operator=(ConvKernelList&&) noexcept;
  ~ConvKernelList();

  /// As ConvPlan::describe() has them: the same in each run with one version of cuDNN and one GPU.
  const std::vector<std::string>& names() const;
  /// Throws CudaError for one that this GPU does not take after all.
  ConvPlan build(std::size_t kernel);

 private:
  friend class Cudnn;
  struct Listed;
  explicit ConvKernelList(std::unique_ptr<Listed> listed);
  std::unique_ptr<Listed> listed_;
};

/// The same for attention, but that its bits are the same each time only where the problem wants it. One thread at a
/// time runs it.
class AttentionPlan {
 public:
  AttentionPlan(AttentionPlan&&) noexcept;
  AttentionPlan& operator=(AttentionPlan&&) noexcept;
  ~AttentionPlan();

  std::size_t workspace_bytes() const;
  std::string describe() const;
  /// Whether cuDNN notes that it is not deterministic: see Note [Attention of cuDNN] where it was asked to be.
  bool is_noted_nondeterministic() const;
  void run(const Cudnn& cudnn, const AttentionArrays& arrays, void* workspace);

 private:
  friend class Cudnn;
  struct Chosen;
  explicit AttentionPlan(std::unique_ptr<Chosen> chosen);
  std::unique_ptr<Chosen> chosen_;
};

/// The library, which is opened at the first use and stays open, on this thread's GPU. Throws CudaError where there is
/// none.
class Cudnn {
 public:
  explicit Cudnn(StreamView stream);
  ~Cudnn();  // NOLINT(performance-trivially-destructible): so on a GPU in software alone
  Cudnn(const Cudnn&) = delete;
  Cudnn& operator=(const Cudnn&) = delete;

  /// Throws CudaError where cuDNN has no kernel for it.
  ConvPlan plan(const ConvProblem& problem) const;
  /// At most so many. None where cuDNN has none.
  ConvKernelList kernels(const ConvProblem& problem, int most) const;
  AttentionPlan plan(const AttentionProblem& problem) const;
  /// For a GPU that need not be there, described as cuDNN does it (JSON, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION). It
  /// cannot be run.
  static ConvPlan plan_for(const std::string& device_properties, const ConvProblem& problem);
  static ConvKernelList kernels_for(const std::string& device_properties, const ConvProblem& problem, int most);
  /// `compute_capability`: 90 for 9.0, which cudnn-frontend would ask a GPU for.
  static AttentionPlan plan_for(const std::string& device_properties, int compute_capability,
                                const AttentionProblem& problem);
  /// "9.19.0"
  static std::string version();

 private:
  friend class ConvPlan;
  friend class AttentionPlan;
  void* handle_ = nullptr;
};

}  // namespace lockstep::nn::cuda
