#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <array>

#include "base/cuda/library.h"
#include "nn/ops/cuda/cublaslt.h"

namespace lockstep::nn::cuda {
namespace {

constexpr int kMajor = CUDART_VERSION / 1000;
static_assert(kMajor == 12 || kMajor == 13, "a CUDA whose cuBLASLt has another name");
constexpr const char* kName = kMajor == 12 ? "libcublasLt.so.12" : "libcublasLt.so.13";

struct OpenedCublasLt {
  OpenedCublasLt()
      : library(
            "cuBLASLt", std::array<const char*, 1>{kName},
            fmt::format("install the CUDA {} libraries (libcublas-{}-{}), or name their directory in LD_LIBRARY_PATH",
                        kMajor, kMajor, CUDART_VERSION / 10 % 100)) {
    library.bind(functions.status_text, "cublasLtGetStatusString");
    library.bind(functions.version, "cublasLtGetVersion");
    library.bind(functions.create, "cublasLtCreate");
    library.bind(functions.destroy, "cublasLtDestroy");
    library.bind(functions.desc_create, "cublasLtMatmulDescCreate");
    library.bind(functions.desc_destroy, "cublasLtMatmulDescDestroy");
    library.bind(functions.desc_set, "cublasLtMatmulDescSetAttribute");
    library.bind(functions.layout_create, "cublasLtMatrixLayoutCreate");
    library.bind(functions.layout_destroy, "cublasLtMatrixLayoutDestroy");
    library.bind(functions.layout_set, "cublasLtMatrixLayoutSetAttribute");
    library.bind(functions.preference_create, "cublasLtMatmulPreferenceCreate");
    library.bind(functions.preference_destroy, "cublasLtMatmulPreferenceDestroy");
    library.bind(functions.preference_set, "cublasLtMatmulPreferenceSetAttribute");
    library.bind(functions.heuristic, "cublasLtMatmulAlgoGetHeuristic");
    library.bind(functions.matmul, "cublasLtMatmul");
  }
  SharedLibrary library;
  CublasLt functions;
};

}  // namespace

const CublasLt& cublaslt() {
  // Never closed: descriptors may be let go of as late as the program's end.
  static const OpenedCublasLt& opened = *new OpenedCublasLt;
  return opened.functions;
}

}  // namespace lockstep::nn::cuda
