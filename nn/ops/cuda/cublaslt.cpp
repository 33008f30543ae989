#include "nn/ops/cuda/cublaslt.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "base/cuda/runtime.h"
#include "base/error.h"
#include "base/hash.h"

namespace lockstep::nn::cuda {
namespace {

cudaDataType_t type_of(DType dtype) {
  LOCKSTEP_ASSERT(dtype == DType::kF32 || is_half(dtype), "a product of {}", name_of(dtype));
  return dtype == DType::kF32 ? CUDA_R_32F : dtype == DType::kF16 ? CUDA_R_16F : CUDA_R_16BF;
}

template <class Pointer, class... Arguments>
CublasLtOwner<Pointer> make_owner(cublasStatus_t (*create)(Pointer*, Arguments...), cublasStatus_t (*destroy)(Pointer),
                                  const char* what, std::type_identity_t<Arguments>... arguments) {
  Pointer made = nullptr;
  check_cublaslt(create(&made, arguments...), what);
  return {made, destroy};
}

CublasLtOwner<cublasLtMatrixLayout_t> make_layout(DType dtype, const ColumnMajor& matrix, std::int64_t batch) {
  auto made =
      make_owner(cublaslt().layout_create, cublaslt().layout_destroy, "describing a matrix", type_of(dtype),
                 static_cast<std::uint64_t>(matrix.rows), static_cast<std::uint64_t>(matrix.columns), matrix.pitch);
  if (batch == 1) return made;
  const auto set = [&](cublasLtMatrixLayoutAttribute_t attribute, const auto& value) {
    check_cublaslt(cublaslt().layout_set(made.get(), attribute, &value, sizeof(value)), "describing matrices");
  };
  set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<std::int32_t>(batch));
  set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, matrix.pitch * matrix.columns);
  return made;
}

template <class T>
void set(const CublasLtOwner<cublasLtMatmulDesc_t>& desc, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  check_cublaslt(cublaslt().desc_set(desc.get(), attribute, &value, sizeof(value)), "describing a matrix product");
}

template <class T>
void set(const CublasLtOwner<cublasLtMatmulPreference_t>& preference, cublasLtMatmulPreferenceAttributes_t attribute,
         const T& value) {
  check_cublaslt(cublaslt().preference_set(preference.get(), attribute, &value, sizeof(value)),
                 "describing a matrix product");
}

cublasOperation_t turned(bool yes) { return yes ? CUBLAS_OP_T : CUBLAS_OP_N; }

}  // namespace

void check_cublaslt(cublasStatus_t status, const char* what, std::source_location where) {
  if (status == CUBLAS_STATUS_SUCCESS) [[likely]]
    return;
  throw CudaError(fmt::format("{} failed on {}: {} (cuBLAS status {})", what, current_gpu_text(),
                              cublaslt().status_text(status), static_cast<int>(status)),
                  "look at nvidia-smi and the kernel's log (dmesg) for that GPU", where);
}

CublasLtOwner<cublasLtHandle_t> make_cublaslt_handle() {
  return make_owner(cublaslt().create, cublaslt().destroy, "starting cuBLASLt");
}

ProductPlan::ProductPlan(const Product& product, const ProductOptions& options)
    : accumulate_(options.accumulate),
      has_bias_((options.epilogue & (CUBLASLT_EPILOGUE_BIAS | CUBLASLT_EPILOGUE_BGRADB)) != 0),
      has_saved_preactivation_(options.saved_preactivation_pitch > 0),
      desc_(make_owner(cublaslt().desc_create, cublaslt().desc_destroy, "describing a matrix product",
                       options.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F)),
      a_(make_layout(options.input, product.a, product.batch)),
      b_(make_layout(options.input, product.b, product.batch)),
      d_(make_layout(options.output, product.d, product.batch)) {
  set(desc_, CUBLASLT_MATMUL_DESC_TRANSA, turned(product.turn_a));
  set(desc_, CUBLASLT_MATMUL_DESC_TRANSB, turned(product.turn_b));
  set(desc_, CUBLASLT_MATMUL_DESC_EPILOGUE, options.epilogue);
  if (has_saved_preactivation_) set(desc_, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, options.saved_preactivation_pitch);
}

