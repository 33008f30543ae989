#include <array>

#include "base/cuda/library.h"
#include "nn/ops/cuda/cublaslt.h"

namespace lockstep::nn::cuda {
namespace {

struct OpenedCublasLt {
  OpenedCublasLt()
      : library("cuBLASLt", std::array<const char*, 1>{"libcublasLt.so.13"},
                "install the CUDA 13 libraries (libcublas-13-0), or name their directory in LD_LIBRARY_PATH") {
    library.bind(functions.status_text, "cublasLtGetStatusString");
    library.bind(functions.create, "cublasLtCreate");
    library.bind(functions.destroy, "cublasLtDestroy");
    library.bind(functions.desc_create, "cublasLtMatmulDescCreate");
    library.bind(functions.desc_destroy, "cublasLtMatmulDescDestroy");
    library.bind(functions.desc_set, "cublasLtMatmulDescSetAttribute");
    library.bind(functions.layout_create, "cublasLtMatrixLayoutCreate");
    library.bind(functions.layout_destroy, "cublasLtMatrixLayoutDestroy");
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
