// cuBLASLt: those of its functions that are called, and its products as plans.
#pragma once

#include <cublasLt.h>

#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/base/device.h"
#include "lockstep/base/dtype.h"
#include "nn/ops/cuda/product.h"

namespace lockstep::nn::cuda {

struct CublasLt {
  decltype(&::cublasLtGetStatusString) status_text = nullptr;
  decltype(&::cublasLtGetVersion) version = nullptr;
  decltype(&::cublasLtCreate) create = nullptr;
  decltype(&::cublasLtDestroy) destroy = nullptr;
  decltype(&::cublasLtMatmulDescCreate) desc_create = nullptr;
  decltype(&::cublasLtMatmulDescDestroy) desc_destroy = nullptr;
  decltype(&::cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&::cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&::cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&::cublasLtMatrixLayoutSetAttribute) layout_set = nullptr;
  decltype(&::cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&::cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&::cublasLtMatmul) matmul = nullptr;
};

/// Of the library, which is opened at the first call and stays open. Throws CudaError where there is none.
const CublasLt& cublaslt();

/// Throws CudaError naming `what`, this thread's GPU and cuBLASLt's own words, unless `status` is success.
void check_cublaslt(cublasStatus_t status, const char* what,
                    std::source_location where = std::source_location::current());

/// Owns one of cuBLASLt's handles or descriptors.
template <class Pointer>
using CublasLtOwner = std::unique_ptr<std::remove_pointer_t<Pointer>, cublasStatus_t (*)(Pointer)>;
/// For this thread's GPU.
CublasLtOwner<cublasLtHandle_t> make_cublaslt_handle();

/// Where a product finds its numbers. Those that it does not have are nullptr.
struct ProductArrays {
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;
  const void* bias = nullptr;  // a number for each row of d, of d's type; with BGRADB for each column, and written
  void* saved_preactivation =
      nullptr;  // of an activation: a bit for each element of d, or for GELU what it is taken of
};

struct ProductOptions {
  DType input = DType::kF32;   // of a and b
  DType output = DType::kF32;  // of d
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  bool accumulate = false;  // d += …
  bool tf32 = false;
  // From what is kept of one column to that of the next: bits, a multiple of 128, or for GELU elements, a multiple
  // of 8.
  std::int64_t saved_preactivation_pitch = 0;
};

/// A product that cuBLASLt has chosen kernels for, each of which gives the same bits each time and sums in f32. Running
/// one asks the library nothing and allocates nothing.
class ProductPlan {
 public:
  /// For arrays that are aligned as these are; no other use is made of them. Nothing where cuBLASLt has no kernel for
  /// it. It takes the first of at most so many. Throws CudaError.
  static std::optional<ProductPlan> make(cublasLtHandle_t handle, const Product& product, const ProductOptions& options,
                                         const ProductArrays& arrays, std::size_t most_workspace_bytes,
                                         int most_kernels = 1);

  /// Of the kernels that there are, the library's favourite first: the same in each run with one version of the library
  /// and one GPU.
  std::vector<std::string> kernels() const;
  /// Which of them run() starts.
  void take(std::size_t kernel) { taken_ = kernel; }

  std::size_t workspace_bytes() const { return kernels_[taken_].workspaceSize; }
  void run(cublasLtHandle_t handle, const ProductArrays& arrays, void* workspace, StreamView stream);

  /// What is said to the library about a product, without asking it for a kernel: no GPU is needed.
  ProductPlan(const Product& product, const ProductOptions& options);

 private:
  void point_at(const ProductArrays& arrays);

  bool accumulate_, has_bias_, has_saved_preactivation_;
  CublasLtOwner<cublasLtMatmulDesc_t> desc_;
  CublasLtOwner<cublasLtMatrixLayout_t> a_, b_, d_;
  std::vector<cublasLtMatmulHeuristicResult_t> kernels_;
  std::size_t taken_ = 0;
};

/// A product for which kernels are noted (Note [Autotuning]): everything that the library's choice may depend on.
std::string describe(const Product& product, const ProductOptions& options, const ProductArrays& arrays);

}  // namespace lockstep::nn::cuda
