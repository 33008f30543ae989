// cuBLASLt's products for one backend: its handle, the workspace that all of them share, and the choice of kernels.
#pragma once

#include <optional>

#include "lockstep/base/function_ref.h"
#include "lockstep/nn/tensor/tensor.h"
#include "nn/ops/cuda/context.h"
#include "nn/ops/cuda/cublaslt.h"
#include "nn/ops/cuda/plan_choices.h"

namespace lockstep::nn::cuda {

/// Of plans for a layer of `in` inputs and `out` outputs whose results' rows are `pitch` elements apart; `option` is
/// what plans of one kind differ in beside sizes, types and alignments.
PlanKey product_key(std::int64_t n, std::int64_t in, std::int64_t out, std::int64_t pitch, DType dtype,
                    std::int64_t option, const ProductArrays& arrays);

class Products {
 public:
  explicit Products(Context& context);

  /// For arrays that are aligned as these are. Which of the library's kernels is taken, is timed where the context has
  /// choices (Note [Autotuning]): on these arrays, whose results are overwritten, but for sums. Nothing where the
  /// library has none.
  std::optional<ProductPlan> try_to_make(const Product& product, ProductOptions options, const ProductArrays& arrays);
  /// The same; CudaError where the library has none.
  ProductPlan make(const Product& product, const ProductOptions& options, const ProductArrays& arrays);
  void run(ProductPlan& plan, const ProductArrays& arrays);

  /// Whether `fused`, whose epilogue computes `what` too, takes clearly less time than `apart`, or no more where
  /// nothing is timed. What is timed beside products must have chosen its kernels before: `apart` is called first.
  bool is_faster(const char* what, const Product& product, const ProductOptions& options, const ProductArrays& arrays,
                 ProductPlan& fused, FunctionRef<void()> apart);

 private:
  void choose(ProductPlan& plan, const Product& product, const ProductOptions& options, const ProductArrays& arrays);
  void take_workspace(const ProductPlan& plan);

  Context& context_;
  CublasLtOwner<cublasLtHandle_t> handle_;
  Tensor workspace_;  // of all plans: they run one after the other
};

}  // namespace lockstep::nn::cuda