void ProductPlan::point_at(const ProductArrays& arrays) {
  if (has_bias_) set(desc_, CUBLASLT_MATMUL_DESC_BIAS_POINTER, arrays.bias);
  if (has_saved_preactivation_) set(desc_, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, arrays.saved_preactivation);
}

std::optional<ProductPlan> ProductPlan::make(cublasLtHandle_t handle, const Product& product,
                                             const ProductOptions& options, const ProductArrays& arrays,
                                             std::size_t most_workspace_bytes, int most_kernels) {
  const CublasLt& library = cublaslt();
  std::optional<ProductPlan> plan(std::in_place, product, options);
  plan->point_at(arrays);  // their alignment is looked at
  const auto preference =
      make_owner(library.preference_create, library.preference_destroy, "describing a matrix product");
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(most_workspace_bytes));
  // Sums that are cut into parts are put together in f32, in a step of their own: always in the same order, and not
  // rounded to 16 bits in between.
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(arrays.a));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(arrays.b));
  // There is no such preference for what the epilogue reads and writes beside the output: the least of them holds.
  const std::uint32_t outputs =
      std::min({alignment_of(arrays.d), alignment_of(arrays.bias), alignment_of(arrays.saved_preactivation)});
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, outputs);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, outputs);

  auto& found = plan->kernels_;
  found.resize(static_cast<std::size_t>(most_kernels));
  int count = 0;
  const cublasStatus_t status =
      library.heuristic(handle, plan->desc_.get(), plan->a_.get(), plan->b_.get(), plan->d_.get(), plan->d_.get(),
                        preference.get(), most_kernels, found.data(), &count);
  // Some versions call a combination that they do not have invalid.
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) return std::nullopt;
  check_cublaslt(status, "choosing a kernel for a matrix product");
  found.resize(static_cast<std::size_t>(count));
  std::erase_if(found, [](const auto& kernel) { return kernel.state != CUBLAS_STATUS_SUCCESS; });
  if (found.empty()) return std::nullopt;
  return plan;
}

// By place and content: the content is documented to be the same in all processes.
std::vector<std::string> ProductPlan::kernels() const {
  std::vector<std::string> names;
  for (const auto& kernel : kernels_)
    names.push_back(fmt::format("{}:{:08x}", names.size(), crc32c(std::as_bytes(std::span(kernel.algo.data)))));
  return names;
}

std::string describe(const Product& product, const ProductOptions& options, const ProductArrays& arrays) {
  const auto matrix = [](const ColumnMajor& of, bool turn, const void* array) {
    return fmt::format("{}x{}/{}{}@{}", of.rows, of.columns, of.pitch, turn ? "t" : "", alignment_of(array));
  };
  return fmt::format("product{} {} {} {}, {} to {}{}{}, epilogue {} {} @{} @{}",
                     product.batch > 1 ? fmt::format(" of {}", product.batch) : "",
                     matrix(product.a, product.turn_a, arrays.a), matrix(product.b, product.turn_b, arrays.b),
                     matrix(product.d, false, arrays.d), name_of(options.input), name_of(options.output),
                     options.tf32 ? " in tf32" : "", options.accumulate ? ", added" : "",
                     static_cast<int>(options.epilogue), options.saved_preactivation_pitch, alignment_of(arrays.bias),
                     alignment_of(arrays.saved_preactivation));
}

void ProductPlan::run(cublasLtHandle_t handle, const ProductArrays& arrays, void* workspace, StreamView stream) {
  point_at(arrays);
  constexpr float kOne = 1.0f, kZero = 0.0f;
  check_cublaslt(cublaslt().matmul(handle, desc_.get(), &kOne, arrays.a, a_.get(), arrays.b, b_.get(),
                                   accumulate_ ? &kOne : &kZero, arrays.d, d_.get(), arrays.d, d_.get(),
                                   &kernels_[taken_].algo, workspace, workspace_bytes(), native(stream)),
                 "a matrix product");
}

}  // namespace lockstep::nn::cuda
