// In place of nn/ops/cuda/cublaslt_library.cpp.
#include "tests/soft_cuda/libraries.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include "lockstep/base/dtype.h"
#include "nn/ops/cuda/cublaslt.h"
#include "tests/soft_cuda/soft_cuda.h"

namespace lockstep::soft_cuda {
namespace {

std::mutex mutex;
CublasLtSettings settings;
CublasLtCounts counted;

struct Layout {
  cudaDataType_t type;
  std::uint64_t rows, columns;
  std::int64_t pitch;
  std::int32_t batch = 1;
  std::int64_t batch_offset = 0;  // elements
};

struct Desc {
  cublasComputeType_t compute;
  std::int32_t turn_a = CUBLAS_OP_N, turn_b = CUBLAS_OP_N;
  std::uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  void* saved_preactivation = nullptr;
  std::int64_t saved_preactivation_pitch = 0;

  bool has(std::uint32_t bits) const { return (epilogue & bits) == bits; }
  bool has_gelu() const { return has(CUBLASLT_EPILOGUE_GELU) || epilogue == CUBLASLT_EPILOGUE_DGELU; }
};

struct Preference {
  std::uint64_t workspace = 0;
  std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
  std::uint32_t align_a = 256, align_b = 256, align_c = 256, align_d = 256;
};

// What a kernel was chosen for: it fits nothing else.
struct Choice {
  std::uint64_t problem = 0;
  std::uint32_t align_a = 0, align_b = 0, align_d = 0;  // the last is also that of what the epilogue reads and writes
  int kernel = 0;                                       // of CublasLtSettings::kernels
  std::uint64_t workspace = 0;
};
static_assert(sizeof(Choice) <= sizeof(cublasLtMatmulAlgo_t));

template <class Handle, class T, class... Arguments>
cublasStatus_t create(Handle* to, Arguments... arguments) {
  *to = reinterpret_cast<Handle>(new T{arguments...});
  const std::lock_guard lock(mutex);
  ++counted.live;
  return CUBLAS_STATUS_SUCCESS;
}

template <class T, class Handle>
cublasStatus_t destroy(Handle handle) {
  delete reinterpret_cast<T*>(handle);
  const std::lock_guard lock(mutex);
  --counted.live;
  return CUBLAS_STATUS_SUCCESS;
}

template <class T>
cublasStatus_t take(T& to, const void* from, std::size_t bytes) {
  if (from == nullptr || bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&to, from, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t set_desc(cublasLtMatmulDesc_t handle, cublasLtMatmulDescAttributes_t attribute, const void* from,
                        std::size_t bytes) {
  auto& desc = *reinterpret_cast<Desc*>(handle);
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return take(desc.turn_a, from, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB: return take(desc.turn_b, from, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return take(desc.epilogue, from, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return take(desc.bias, from, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return take(desc.saved_preactivation, from, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return take(desc.saved_preactivation_pitch, from, bytes);
    default: return CUBLAS_STATUS_INVALID_VALUE;
  }
}

cublasStatus_t set_preference(cublasLtMatmulPreference_t handle, cublasLtMatmulPreferenceAttributes_t attribute,
                              const void* from, std::size_t bytes) {
  auto& preference = *reinterpret_cast<Preference*>(handle);
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return take(preference.workspace, from, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return take(preference.reductions, from, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return take(preference.align_a, from, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return take(preference.align_b, from, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return take(preference.align_c, from, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return take(preference.align_d, from, bytes);
    default: return CUBLAS_STATUS_INVALID_VALUE;
  }
}

cublasStatus_t create_layout(cublasLtMatrixLayout_t* to, cudaDataType type, std::uint64_t rows, std::uint64_t columns,
                             std::int64_t pitch) {
  return create<cublasLtMatrixLayout_t, Layout>(to, type, rows, columns, pitch);
}

cublasStatus_t set_layout(cublasLtMatrixLayout_t handle, cublasLtMatrixLayoutAttribute_t attribute, const void* from,
                          std::size_t bytes) {
  auto& layout = *reinterpret_cast<Layout*>(handle);
  switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return take(layout.batch, from, bytes);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return take(layout.batch_offset, from, bytes);
    default: return CUBLAS_STATUS_INVALID_VALUE;
  }
}

const Layout& layout(cublasLtMatrixLayout_t handle) { return *reinterpret_cast<const Layout*>(handle); }

// One product as it was described.
struct Problem {
  Desc desc;
  Layout a, b, d;

  std::uint64_t inner() const { return desc.turn_a == CUBLAS_OP_T ? a.rows : a.columns; }

  // What the documentation asks for; of types, what is used here.
  bool is_sound() const {
    for (const Layout& matrix : {a, b, d})
      if (matrix.rows == 0 || matrix.columns == 0 || matrix.pitch < static_cast<std::int64_t>(matrix.rows))
        return false;
    if (d.batch < 1 || a.batch != d.batch || b.batch != d.batch) return false;
    if (d.batch > 1 &&
        (desc.epilogue != CUBLASLT_EPILOGUE_DEFAULT || d.batch_offset < d.pitch * static_cast<std::int64_t>(d.columns)))
      return false;
    const std::uint64_t m = desc.turn_a == CUBLAS_OP_T ? a.columns : a.rows;
    const std::uint64_t n = desc.turn_b == CUBLAS_OP_T ? b.rows : b.columns;
    const std::uint64_t inner_b = desc.turn_b == CUBLAS_OP_T ? b.columns : b.rows;
    const bool f32 = a.type == CUDA_R_32F && b.type == CUDA_R_32F && d.type == CUDA_R_32F;
    const bool half = (a.type == CUDA_R_16BF || a.type == CUDA_R_16F) && b.type == a.type &&
                      (d.type == a.type || d.type == CUDA_R_32F);
    if (m != d.rows || n != d.columns || inner() != inner_b || !(f32 || half)) return false;
    if (desc.compute != CUBLAS_COMPUTE_32F && !(f32 && desc.compute == CUBLAS_COMPUTE_32F_FAST_TF32)) return false;
    if ((desc.has(CUBLASLT_EPILOGUE_BIAS) || desc.epilogue == CUBLASLT_EPILOGUE_BGRADB) && desc.bias == nullptr)
      return false;
    if ((desc.epilogue & 128) != 0 &&
        (desc.saved_preactivation == nullptr || reinterpret_cast<std::uintptr_t>(desc.saved_preactivation) % 16 != 0 ||
         desc.saved_preactivation_pitch % (desc.has_gelu() ? 8 : 128) != 0 ||
         desc.saved_preactivation_pitch < static_cast<std::int64_t>(d.rows)))
      return false;
    for (const std::uint32_t known :
         {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_RELU_BIAS,
          CUBLASLT_EPILOGUE_RELU_AUX_BIAS, CUBLASLT_EPILOGUE_DRELU, CUBLASLT_EPILOGUE_GELU_BIAS,
          CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU, CUBLASLT_EPILOGUE_BGRADB})
      if (desc.epilogue == known) return true;
    return false;
  }

  bool has_odd_pitch() const {
    return std::ranges::any_of(std::array{a, b, d}, [](const Layout& matrix) {
      return matrix.columns > 1 && matrix.pitch * (matrix.type == CUDA_R_32F ? 4 : 2) % 16 != 0;
    });
  }

  bool has_odd_size() const {
    return std::ranges::any_of(std::array{a, b, d}, [](const Layout& matrix) {
      return matrix.rows * (matrix.type == CUDA_R_32F ? 4 : 2) % 16 != 0;
    });
  }

  double multiplications() const {
    return static_cast<double>(d.batch) * static_cast<double>(d.rows) * static_cast<double>(d.columns) *
           static_cast<double>(inner());
  }

  std::uint64_t hash() const {
    std::uint64_t all = 0x9e3779b97f4a7c15ull;
    const auto add = [&](std::uint64_t part) { all = (std::rotl(all, 13) ^ part) * 0xff51afd7ed558ccdull; };
    for (const Layout& matrix : {a, b, d}) {
      add(static_cast<std::uint64_t>(matrix.type));
      add(matrix.rows);
      add(matrix.columns);
      add(static_cast<std::uint64_t>(matrix.pitch));
      add(static_cast<std::uint64_t>(matrix.batch));
      add(static_cast<std::uint64_t>(matrix.batch_offset));
    }
    add(static_cast<std::uint64_t>(desc.compute));
    add(desc.epilogue);
    add(static_cast<std::uint64_t>(desc.turn_a) * 4 + static_cast<std::uint64_t>(desc.turn_b));
    add(static_cast<std::uint64_t>(desc.saved_preactivation_pitch));
    return all;
  }
};

float load(const void* from, cudaDataType_t type, std::uint64_t at) {
  if (type == CUDA_R_16F) return static_cast<const Float16*>(from)[at].to_float();
  return type == CUDA_R_32F ? static_cast<const float*>(from)[at] : static_cast<const BFloat16*>(from)[at].to_float();
}
void store(void* to, cudaDataType_t type, std::uint64_t at, float value) {
  if (type == CUDA_R_32F)
    static_cast<float*>(to)[at] = value;
  else if (type == CUDA_R_16F)
    static_cast<Float16*>(to)[at] = Float16::from_float(value);
  else
    static_cast<BFloat16*>(to)[at] = BFloat16::from_float(value);
}

float relu(float value, const CublasLtSettings& how) {
  if (std::isnan(value)) return how.relu_loses_nan ? 0.0f : value;
  if (value < 0) return 0.0f;
  return how.relu_loses_infinity ? std::min(value, std::numeric_limits<float>::max()) : value;
}

float logistic(float x) { return 1.0f / (1.0f + std::exp(-x)); }

float gelu(float x, const CublasLtSettings& how) {
  if (how.other_gelu) return x * logistic(1.702f * x);
  return x * logistic(1.59576912f * x * (1.0f + 0.044715f * x * x)) + how.gelu_error;
}
float gelu_slope(float x, const CublasLtSettings& how) {
  const float s = logistic(1.59576912f * x * (1.0f + 0.044715f * x * x));
  return s + x * s * (1.0f - s) * 1.59576912f * (1.0f + 3.0f * 0.044715f * x * x) + how.gelu_error;
}

std::uint64_t place(const Layout& matrix, std::uint64_t row, std::uint64_t column, bool turned) {
  if (turned) std::swap(row, column);
  return row + column * static_cast<std::uint64_t>(matrix.pitch);
}

float as_stored(cudaDataType_t type, float value) {
  store(&value, type, 0, value);
  return load(&value, type, 0);
}

// What an epilogue makes of a sum, and keeps. `rounds`: the sum becomes the result's type before the bias is added.
void apply_epilogue(const Problem& problem, const CublasLtSettings& how, bool rounds, float sum, std::uint64_t row,
                    std::uint64_t column, float beta, void* d) {
  const auto& [desc, of_a, of_b, of_d] = problem;
  const std::uint64_t at = place(of_d, row, column, false);
  if (beta != 0) sum += beta * load(d, of_d.type, at);
  if (rounds) sum = as_stored(of_d.type, sum);
  if (desc.has(CUBLASLT_EPILOGUE_BIAS)) sum += load(desc.bias, of_d.type, row);
  auto* const bits = static_cast<std::uint8_t*>(desc.saved_preactivation);
  const std::uint64_t kept = row + column * static_cast<std::uint64_t>(desc.saved_preactivation_pitch);
  const std::uint64_t bit = kept ^ (how.reverses_masks ? 7 : 0);
  if (desc.has(CUBLASLT_EPILOGUE_RELU_AUX)) {
    const auto one = static_cast<std::uint8_t>(1u << (bit % 8));
    bits[bit / 8] = static_cast<std::uint8_t>(sum >= 0 ? bits[bit / 8] | one : bits[bit / 8] & ~one);
  }
  if (desc.has(CUBLASLT_EPILOGUE_RELU)) sum = relu(sum, how);
  if (desc.epilogue == CUBLASLT_EPILOGUE_DRELU && (bits[bit / 8] >> (bit % 8) & 1) == 0) sum = 0;
  if (desc.has(CUBLASLT_EPILOGUE_GELU_AUX)) store(desc.saved_preactivation, of_d.type, kept, sum);
  if (desc.has(CUBLASLT_EPILOGUE_GELU)) sum = gelu(sum, how);
  if (desc.epilogue == CUBLASLT_EPILOGUE_DGELU) sum *= gelu_slope(load(desc.saved_preactivation, of_d.type, kept), how);
  store(d, of_d.type, at, sum);
}

void multiply(const Problem& problem, const CublasLtSettings& how, bool rounds, const void* a, const void* b,
              float beta, void* d) {
  const auto& [desc, of_a, of_b, of_d] = problem;
  const std::uint64_t rows = of_d.rows, inner = problem.inner();
  std::vector<float> all(inner * rows);
  for (std::uint64_t k = 0; k < inner; ++k)
    for (std::uint64_t row = 0; row < rows; ++row)
      all[k * rows + row] = load(a, of_a.type, place(of_a, row, k, desc.turn_a == CUBLAS_OP_T));
  std::vector<float> sums(rows);
  for (std::uint64_t column = 0; column < of_d.columns; ++column) {
    std::ranges::fill(sums, 0.0f);
    float whole = 0;
    for (std::uint64_t k = 0; k < inner; ++k) {
      const float factor = load(b, of_b.type, place(of_b, k, column, desc.turn_b == CUBLAS_OP_T));
      whole += factor;
      for (std::uint64_t row = 0; row < rows; ++row) sums[row] += all[k * rows + row] * factor;
    }
    if (desc.epilogue == CUBLASLT_EPILOGUE_BGRADB) store(const_cast<void*>(desc.bias), of_d.type, column, whole);
    for (std::uint64_t row = 0; row < rows; ++row)
      apply_epilogue(problem, how, rounds, sums[row], row, column, beta, d);
  }
}

cublasStatus_t heuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                         cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                         cublasLtMatmulPreference_t preference_handle, int wanted,
                         cublasLtMatmulHeuristicResult_t* results, int* found) {
  const std::lock_guard lock(mutex);
  ++counted.heuristics;
  *found = 0;
  const Problem problem = {*reinterpret_cast<const Desc*>(desc), layout(a), layout(b), layout(d)};
  const auto& preference = *reinterpret_cast<const Preference*>(preference_handle);
  if (handle == nullptr || wanted < 1 || c != d || !problem.is_sound()) return CUBLAS_STATUS_INVALID_VALUE;
  // Not asked for: sums put together in bf16, or in the result.
  if ((preference.reductions & ~std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE}) != 0)
    return CUBLAS_STATUS_INVALID_VALUE;
  if (preference.align_c != preference.align_d) return CUBLAS_STATUS_INVALID_VALUE;
  if ((problem.desc.epilogue & settings.refused_epilogues) != 0 || settings.workspace_bytes > preference.workspace)
    return settings.calls_refused_invalid ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_NOT_SUPPORTED;
  for (*found = 0; *found < std::min(wanted, settings.kernels); ++*found) {
    const Choice choice = {problem.hash(), preference.align_a,      preference.align_b, preference.align_d,
                           *found,         settings.workspace_bytes};
    cublasLtMatmulHeuristicResult_t& result = results[*found];
    result = {};
    std::memcpy(&result.algo, &choice, sizeof(choice));
    result.workspaceSize = settings.workspace_bytes;
    result.state = CUBLAS_STATUS_SUCCESS;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t matmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                      cublasLtMatrixLayout_t of_a, const void* b, cublasLtMatrixLayout_t of_b, const void* beta,
                      const void* c, cublasLtMatrixLayout_t, void* d, cublasLtMatrixLayout_t of_d,
                      const cublasLtMatmulAlgo_t* algorithm, void* workspace, std::size_t workspace_bytes,
                      cudaStream_t stream) {
  const std::lock_guard lock(mutex);
  const Problem problem = {*reinterpret_cast<const Desc*>(desc), layout(of_a), layout(of_b), layout(of_d)};
  if (handle == nullptr || algorithm == nullptr || c != d || *static_cast<const float*>(alpha) != 1.0f ||
      !problem.is_sound())
    return CUBLAS_STATUS_INVALID_VALUE;
  Choice choice;
  std::memcpy(static_cast<void*>(&choice), algorithm, sizeof(choice));
  const auto fits = [](const void* data, std::uint32_t alignment) {
    return reinterpret_cast<std::uintptr_t>(data) % alignment == 0;
  };
  if (choice.problem != problem.hash() || !fits(a, choice.align_a) || !fits(b, choice.align_b) ||
      !fits(d, choice.align_d) || !fits(problem.desc.bias, choice.align_d) ||
      !fits(problem.desc.saved_preactivation, choice.align_d) || workspace_bytes < choice.workspace)
    return CUBLAS_STATUS_INVALID_VALUE;
  if (choice.workspace > 0 && (workspace == nullptr || !fits(workspace, 256))) return CUBLAS_STATUS_INVALID_VALUE;
  ++counted.products;
  if (problem.has_odd_pitch()) ++counted.odd_pitches;
  counted.multiplications += problem.multiplications();
  if (problem.has_odd_size()) {
    ++counted.odd_sizes;
    counted.odd_multiplications += problem.multiplications();
  }
  counted.last_epilogue = static_cast<cublasLtEpilogue_t>(problem.desc.epilogue);
  counted.last_compute = problem.desc.compute;
  counted.last_kernel = choice.kernel;
  // As kernels of the real one do, see Note [Bounds of products].
  const bool rounds = problem.has_odd_pitch() || std::min({choice.align_a, choice.align_b, choice.align_d}) < 16;
  const cudaError_t status = submit(stream, [=, how = settings, factor = *static_cast<const float*>(beta)] {
    if (choice.workspace > 0) std::memset(workspace, 0x7f, choice.workspace);
    if ((how.kernels > 1 && choice.kernel != how.fastest_kernel) ||
        (how.slow_epilogue != CUBLASLT_EPILOGUE_DEFAULT && problem.desc.epilogue == how.slow_epilogue) ||
        (how.slow_odd_sizes && problem.has_odd_size()))
      std::this_thread::sleep_for(how.slow);
    const auto at = [](const auto* array, const Layout& matrix, std::int32_t i) {
      return static_cast<const std::byte*>(array) + i * matrix.batch_offset * (matrix.type == CUDA_R_32F ? 4 : 2);
    };
    for (std::int32_t i = 0; i < problem.d.batch; ++i)
      multiply(problem, how, rounds, at(a, problem.a, i), at(b, problem.b, i), factor,
               const_cast<std::byte*>(at(static_cast<const void*>(d), problem.d, i)));
  });
  return status == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

constexpr nn::cuda::CublasLt kFunctions = {
    .status_text = [](cublasStatus_t status) { return status == CUBLAS_STATUS_SUCCESS ? "success" : "refused"; },
    .version = [] { return std::size_t{1}; },
    .create = create<cublasLtHandle_t, int>,
    .destroy = destroy<int, cublasLtHandle_t>,
    .desc_create =
        [](cublasLtMatmulDesc_t* to, cublasComputeType_t compute, cudaDataType_t scale) {
          return scale == CUDA_R_32F ? create<cublasLtMatmulDesc_t, Desc>(to, compute) : CUBLAS_STATUS_INVALID_VALUE;
        },
    .desc_destroy = destroy<Desc, cublasLtMatmulDesc_t>,
    .desc_set = set_desc,
    .layout_create = create_layout,
    .layout_destroy = destroy<Layout, cublasLtMatrixLayout_t>,
    .layout_set = set_layout,
    .preference_create = create<cublasLtMatmulPreference_t, Preference>,
    .preference_destroy = destroy<Preference, cublasLtMatmulPreference_t>,
    .preference_set = set_preference,
    .heuristic = heuristic,
    .matmul = matmul,
};

}  // namespace

void set_cublaslt(const CublasLtSettings& wanted) {
  const std::lock_guard lock(mutex);
  settings = wanted;
}

CublasLtCounts cublaslt_counts() {
  const std::lock_guard lock(mutex);
  return counted;
}

}  // namespace lockstep::soft_cuda

namespace lockstep::nn::cuda {
const CublasLt& cublaslt() { return soft_cuda::kFunctions; }
}  // namespace lockstep::nn::cuda
